"""Effects of an op on shards and on terms of a sum, remembered for all ops of the same signature.

The sharding rule of its declaration states them; for an op without one, `popxl.analysis.replicas.propagation` follows
the jaxpr of its function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from popxl.analysis.replicas.axis_types import (
    NEVER,
    NOT_KNOWN,
    ONCE,
    OWN,
    PARTIAL,
    SHARDED,
    SUM,
    VARYING,
    ZEROS,
    AxisType,
    ReplicaType,
    join_axis,
)
from popxl.analysis.replicas.propagation import propagate
from popxl.analysis.replicas.sharding_rules import Flaws, Propagated, Rule, covers, types_by_rule
from popxl.core.declaration import OpKind, holds_graph
from popxl.core.recording import Op
from popxl.core.tracing import needed
from popxl.values.subscripts import parse

T = TypeVar("T")

Effect = tuple[tuple[ReplicaType, ...], tuple[tuple[int, str], ...]]
"""The type of each of an op's results, or of all that it overwrites; and what the op does to terms of a sum that does
not commute with it, each with the position of the axis."""

Traced = tuple[Any, tuple[bool, ...]] | None
"""The jaxpr of an op's function, and which of its operands it reads; `None` if it refuses them."""

_EFFECTS: WeakKeyDictionary[OpKind, dict[Hashable, Effect]] = WeakKeyDictionary()
_RESULTS: WeakKeyDictionary[OpKind, dict[Hashable, Propagated]] = WeakKeyDictionary()
_TRACES: WeakKeyDictionary[OpKind, dict[Hashable, Traced]] = WeakKeyDictionary()

_SPEC = attrgetter("shape", "dtype")


def op_effect(op: Op, types: tuple[ReplicaType, ...], joined: ReplicaType) -> Effect:
    """What an op makes of operands of these types.

    Args:
        joined: join of the types: that of the results along axes without shards and without terms of a sum.
    """
    key = (op.operands, *op.attributes.items(), *map(_SPEC, op.inputs), types)
    return _remembered(_EFFECTS, op, key, _op_effect, types, joined)


def _op_effect(op: Op, types: Sequence[ReplicaType], joined: ReplicaType) -> Effect:
    count = len(op.outputs) if op.kind.overwrites is None else 1
    made, found = [[each] * count for each in joined], []
    for i in propagated_axes(joined):
        made[i], flaws = _effect_along(op, [t[i] for t in types], joined[i], count)
        found += [(i, flaw) for flaw in flaws]
    return tuple(zip(*made, strict=True)), tuple(found)


def _effect_along(
    op: Op, types: Sequence[AxisType], whole: AxisType, count: int
) -> tuple[list[AxisType], tuple[str, ...]]:
    if len(types) == 1 and whole.own is OWN:
        return [whole] * count, ()
    made, flaws = result_types(op, [each if each.own is None else each._replace(reduced=NEVER) for each in types])
    results = made[:count] if count > 1 and len(made) >= count else [join_axis(made) if made else whole] * count
    if whole.own is not None and whole.reduced is ONCE:
        results = [each if each.own is None else AxisType(VARYING, reduced=ONCE, own=each.own) for each in results]
    return results, flaws


@lru_cache(256)
def propagated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """The axes along which the function of an op says what it makes; along others, it makes what its operands are."""
    return tuple(i for i, along in enumerate(type_) if along.kind in (SHARDED, PARTIAL) or along.own is not None)


def is_linear(op: Op) -> bool:
    """Whether an op makes terms of a sum of such terms: of its operands but single numbers, taken together."""
    if op.kind.is_carried_out_by_others:
        return op.kind.between_replicas
    made, flaws = result_types(op, tuple(SUM if t.nelms > 1 else ZEROS for t in op.inputs))
    return not flaws and all(each == SUM for each in made)


def makes_zero(op: Op, zeros: Collection[int]) -> bool:
    """Whether zero operands at these positions make the results zero."""
    rule = op.kind.sharding_rule
    return rule is not None and any(
        together and together.issubset(zeros) for together in rule.linear_positions(op.operand_names())
    )


def result_types(op: Op, given: Sequence[AxisType]) -> Propagated:
    """Result types of an op along one axis, and flaws; unknown types if its function refuses the operands.

    Remembered for ops of the same kind with the same attributes, dtypes and shapes: see `_shape_key`.
    """
    signature = (op.operands, *op.attributes.items(), *[t.dtype for t in op.inputs], *_shape_key(op))
    return _remembered(_RESULTS, op, (signature, *given), _propagated, signature, given)


def _propagated(op: Op, signature: Hashable, given: Sequence[AxisType]) -> Propagated:
    if (rule := _declared_rule(op)) is not None and covers(rule, given, [t.shape for t in op.inputs]):
        flaws: Flaws = {}
        return types_by_rule(rule, given, flaws), tuple(flaws)
    traced = _remembered(_TRACES, op, signature, _trace)
    if traced is None:
        return [NOT_KNOWN] * len(op.outputs), ()
    jaxpr, used = traced
    return propagate(jaxpr, [each for each, is_used in zip(given, used, strict=True) if is_used])


def _declared_rule(op: Op) -> Rule | None:
    """The sharding rule of an op's declaration, for its operands; `None` without one."""
    declared = op.kind.sharding_rule
    if declared is None:
        return None
    shapes = [t.shape for t in op.inputs]
    given, made = declared.written(op.kind, op.operands, shapes, op.attributes)
    operands, results = parse(tuple(given), tuple(made), tuple(map(len, shapes)))
    linear = declared.linear_positions(op.operand_names())
    return Rule(operands, results, linear, [t.dtype.is_inexact for t in op.inputs])


def _trace(op: Op) -> Traced:
    try:
        return needed(op.on_arrays(), *op.signature[2:])
    except Exception:  # whatever a function raises, lowering says it, with the line of the op
        return None


def _remembered(
    memory: WeakKeyDictionary[OpKind, dict[Hashable, T]],
    op: Op,
    key: Hashable,
    make: Callable[..., T],
    *arguments: Any,
) -> T:
    """Cached result of `make(op, *arguments)` by op kind and key."""
    known = memory.setdefault(op.kind, {})
    try:
        found = known.get(key)
    except TypeError:  # from the hash
        return make(op, *arguments)
    if found is None:
        found = make(op, *arguments)
        if not holds_graph(key):
            known[key] = found
    return found


def _shape_key(op: Op) -> list[tuple[int, ...]]:
    """The shapes of operands; if all arrays of an op have one shape, as in an update of weights, the rank and sizes of
    1 instead: such functions are often long, and so are traced once for all weights."""
    shapes = [t.shape for t in op.inputs]
    if len({*shapes, *[t.shape for t in op.outputs], ()}) > 2:
        return shapes
    return [(-1 - len(shape), *[i for i, size in enumerate(shape) if size == 1]) for shape in shapes]
