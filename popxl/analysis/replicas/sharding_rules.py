"""Types of the results of an operation, by its sharding rule, along one axis of replicas.

A rule comes from the declaration of an op (`popxl.core.traits.ShardingRule`), or from an equation of a jaxpr
(`popxl.analysis.replicas.propagation`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

from popxl.analysis.replicas.axis_types import (
    FLAT,
    FLAT_SHARDS,
    NONLINEAR_TERMS,
    OWN,
    OWN_DATA,
    PARTIAL,
    REPLICATED,
    SHARDED,
    SHARDS,
    SUM,
    TERMS,
    TERMS_PLUS_SHARED,
    VARYING,
    ZEROS,
    AxisType,
    join_axis,
)
from popxl.values.subscripts import Labels

Flaws = dict[str, None]
"""What is done to terms of a sum that their sum does not survive: "more" is added to each, or a function that is not
"linear" is taken of each."""

Propagated = tuple[list[AxisType], tuple[str, ...]]
"""Result types of an operation, and the flaws."""

_OWN = AxisType(VARYING, own=OWN)
_TERMS = AxisType(VARYING, own=TERMS)


class Rule(NamedTuple):
    """How an operation treats dimensions and sums.

    Attributes:
        operands, results: labels of their dimensions.
        linear: positions of operands in which the operation is linear together; `None` if that is unknown.
        floats: which operands are floating-point numbers.
    """

    operands: Sequence[Labels]
    results: Sequence[Labels]
    linear: Sequence[Collection[int]] | None
    floats: Sequence[bool]


def covers(rule: Rule, given: Sequence[AxisType], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the rule describes all shards: along elementwise dimensions, and broadcast only to sharded ones."""
    return all(
        (d := along.dimension) is None
        or (d >= len(labels) and all(labels == result for result in rule.results))  # of what it is a piece of
        or (
            _sharded_factors(labels, d)[1]
            and (d == FLAT or shape[d] > 1 or _is_divided(labels[d], rule, given, shapes))
        )
        for labels, along, shape in zip(rule.operands, given, shapes, strict=True)
    )


def _is_divided(
    factors: Sequence[str | int], rule: Rule, given: Sequence[AxisType], shapes: Sequence[tuple[int, ...]]
) -> bool:
    """Whether all operands with a dimension of these factors above size 1 are sharded."""
    return all(
        along.kind is SHARDED or all(size == 1 for size, each in zip(shape, labels, strict=True) if each == factors)
        for labels, along, shape in zip(rule.operands, given, shapes, strict=True)
    )


def types_by_rule(rule: Rule, given: Sequence[AxisType], flaws: Flaws) -> list[AxisType]:
    """Type of each result, by the types of the operands. Adds to the flaws."""
    if any(map(_is_sum, given)):
        return [_type_of_terms(rule, given, flaws)] * len(rule.results)
    whole = join_axis(given)
    if whole == SHARDS and _sums_all(rule):
        return [SUM] * len(rule.results)
    if whole.kind is SHARDED:
        return [_type_of_shards(rule.operands, result, given) for result in rule.results]
    if whole.kind is VARYING and all(each.own is not None for each in given if each.kind is VARYING):
        return [_TERMS if _is_product_of_own(rule, result, given) else whole for result in rule.results]
    return [whole] * len(rule.results)


def _sums_all(rule: Rule) -> bool:
    """Whether an operation sums all elements of its only operand: those of shards, whichever dimension they are along,
    to terms of a sum."""
    return len(rule.operands) == 1 and all(rule.operands[0]) and rule.linear == ({0},) and not any(rule.results)


def _is_sum(along: AxisType) -> bool:
    return along.kind is PARTIAL or along == _TERMS


def _is_product_of_own(rule: Rule, result: Labels, given: Sequence[AxisType]) -> bool:
    """Whether two operands that differ by variables of each replica's own are multiplied, and summed over a
    dimension."""
    own = [i for i, along in enumerate(given) if along.kind is VARYING and {i} in (rule.linear or ())]
    return len(own) > 1 and bool(_contracted(rule, result))


