"""Types of the results of an operation, by its sharding rule, along one axis of replicas.

A rule comes from the declaration of an op (`popxl.core.traits.ShardingRule`), or from an equation of a jaxpr
(`popxl.analysis.replicas.propagation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

from popxl.analysis.replicas.axis_types import (
    FLAT,
    FLAT_SHARDS,
    NONLINEAR_TERMS,
    OWN_DATA,
    PARTIAL,
    REPLICATED,
    SHARDED,
    SHARDS,
    SUM,
    TERMS,
    TERMS_PLUS_SHARED,
    VALUES,
    VARYING,
    ZEROS,
    AxisType,
    is_term,
    join_axis,
)
from popxl.values.subscripts import Labels

Flaws = dict[str, None]
"""Flaws: operations on terms that do not commute with their sum. "more": a replicated value is added to each term;
"linear": a nonlinear function of each term."""

Propagated = tuple[list[AxisType], tuple[str, ...]]
"""Result types of an operation, and the flaws."""

_OWN = AxisType(VARYING, per_replica=VALUES)
_TERMS = AxisType(VARYING, per_replica=TERMS)


class Rule(NamedTuple):
    """Dimensions and linearity of an operation.

    Attributes:
        operands, results: labels of their dimensions.
        linear: sets of operands in which the operation is jointly linear; `None` if unknown.
        floats: a flag for each floating-point operand.
    """

    operands: Sequence[Labels]
    results: Sequence[Labels]
    linear: Sequence[Collection[int]] | None
    floats: Sequence[bool]


def covers(rule: Rule, types: Sequence[AxisType], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the rule describes all shards: along elementwise dimensions, and broadcast only to sharded ones."""
    for labels, along, shape in zip(rule.operands, types, shapes, strict=True):
        dimension = along.dimension
        if dimension is None:
            continue
        if dimension >= len(labels) and all(labels == result for result in rule.results):
            continue  # shards of values with more dimensions
        _, factors = _sharded_factors(labels, dimension)
        if not factors:
            return False
        if dimension != FLAT and shape[dimension] <= 1 and not _is_divided(labels[dimension], rule, types, shapes):
            return False
    return True


def _is_divided(
    factors: Sequence[str | int], rule: Rule, types: Sequence[AxisType], shapes: Sequence[tuple[int, ...]]
) -> bool:
    """Whether all operands with a dimension of these factors above size 1 are sharded."""
    return all(
        along.kind is SHARDED
        or all(size == 1 for size, factors_of in zip(shape, labels, strict=True) if factors_of == factors)
        for labels, along, shape in zip(rule.operands, types, shapes, strict=True)
    )


def types_by_rule(rule: Rule, types: Sequence[AxisType], flaws: Flaws) -> list[AxisType]:
    """Result types, by the operand types. Adds to `flaws`."""
    if any(map(is_term, types)):
        return [_type_of_terms(rule, types, flaws)] * len(rule.results)
    joined = join_axis(types)
    if joined == SHARDS and _sums_all(rule):
        return [SUM] * len(rule.results)
    if joined.kind is SHARDED:
        return [_type_of_shards(rule.operands, result, types) for result in rule.results]
    if joined.kind is VARYING and all(along.per_replica is not None for along in types if along.kind is VARYING):
        return [_TERMS if _is_product_of_own(rule, result, types) else joined for result in rule.results]
    return [joined] * len(rule.results)


def _sums_all(rule: Rule) -> bool:
    """Whether an operation sums all elements of its only operand, so that any shards become terms of a sum."""
    return len(rule.operands) == 1 and all(rule.operands[0]) and rule.linear == ({0},) and not any(rule.results)


def _is_product_of_own(rule: Rule, result: Labels, types: Sequence[AxisType]) -> bool:
    """Whether an operation contracts two operands that differ by per-replica variables."""
    positions = [i for i, along in enumerate(types) if along.kind is VARYING and {i} in (rule.linear or ())]
    return len(positions) > 1 and bool(_contracted(rule, result))


def _contracted(rule: Rule, result: Labels) -> set[str | int]:
    """Contracted labels: shared by several operands, absent from the result."""
    counts = Counter(chain.from_iterable({*chain.from_iterable(labels)} for labels in rule.operands))
    shared = {factor for factor, count in counts.items() if count > 1}
    return shared.difference(chain.from_iterable(result))


