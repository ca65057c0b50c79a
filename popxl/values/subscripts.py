"""Subscripts of an op, as for `einsum`: `"...ik,...kj->...ij"` relates dimensions of operands and results.

A letter is a dimension. `...` stands for any number of leading dimensions, which broadcast; `_` for a dimension that
the op does not treat element by element, such as that of a softmax, or that only results have; `(ab)` for one with the
factors `a` and `b`, the outer one first. Results are summed over letters that they lack.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import mul
from string import ascii_letters

Labels = tuple[tuple[str | int, ...], ...]
"""Factors of each dimension; none for `_`."""


@lru_cache(4096)
def parse(
    operands: tuple[str, ...], results: tuple[str, ...], ranks: tuple[int, ...]
) -> tuple[tuple[Labels, ...], tuple[Labels, ...]]:
    """Parse subscripts into labels of operands, given their ranks, and of results.

    Example:
        >>> parse(("ik", "kj"), ("ij",), (2, 2))[1]
        ((('i',), ('j',)),)
    """
    several = zip(map(_TOKEN.findall, operands), ranks, strict=True)
    leading = [(tokens, rank - len(tokens) + ("..." in tokens)) for tokens, rank in several]
    longest = max((count for _, count in leading), default=0)
    return (
        tuple(_labels(tokens, count) for tokens, count in leading),
        tuple(_labels(_TOKEN.findall(result), longest) for result in results),
    )


_TOKEN = re.compile(r"\.\.\.|\(\w+\)|\w")


def _labels(tokens: list[str], leading: int) -> Labels:
    factors = (
        [(n,) for n in range(-leading, 0)] if token == "..." else [() if token == "_" else tuple(token.strip("()"))]
        for token in tokens
    )
    return tuple(chain.from_iterable(factors))


def sum_subscripts(rank: int, axes: Collection[int], keepdims: bool = False) -> str:
    """Subscripts of a sum over some dimensions.

    Example:
        >>> sum_subscripts(3, (1,), keepdims=True)
        'abc->a_c'
    """
    letters = ascii_letters[:rank]
    return f"{letters}->{''.join('_' * keepdims if d in axes else letter for d, letter in enumerate(letters))}"


def permutation_subscripts(permutation: tuple[int, ...]) -> str:
    """Subscripts of a transpose.

    Example:
        >>> permutation_subscripts((2, 0, 1))
        'abc->cab'
    """
    return f"{ascii_letters[: len(permutation)]}->{''.join(ascii_letters[d] for d in permutation)}"


@lru_cache(1024)
def reshape_subscripts(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Subscripts of a reshape: common factors of both shapes; `_` for other dimensions, and dimensions of size 1.

    Example:
        >>> reshape_subscripts((5, 6), (5, 3, 2))
        'a(bc)->abc'
    """
    if before == after:
        return permutation_subscripts(tuple(range(len(before))))
    # The span of a dimension: products of the sizes up to it, without and with its own. Factors lie between limits.
    spans, new_spans = ([*pairwise((1, *accumulate(shape, mul)))] for shape in (before, after))
    ends, new_ends = ({end for _, end in each} for each in (spans, new_spans))
    limits = sorted({1} | ends | new_ends)
    if not all(limits) or any(larger % smaller for smaller, larger in pairwise(limits)):
        limits = sorted({1} | (ends & new_ends) - {0})
    unit_starts = {start for start, end in new_spans if start == end}  # which dimension begins there, on all replicas?
    result = "".join(_factors(*span, limits) for span in new_spans)
    letters = [_factors(*span, limits) for span in spans]
    operand = [
        factor if start not in unit_starts and {*factor} <= {*result, "(", ")"} else "_"
        for factor, (start, _) in zip(letters, spans, strict=True)
    ]
    return f"{''.join(operand)}->{result}"


def _factors(start: int, end: int, limits: list[int]) -> str:
    if start == end or start not in limits or end not in limits:
        return "_"
    letters = ascii_letters[limits.index(start) : limits.index(end)]
    return letters if len(letters) == 1 else f"({letters})"