def _contracted(rule: Rule, result: Labels) -> set[str | int]:
    """Labels of several operands that a result is summed over."""
    factors = [{*chain.from_iterable(labels)} for labels in rule.operands]
    return {f for i, some in enumerate(factors) for f in some if any(f in others for others in factors[:i])} - {
        *chain.from_iterable(result)
    }


def _type_of_terms(rule: Rule, given: Sequence[AxisType], flaws: Flaws) -> AxisType:
    """What an operation makes of terms of a sum."""
    terms = SUM if any(along.kind is PARTIAL for along in given) else _TERMS
    kept = SUM if terms is SUM else _OWN
    sums = {i for i, each in enumerate(given) if _is_sum(each) and rule.floats[i]}
    if rule.linear is None or not sums:  # conditions and indices that are made of terms are none
        return kept
    others = [each for i, each in enumerate(given) if i not in sums]
    contracts = any(_contracted(rule, result) for result in rule.results)
    together = next((group for group in rule.linear if sums <= {*group}), None)
    if together is None:
        if contracts and terms is _TERMS:
            return terms
        is_flaw = terms is SUM or _are_equal(others)
        return _flawed(terms, "linear", flaws) if is_flaw else join_axis([kept, *others])
    added = [given[i] for i in together if i not in sums and rule.floats[i] and given[i] != ZEROS]
    if added:
        return _flawed(terms, "more", flaws) if _are_equal(added) else join_axis([kept, *added])
    factors = [each for i, each in enumerate(given) if i not in together]
    return terms if contracts or _are_equal(factors) else join_axis([kept, *factors])


def _are_equal(types: Sequence[AxisType]) -> bool:
    return all(along.kind <= REPLICATED for along in types)


def _flawed(terms: AxisType, flaw: str, flaws: Flaws) -> AxisType:
    """Type of terms after a flaw. For presumed terms, a later check finds out whether they are summed."""
    if terms is SUM:
        flaws[flaw] = None
        return SUM if flaw == "more" else OWN_DATA
    return AxisType(VARYING, own=TERMS_PLUS_SHARED if flaw == "more" else NONLINEAR_TERMS)


def _type_of_shards(operands: Sequence[Labels], result: Labels, given: Sequence[AxisType]) -> AxisType:
    """What an operation makes of shards: of terms of a sum, if it sums over the dimension that they are along."""
    beyond = {along.dimension for along in given if along.dimension is not None and along.dimension >= len(result)}
    if beyond and all(labels == result for labels in operands):  # pieces of values with more dimensions
        return AxisType(SHARDED, beyond.pop()) if len(beyond) == 1 else SHARDS
    cut = {
        _sharded_factors(labels, along.dimension)
        for labels, along in zip(operands, given, strict=True)
        if along.kind is SHARDED
    }
    if any(_is_summed(factors, operands, result, given) for _, factors in cut):
        return SUM
    if len(cut) > 1:
        return SHARDS
    ((is_flat, factors),) = cut
    if is_flat:
        if factors == tuple(chain.from_iterable(result)):
            return FLAT_SHARDS
        # Shards of a flattened value, one after another, are rows of a value that has as many times the rows.
        rows = [AxisType(SHARDED, 0) if each == FLAT_SHARDS else each for each in given]
        return _type_of_shards(operands, result, rows)
    places = [i for i, each in enumerate(result) if each and each[:1] == factors]  # of an inner factor, no dimension
    return AxisType(SHARDED, places[0]) if places else SHARDS


def _is_summed(
    factors: Sequence[str | int], operands: Sequence[Labels], result: Labels, given: Sequence[AxisType]
) -> bool:
    """Whether a result is a sum over factors, with all operands sharded along them."""
    if not factors or not {*factors}.isdisjoint(chain.from_iterable(result)):
        return False
    return all(
        along.kind is SHARDED or {*factors}.isdisjoint(chain.from_iterable(labels))
        for labels, along in zip(operands, given, strict=True)
    )


def _sharded_factors(labels: Labels, dimension: int | None) -> tuple[bool, tuple[str | int, ...]]:
    """Whether the flattened value is sharded, and the sharded factors."""
    if dimension == FLAT:
        return True, tuple(chain.from_iterable(labels)) if all(labels) else ()
    return False, () if dimension is None or dimension >= len(labels) else labels[dimension][:1]
