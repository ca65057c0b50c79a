"""Types after stores to remote buffers, exchanges between replicas, and in-place updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from popxl.analysis.replicas.axis_types import (
    FLAT,
    FLAT_SHARDS,
    NEVER,
    NOT_KNOWN,
    OWN_DATA,
    PARTIAL,
    REDUNDANT,
    REPLICATED,
    SAME,
    SHARDED,
    SHARDS,
    UNKNOWN,
    VALUES,
    VARYING,
    AxisType,
    ReplicaType,
    join,
    join_all,
)


@lru_cache(256)
def held_type(old: ReplicaType, stored: ReplicaType, is_declared: bool) -> ReplicaType:
    """Type of a remote buffer after a store.

    Unknown along axes with different distributions of its slots; varying, if shared variables are declared there.
    """

    def along(previous: AxisType, joined_axis: AxisType) -> AxisType:
        if previous.kind is joined_axis.kind:
            return (
                previous if previous.kind in (REPLICATED, VARYING) else joined_axis
            )  # reductions are not tracked through buffers
        return OWN_DATA if is_declared and previous == SAME and joined_axis.kind in (PARTIAL, VARYING) else NOT_KNOWN

    return tuple(map(along, old, join(old, stored)))


@lru_cache(256)
def stacked_type(type_: ReplicaType) -> ReplicaType:
    """Type of the values of all iterations, stacked along a first dimension."""

    def stacked(along: AxisType) -> AxisType:
        d = along.dimension
        return along if d is None else SHARDS if d == FLAT else AxisType(SHARDED, d + 1)

    return tuple(map(stacked, type_))


@lru_cache(256)
def join_of_others(types: tuple[ReplicaType, ...], modified: frozenset[int]) -> ReplicaType | None:
    """Join of the types of unmodified operands; `None` without any."""
    other_types = tuple([type_ for i, type_ in enumerate(types) if i not in modified])
    return join_all(other_types) if other_types else None


@lru_cache(256)
def kept_layout(old_type: ReplicaType, new_type: ReplicaType) -> ReplicaType:
    """Type of an updated operand: it keeps its sharded dimension if that of the update is unknown."""
    return tuple(
        old if old.kind is SHARDED and (new == SHARDS or new.per_replica is VALUES) else new
        for old, new in zip(old_type, new_type, strict=True)
    )


@lru_cache(256)
def masked_types(types: tuple[ReplicaType, ...], seed: int) -> tuple[ReplicaType, ...]:
    """Operand types of a dropout: for shards, per-replica seeds are as good as an equal seed."""

    def along(seed_type: AxisType, value: AxisType) -> AxisType:
        return SAME if seed_type.kind is VARYING and value.kind is SHARDED else seed_type

    return (*types[:seed], tuple(map(along, types[seed], types[0])), *types[seed + 1 :])


@lru_cache(256)
def presumed_layout(types: tuple[ReplicaType, ...], modified: frozenset[int]) -> tuple[ReplicaType, ...]:
    """Operand types of an in-place op, in which per-replica variables without a declared layout take that of the shards
    that update them, such as sums of gradient shards."""
    change = join_of_others(types, modified)
    if change is None or not any(along.kind is SHARDED for along in change):
        return types

    def presumed(declared: AxisType, change_axis: AxisType) -> AxisType:
        return change_axis if change_axis.dimension is not None and declared.per_replica is VALUES else declared

    return tuple(tuple(map(presumed, t, change)) if i in modified else t for i, t in enumerate(types))


@lru_cache(256)
def has_known_dimensions(type_: ReplicaType) -> bool:
    """Whether values are shards along a known dimension, which a view may move."""
    return any(along.dimension not in (None, FLAT) for along in type_)


@lru_cache(256)
def exchanged_type(type_: ReplicaType, axes: Sequence[int], equal_type: AxisType | None, reduces: bool) -> ReplicaType:
    """Result type of a collective: `equal_type` in a group, or a shard of the value for each replica."""
    result = list(type_)
    for i in axes:
        if equal_type is not None or reduces or type_[i].kind < SHARDED:
            result[i] = equal_type or FLAT_SHARDS
    return tuple(result)


@lru_cache(256)
def repeated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """Axes along which equal values were summed."""
    return tuple(i for i, along in enumerate(type_) if along.reduced is REDUNDANT)


@lru_cache(256)
def diverged_axes(declared: ReplicaType, final: ReplicaType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes along which a variable has lost its declared type: without a reduction, and with one. Empty if a final type
    is unknown."""
    if any(along.kind is UNKNOWN for along in final):
        return (), ()
    diverged = [
        i
        for i, (old, new) in enumerate(zip(declared, final, strict=True))
        if (old.kind is REPLICATED and new.kind > REPLICATED) or (old == FLAT_SHARDS and new.kind is PARTIAL)
    ]
    certain = tuple(i for i in diverged if final[i].reduced is NEVER)
    return certain, tuple(i for i in diverged if i not in certain)
