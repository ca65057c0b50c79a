"""Transfer functions of ops on shards and terms of a sum, cached by signature.

They follow from the declared sharding rule; without one, `popxl.analysis.replicas.propagation` interprets the jaxpr of
the op's function.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from popxl.analysis.replicas.axis_types import (
    NEVER,
    NOT_KNOWN,
    ONCE,
    PARTIAL,
    SHARDED,
    SUM,
    VALUES,
    VARYING,
    ZEROS,
    AxisType,
    ReplicaType,
    join_axis,
)
from popxl.analysis.replicas.propagation import propagate
from popxl.analysis.replicas.sharding_rules import Flaws, Propagated, Rule, covers, types_by_rule
from popxl.core.recording import Op
from popxl.core.tracing import needed
from popxl.values.subscripts import parse

Effect = tuple[tuple[ReplicaType, ...], tuple[tuple[int, str], ...]]
"""Types of the results, or of all overwritten operands; and flaws (`sharding_rules.Flaws`) with axis positions."""


def op_effect(op: Op, types: tuple[ReplicaType, ...], joined_type: ReplicaType) -> Effect:
    """Result types of an op, and flaws.

    Args:
        types: types of the operands.
        joined_type: their join, the result type along axes without shards and terms of a sum.
    """
    effects: dict[Any, Effect] = op.remembered("effects", dict)
    if types not in effects:
        effects[types] = _op_effect(op, types, joined_type)
    return effects[types]


def _op_effect(op: Op, types: Sequence[ReplicaType], joined_type: ReplicaType) -> Effect:
    count = len(op.outputs) if op.kind.overwrites is None else 1
    results, axis_flaws = [[axis_type] * count for axis_type in joined_type], []
    for i in propagated_axes(joined_type):
        results[i], flaws = _effect_along(op, [t[i] for t in types], joined_type[i], count)
        axis_flaws += [(i, flaw) for flaw in flaws]
    return tuple(zip(*results, strict=True)), tuple(axis_flaws)


def _effect_along(
    op: Op, types: Sequence[AxisType], joined_type: AxisType, count: int
) -> tuple[list[AxisType], tuple[str, ...]]:
    if len(types) == 1 and joined_type.per_replica is VALUES:
        return [joined_type] * count, ()
    inferred, flaws = result_types(
        op, [type_ if type_.per_replica is None else type_._replace(reduced=NEVER) for type_ in types]
    )
    results = (
        inferred[:count]
        if count > 1 and len(inferred) >= count
        else [join_axis(inferred) if inferred else joined_type] * count
    )
    if joined_type.per_replica is not None and joined_type.reduced is ONCE:
        results = [
            type_ if type_.per_replica is None else AxisType(VARYING, reduced=ONCE, per_replica=type_.per_replica)
            for type_ in results
        ]
    return results, flaws


@lru_cache(256)
def propagated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """Axes along which result types depend on the op's function; along others they are the join of its operands."""
    return tuple(
        i for i, along in enumerate(type_) if along.kind in (SHARDED, PARTIAL) or along.per_replica is not None
    )


def is_linear(op: Op) -> bool:
    """Whether an op maps terms of a sum to terms: it is linear in its operands together, without scalars."""
    if op.kind.is_carried_out_by_others:
        return op.kind.between_replicas
    results, flaws = result_types(op, tuple(SUM if t.nelms > 1 else ZEROS for t in op.inputs))
    return not flaws and all(type_ == SUM for type_ in results)


def makes_zero(op: Op, zeros: Collection[int]) -> bool:
    """Whether zero operands at these positions make the results zero."""
    rule = op.kind.sharding_rule
    return rule is not None and any(
        group and group.issubset(zeros) for group in rule.linear_positions(op.operand_names())
    )


def result_types(op: Op, types: Sequence[AxisType]) -> Propagated:
    """Result types of an op along one axis, and flaws; unknown types if its function refuses the operands.

    Cached by kind, attributes, dtypes and shapes: see `_shape_key`.
    """
    key = (op.operands, *op.attributes.items(), *[t.dtype for t in op.inputs], *_shape_key(op))
    known: dict[Any, Propagated] = op.kind.remembered(("result types", *key), dict)
    if (given := tuple(types)) not in known:
        known[given] = _propagated(op, key, types)
    return known[given]


def _propagated(op: Op, key: tuple[Any, ...], types: Sequence[AxisType]) -> Propagated:
    if (rule := _declared_rule(op)) is not None and covers(rule, types, [t.shape for t in op.inputs]):
        flaws: Flaws = {}
        return types_by_rule(rule, types, flaws), tuple(flaws)
    traced = op.kind.remembered(("needed", *key), lambda: _trace(op))
    if traced is None:
        return [NOT_KNOWN] * len(op.outputs), ()
    jaxpr, used = traced
    return propagate(jaxpr, [type_ for type_, is_used in zip(types, used, strict=True) if is_used])


def _declared_rule(op: Op) -> Rule | None:
    """The sharding rule of an op's declaration, for its operands; `None` without one."""
    declared = op.kind.sharding_rule
    if declared is None:
        return None
    shapes = [t.shape for t in op.inputs]
    operand_subscripts, result_subscripts = declared.written(op.kind, op.operands, shapes, op.attributes)
    operands, results = parse(tuple(operand_subscripts), tuple(result_subscripts), tuple(map(len, shapes)))
    linear = declared.linear_positions(op.operand_names())
    return Rule(operands, results, linear, [t.dtype.is_inexact for t in op.inputs])


def _trace(op: Op) -> tuple[Any, tuple[bool, ...]] | None:
    """The jaxpr of an op's function, and which of its operands it reads; `None` if it refuses them."""
    try:
        return needed(op.on_arrays(), *op.signature[2:])
    except Exception:  # lowering reports it, with the line of the op
        return None


def _shape_key(op: Op) -> list[tuple[int, ...]]:
    """Operand shapes; if all arrays of an op have one shape, as in an update of weights, the rank and the dimensions of
    size 1 instead: such functions are often long, and traced once for all weights."""
    shapes = [t.shape for t in op.inputs]
    if len({*shapes, *[t.shape for t in op.outputs], ()}) > 2:
        return shapes
    return [(-1 - len(shape), *[i for i, size in enumerate(shape) if size == 1]) for shape in shapes]
