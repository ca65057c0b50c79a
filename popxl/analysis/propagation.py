"""Propagation of sharded and partial values through JAX functions, by the equations of their jaxprs.

So ops need not declare that they are linear, or the dimensions that they contract. Values are followed along one axis
of replicas, from equation to equation: a primitive is linear in an operand, moves its dimensions, or sums over some of
them. Unknown primitives leave shards along an unknown dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from popxl.analysis.replication import (
    FLAT,
    GIVEN,
    NONLINEAR_TERMS,
    OWN,
    PARTIAL,
    REPLICATED,
    SHARDED,
    TERMS,
    TERMS_PLUS_SHARED,
    VARYING,
    AxisType,
    join_axis,
)
from popxl.core.tracing import traces_in

Flaws = dict[str, None]
"""What is done to terms of a sum that their sum does not survive: "more" is added to each, or a function that is not
"linear" is taken of each."""

_ZERO: AxisType = (GIVEN, 0)
_SHARDS: AxisType = (SHARDED, None)
_SUM: AxisType = (PARTIAL, None)
_OWN: AxisType = (VARYING, OWN)
_TERMS: AxisType = (VARYING, TERMS)

_ADDING = frozenset(
    "add sub add_any concatenate select_n dynamic_update_slice scatter-add scatter_add scatter pad".split()
)
_LINEAR = frozenset(
    "neg convert_element_type copy copy_p real imag reduce_precision stop_gradient cumsum rev gather dynamic_slice "
    "slice reduce_window_sum optimization_barrier".split()
)
"""Primitives that are linear in their first operand."""
_NONLINEAR = frozenset(
    "exp exp2 log log1p expm1 tanh logistic sqrt rsqrt cbrt pow integer_pow square sin cos tan erf erfc erf_inv max "
    "min abs sinh cosh asinh acosh atanh atan atan2".split()
)


Propagated = tuple[list[AxisType], tuple[str, ...]]
"""Result types of a function, and the flaws."""


def propagate(jaxpr: Any, given: Sequence[AxisType]) -> Propagated:
    """How replicas hold the results of a function, by how they hold its operands, along one axis.

    Args:
        jaxpr: the function.
        given: type of each operand.

    Returns:
        The type of each result; and the operation, if any, that is applied to terms of a sum and does not commute with
        it.

    Example:
        >>> jaxpr = jax.make_jaxpr(jnp.matmul)(np.ones((3, 4)), np.ones((4, 5))).jaxpr
        >>> propagate(jaxpr, [(SHARDED, 1), (SHARDED, 0)])
        ([(<Replication.PARTIAL: 3>, None)], ())
    """
    flaws: Flaws = {}
    return _jaxpr_types(jaxpr, given, flaws), tuple(flaws)


def _jaxpr_types(jaxpr: Any, given: Sequence[AxisType], flaws: Flaws) -> list[AxisType]:
    same: AxisType = (REPLICATED, None)
    known: dict[Any, AxisType] = dict(zip(jaxpr.invars, given, strict=True))

    def of(v: Any) -> AxisType:
        if hasattr(v, "val"):
            return same if np.any(v.val) else _ZERO
        return known.get(v, same)

    for equation in jaxpr.eqns:
        operands = [of(v) for v in equation.invars]
        if all(kind <= REPLICATED for kind, _ in operands):
            zero = operands == [_ZERO] and equation.primitive.name in ("broadcast_in_dim", "convert_element_type")
            made = [_ZERO if zero else same] * len(equation.outvars)
        elif (inner := _called_jaxpr(equation)) is not None:
            made = _jaxpr_types(inner, operands, flaws)
        else:
            made = [_equation_type(equation, operands, flaws)] * len(equation.outvars)
        known |= zip(equation.outvars, made, strict=False)
    return [of(v) for v in jaxpr.outvars]


def _called_jaxpr(equation: Any) -> Any:
    """The function that an equation calls once, on its operands; `None` if it does something else."""
    inner = traces_in(equation)
    if len(inner) != 1 or equation.primitive.name == "scan":
        return None
    shapes = ([v.aval.shape for v in each.invars] for each in (inner[0], equation))
    return inner[0] if len({*map(tuple, shapes)}) == 1 else None


def _equation_type(equation: Any, operands: Sequence[AxisType], flaws: Flaws) -> AxisType:
    """What an equation makes of operands of which some differ between replicas."""
    name = equation.primitive.name
    whole = join_axis(operands)
    if any(map(_is_sum, operands)):
        return _type_of_terms(equation, operands, flaws)
    if name == "dot_general":
        return _product(operands, equation.params["dimension_numbers"], [v.aval.ndim for v in equation.invars])
    if name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        return _contracted(operands, (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)) or _without_dimension(whole)
    if whole[0] is not SHARDED:
        return whole
    if name == "reduce_sum":
        axes = equation.params["axes"]
        (_, dimension), size = operands[0], equation.invars[0].aval.ndim
        if dimension in axes or (dimension == FLAT and len(axes) == size):
            return _SUM
        return _kept_dimensions(whole, [i for i in range(size) if i not in axes])
    if name == "transpose":
        return _kept_dimensions(whole, equation.params["permutation"])
    if name == "reshape":
        return _reshaped(whole, equation.invars[0].aval.shape, equation.outvars[0].aval.shape)
    if name == "broadcast_in_dim":
        places = equation.params["broadcast_dimensions"]
        d = whole[1]
        return whole if d is None or d == FLAT or not 0 <= d < len(places) else (SHARDED, places[d])
    if name == "squeeze":
        gone = [d % equation.invars[0].aval.ndim for d in equation.params["dimensions"]]
        return _kept_dimensions(whole, [i for i in range(equation.invars[0].aval.ndim) if i not in gone])
    if name.startswith(("reduce_", "arg", "sort", "top_k", "cum")):
        return _SHARDS
    shape = equation.outvars[0].aval.shape  # smaller operands are broadcast, and leave shards where they are
    cut = {
        along
        for v, along in zip(equation.invars, operands, strict=True)
        if along[0] is SHARDED and v.aval.shape == shape
    }
    return cut.pop() if len(cut) == 1 else _SHARDS


def _without_dimension(along: AxisType) -> AxisType:
    """Shards along an unknown dimension."""
    return _SHARDS if along[0] is SHARDED else along


def _is_sum(along: AxisType) -> bool:
    return along[0] is PARTIAL or along == _TERMS


def _type_of_terms(equation: Any, operands: Sequence[AxisType], flaws: Flaws) -> AxisType:
    """What an equation makes of terms of a sum."""
    name = equation.primitive.name
    sums = [i for i, each in enumerate(operands) if _is_sum(each)]
    others = [each for i, each in enumerate(operands) if i not in sums]
    terms = _SUM if any(operands[i][0] is PARTIAL for i in sums) else _TERMS
    alone = all(kind <= REPLICATED for kind, _ in others)
    if name in _ADDING:
        first = 1 if name == "select_n" else 0
        if first and sums[0] < first:
            return join_axis(operands)
        added = [
            (v, each) for v, each in zip(equation.invars[first:], operands[first:], strict=True) if not _is_sum(each)
        ]
        added = [(v, each) for v, each in added if each != _ZERO and v.aval.dtype.kind not in "biu"]
        if not added:
            return terms
        if all(kind <= REPLICATED for _, (kind, _) in added):
            return _with_flaw(terms, "more", flaws)
        return join_axis([terms, *(each for _, each in added)]) if terms is _SUM else _OWN
    if name in ("mul", "dot_general", "conv_general_dilated"):
        if len(sums) > 1:
            return _with_flaw(terms, "linear", flaws) if name == "mul" or terms is _SUM else terms
        return terms if alone or name != "mul" else join_axis([terms, *others]) if terms is _SUM else _OWN
    if name == "div":
        if sums == [0]:
            return terms if alone else join_axis(operands)
        return _with_flaw(terms, "linear", flaws) if alone or terms is _SUM else _OWN
    if name in _NONLINEAR:
        return _with_flaw(terms, "linear", flaws) if alone else join_axis(operands)
    if name in _LINEAR or name in ("reduce_sum", "transpose", "reshape", "broadcast_in_dim", "squeeze"):
        return terms
    return terms if terms is _SUM else _OWN


def _with_flaw(terms: AxisType, flaw: str, flaws: Flaws) -> AxisType:
    """Partial type of presumed terms; a later check determines whether they are summed."""
    if terms is _SUM:
        flaws[flaw] = None
        return _SUM if flaw == "more" else (VARYING, None)
    return (VARYING, TERMS_PLUS_SHARED if flaw == "more" else NONLINEAR_TERMS)


def _product(operands: Sequence[AxisType], numbers: Any, ranks: Sequence[int]) -> AxisType:
    (left, right), (left_batch, right_batch) = numbers
    made = _contracted(operands, left, right)
    if made is not None:
        return made
    for i, (contracted, batch) in enumerate(((left, left_batch), (right, right_batch))):
        kind, d = operands[i]
        free = [each for each in range(ranks[i]) if each not in contracted and each not in batch]
        if kind is not SHARDED or d is None or d == FLAT:
            continue
        if d in batch:
            return (SHARDED, tuple(batch).index(d))
        if d in free and operands[1 - i][0] is not SHARDED:
            before = 0 if i == 0 else ranks[0] - len(left) - len(left_batch)
            return (SHARDED, len(left_batch) + before + free.index(d))
    return _without_dimension(join_axis(operands))


def _contracted(operands: Sequence[AxisType], left: Sequence[int], right: Sequence[int]) -> AxisType | None:
    """What a product makes if both operands differ between replicas, and the dimensions that are summed over do."""
    (kind, d), (other, e) = operands
    if kind is SHARDED and other is SHARDED and (d in left or e in right):
        return _SUM
    if kind is VARYING and other is VARYING and all(s is not None and s < 0 for s in (d, e)):
        return _TERMS
    return None


def _kept_dimensions(along: AxisType, dimensions: Sequence[int]) -> AxisType:
    """Type of shards after keeping these dimensions, in this order."""
    d = along[1]
    if d is None or d == FLAT:
        return along if d is None else _SHARDS
    return (SHARDED, [*dimensions].index(d)) if d in dimensions else _SHARDS


def _reshaped(along: AxisType, before: tuple[int, ...], after: tuple[int, ...]) -> AxisType:
    """Pieces of another shape: along what their dimension becomes a part of, or the first of what it is split into."""
    d = along[1]
    if d is None or d == FLAT or before == after:
        return along
    start = math.prod(before[:d])
    end, starts = start * before[d], [1, *accumulate(after, mul)]
    found = [
        i
        for i, size in enumerate(after)
        if starts[i] <= start < end <= starts[i + 1] or (starts[i] == start and before[d] % size == 0)
    ]
    return (SHARDED, found[0]) if len(found) == 1 else _SHARDS  # the sharded dimension may be one of size 1
