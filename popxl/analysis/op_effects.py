"""What an op makes of shards and of terms of a sum: that of its function, remembered for all ops of the same signature.

`popxl.analysis.propagation` follows the function; here are the memories, which most ops of a program find what they
make in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from popxl.analysis.propagation import Propagated, propagate
from popxl.analysis.replication import (
    GIVEN,
    NONLINEAR_TERMS,
    NOT_KNOWN,
    OWN,
    PARTIAL,
    SHARDED,
    VARYING,
    AxisType,
    ReplicaType,
    differs_by_own_variables,
    join_axis,
    reduced_slot,
    unreduced_slot,
)
from popxl.core.declaration import OpKind, holds_graph
from popxl.core.tracing import needed

if TYPE_CHECKING:
    from popxl.core.recording import Op

T = TypeVar("T")

Effect = tuple[ReplicaType, tuple[tuple[int, str], ...]]
"""The type of an op's results; and what the op does to terms of a sum that does not commute with it, each with the
position of the axis."""

Traced = tuple[Any, tuple[bool, ...]] | None
"""The jaxpr of an op's function, and which of its operands it reads; `None` if it refuses them."""

_EFFECTS: WeakKeyDictionary[OpKind, dict[Hashable, Effect]] = WeakKeyDictionary()
_RESULTS: WeakKeyDictionary[OpKind, dict[Hashable, Propagated]] = WeakKeyDictionary()
_TRACES: WeakKeyDictionary[OpKind, dict[Hashable, Traced]] = WeakKeyDictionary()

_SPEC = attrgetter("shape", "dtype")


def op_effect(op: Op, types: tuple[ReplicaType, ...], joined: ReplicaType) -> Effect:
    """What an op makes of operands of these types.

    Args:
        op: an op that computes on each replica.
        types: type of each operand.
        joined: join of the types: that of the results along axes without shards and without terms of a sum.
    """
    key = (op.operands, *op.attributes.items(), *map(_SPEC, op.inputs), types)
    return _remembered(_EFFECTS, op, key, _op_effect, types, joined)


def _op_effect(op: Op, types: Sequence[ReplicaType], joined: ReplicaType) -> Effect:
    made, found = list(joined), []
    for i in propagated_axes(joined):
        made[i], flaws = _effect_along(op, [t[i] for t in types], joined[i])
        found += [(i, flaw) for flaw in flaws]
    return tuple(made), tuple(found)


def _effect_along(op: Op, types: Sequence[AxisType], whole: AxisType) -> tuple[AxisType, tuple[str, ...]]:
    if len(types) == 1 and whole[0] is VARYING and unreduced_slot(whole[1]) == OWN:
        return whole, ()
    made, flaws = result_types(op, [_without_reduction(each) for each in types])
    result = join_axis(made) if made else whole
    if differs_by_own_variables(result) and (whole[1] or 0) < NONLINEAR_TERMS:
        result = (VARYING, reduced_slot(result[1]))
    return result, flaws


@lru_cache(256)
def propagated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """The axes along which the function of an op says what it makes; along others, it makes what its operands are."""
    return tuple(
        i for i, along in enumerate(type_) if along[0] in (SHARDED, PARTIAL) or differs_by_own_variables(along)
    )


def _without_reduction(along: AxisType) -> AxisType:
    return (along[0], unreduced_slot(along[1])) if along[0] is VARYING else along


def is_linear(op: Op) -> bool:
    """Whether an op makes terms of a sum of such terms: of its operands but single numbers, taken together."""
    if op.kind.is_carried_out_by_others:
        return op.kind.between_replicas
    summed: AxisType = (PARTIAL, None)
    zero: AxisType = (GIVEN, 0)
    made, flaws = result_types(op, tuple(summed if t.nelms > 1 else zero for t in op.inputs))
    return not flaws and all(each == summed for each in made)


def result_types(op: Op, given: Sequence[AxisType]) -> Propagated:
    """Result types of an op's function along one axis, and flaws; unknown types if it refuses its operands.

    Remembered for ops of the same kind with the same attributes, dtypes and shapes: see `_shape_key`.
    """
    signature = (op.operands, *op.attributes.items(), *[t.dtype for t in op.inputs], *_shape_key(op))
    return _remembered(_RESULTS, op, (signature, *given), _propagated, signature, given)


def _propagated(op: Op, signature: Hashable, given: Sequence[AxisType]) -> Propagated:
    traced = _remembered(_TRACES, op, signature, _trace)
    if traced is None:
        return [NOT_KNOWN] * len(op.outputs), ()
    jaxpr, used = traced
    return propagate(jaxpr, [each for each, is_used in zip(given, used, strict=True) if is_used])


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
    """What `make(op, *arguments)` has returned for an op of this kind and the same key."""
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
