"""Types of what is moved or changed: stored in remote buffers, exchanged between replicas, updated in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from popxl.analysis.replicas.axis_types import (
    AGAIN,
    FLAT,
    FLAT_SHARDS,
    NEVER,
    NOT_KNOWN,
    OWN,
    OWN_DATA,
    PARTIAL,
    REPLICATED,
    SAME,
    SHARDED,
    SHARDS,
    UNKNOWN,
    VARYING,
    AxisType,
    ReplicaType,
    join,
    join_all,
)


@lru_cache(256)
def held_type(was: ReplicaType, stored: ReplicaType, is_declared: bool) -> ReplicaType:
    """Type of a remote buffer after a store.

    Along axes along which its slots are held in several ways it is unknown; or each replica has its own, where
    variables are declared there that replicas share.
    """

    def along(before: AxisType, joined: AxisType) -> AxisType:
        if before.kind is joined.kind:
            return before if before.kind in (REPLICATED, VARYING) else joined  # whatever was reduced on the way
        return OWN_DATA if is_declared and before == SAME and joined.kind in (PARTIAL, VARYING) else NOT_KNOWN

    return tuple(map(along, was, join(was, stored)))


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
    others = tuple([each for i, each in enumerate(types) if i not in modified])
    return join_all(others) if others else None


@lru_cache(256)
def kept_layout(was: ReplicaType, now: ReplicaType) -> ReplicaType:
    """Type of a changed operand, which stays divided along its dimension if the change's is not known."""
    return tuple(
        before if before.kind is SHARDED and (after == SHARDS or after.own is OWN) else after
        for before, after in zip(was, now, strict=True)
    )


@lru_cache(256)
def masked_types(types: tuple[ReplicaType, ...], seed: int) -> tuple[ReplicaType, ...]:
    """Types of the operands of a dropout: for a shard, a seed of each replica's own is as good as one for all."""

    def along(own: AxisType, value: AxisType) -> AxisType:
        return SAME if own.kind is VARYING and value.kind is SHARDED else own

    return (*types[:seed], tuple(map(along, types[seed], types[0])), *types[seed + 1 :])


@lru_cache(256)
def presumed_layout(types: tuple[ReplicaType, ...], modified: frozenset[int]) -> tuple[ReplicaType, ...]:
    """Types of an op's operands, with those that it changes as the shards that they are changed by, where replicas have
    variables of their own whose layout is not stated: such as sums of gradients' shards."""
    by = join_of_others(types, modified)
    if by is None or not any(along.kind is SHARDED for along in by):
        return types

    def presumed(was: AxisType, now: AxisType) -> AxisType:
        return now if now.dimension is not None and was.own is OWN else was

    return tuple(tuple(map(presumed, t, by)) if i in modified else t for i, t in enumerate(types))


@lru_cache(256)
def has_known_dimensions(type_: ReplicaType) -> bool:
    """Whether replicas have pieces along a known dimension, which a view may move."""
    return any(along.dimension not in (None, FLAT) for along in type_)


@lru_cache(256)
def exchanged_type(before: ReplicaType, axes: Sequence[int], same: AxisType | None, reduces: bool) -> ReplicaType:
    """Result type of an op between replicas: `same` on all of a group, or else each one's shard of a value."""
    made = list(before)
    for i in axes:
        if same is not None or reduces or before[i].kind < SHARDED:
            made[i] = same or FLAT_SHARDS
    return tuple(made)


@lru_cache(256)
def repeated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """Axes along which equal values were summed."""
    return tuple(i for i, along in enumerate(type_) if along.reduced is AGAIN)


@lru_cache(256)
def diverged_axes(was: ReplicaType, after: ReplicaType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a variable has lost its declared type: those without a reduction, and the others. None, if a
    type is unknown."""
    if any(along.kind is UNKNOWN for along in after):
        return (), ()
    found = [
        i
        for i, (before, now) in enumerate(zip(was, after, strict=True))
        if (before.kind is REPLICATED and now.kind > REPLICATED) or (before == FLAT_SHARDS and now.kind is PARTIAL)
    ]
    certain = tuple(i for i in found if after[i].reduced is NEVER)
    return certain, tuple(i for i in found if i not in certain)