def _type_of_terms(rule: Rule, types: Sequence[AxisType], flaws: Flaws) -> AxisType:
    """Result type of an operation on terms of a sum."""
    terms = SUM if any(along.kind is PARTIAL for along in types) else _TERMS
    others_type = SUM if terms is SUM else _OWN
    terms_at = {i for i, along in enumerate(types) if is_term(along) and rule.floats[i]}
    if rule.linear is None or not terms_at:  # terms only in conditions and indices
        return others_type
    other_types = [along for i, along in enumerate(types) if i not in terms_at]
    contracts = any(_contracted(rule, result) for result in rule.results)
    linear_group = next((group for group in rule.linear if terms_at <= {*group}), None)
    if linear_group is None:
        if contracts and terms is _TERMS:
            return terms
        is_flaw = terms is SUM or _are_equal(other_types)
        return _flawed(terms, "linear", flaws) if is_flaw else join_axis([others_type, *other_types])
    added = [types[i] for i in linear_group if i not in terms_at and rule.floats[i] and types[i] != ZEROS]
    if added:
        return _flawed(terms, "more", flaws) if _are_equal(added) else join_axis([others_type, *added])
    factors = [along for i, along in enumerate(types) if i not in linear_group]
    return terms if contracts or _are_equal(factors) else join_axis([others_type, *factors])


def _are_equal(types: Sequence[AxisType]) -> bool:
    return all(along.kind <= REPLICATED for along in types)


def _flawed(terms: AxisType, flaw: str, flaws: Flaws) -> AxisType:
    """Type of terms after a flaw. Presumed terms are reported only if a later op sums them."""
    if terms is SUM:
        flaws[flaw] = None
        return SUM if flaw == "more" else OWN_DATA
    return AxisType(VARYING, per_replica=TERMS_PLUS_SHARED if flaw == "more" else NONLINEAR_TERMS)


def _type_of_shards(operands: Sequence[Labels], result: Labels, types: Sequence[AxisType]) -> AxisType:
    """Result type of an operation on shards: terms of a sum, if it sums over the sharded dimension."""
    outer = {along.dimension for along in types if along.dimension is not None and along.dimension >= len(result)}
    if outer and all(labels == result for labels in operands):  # shards of values with more dimensions
        return AxisType(SHARDED, outer.pop()) if len(outer) == 1 else SHARDS
    sharded = {
        _sharded_factors(labels, along.dimension)
        for labels, along in zip(operands, types, strict=True)
        if along.kind is SHARDED
    }
    if any(_is_summed(factors, operands, result, types) for _, factors in sharded):
        return SUM
    if len(sharded) > 1:
        return SHARDS
    ((is_flat, factors),) = sharded
    if is_flat:
        if factors == tuple(chain.from_iterable(result)):
            return FLAT_SHARDS
        # Shards of a flattened value, one after another, are rows of a value that has as many times the rows.
        rows = [AxisType(SHARDED, 0) if along == FLAT_SHARDS else along for along in types]
        return _type_of_shards(operands, result, rows)
    # Shards along inner factors of a dimension are along no dimension of the result.
    dimensions = [d for d, own in enumerate(result) if own and own[:1] == factors]
    return AxisType(SHARDED, dimensions[0]) if dimensions else SHARDS


def _is_summed(
    factors: Sequence[str | int], operands: Sequence[Labels], result: Labels, types: Sequence[AxisType]
) -> bool:
    """Whether a result is a sum over factors, with all operands sharded along them."""
    if not factors or not {*factors}.isdisjoint(chain.from_iterable(result)):
        return False
    return all(
        along.kind is SHARDED or {*factors}.isdisjoint(chain.from_iterable(labels))
        for labels, along in zip(operands, types, strict=True)
    )


def _sharded_factors(labels: Labels, dimension: int | None) -> tuple[bool, tuple[str | int, ...]]:
    """Whether the flattened value is sharded, and the sharded factors."""
    if dimension == FLAT:
        return True, tuple(chain.from_iterable(labels)) if all(labels) else ()
    return False, () if dimension is None or dimension >= len(labels) else labels[dimension][:1]
