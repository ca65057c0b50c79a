"""Types of what is moved or changed: stored in remote buffers, exchanged between replicas, updated in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import starmap

from popxl.analysis.replication import (
    AFTER_REPEATED_SUM,
    FLAT,
    NOT_KNOWN,
    OWN,
    OWN_DATA,
    PARTIAL,
    REPEATED_SUM,
    REPLICATED,
    SAME,
    SHARDED,
    UNKNOWN,
    VARYING,
    AxisType,
    Replication,
    ReplicaType,
    after_reduction,
    differs_by_own_variables,
    join,
    join_all,
)
from popxl.analysis.sharding_rules import SHARDS


@lru_cache(256)
def held_type(was: ReplicaType, stored: ReplicaType, is_declared: bool) -> ReplicaType:
    """Type of a remote buffer after a store.

    Along axes along which its slots are held in several ways it is unknown; or each replica has its own, where
    variables are declared there that replicas share.
    """

    def along(before: AxisType, joined: AxisType) -> AxisType:
        if before[0] is joined[0]:
            return before if before[0] in (REPLICATED, VARYING) else joined  # whatever was reduced on the way
        return OWN_DATA if is_declared and before == SAME and joined[0] in (PARTIAL, VARYING) else NOT_KNOWN

    return tuple(map(along, was, join(was, stored)))


@lru_cache(256)
def stacked_type(type_: ReplicaType) -> ReplicaType:
    """Type of the values of all iterations, stacked along a first dimension."""

    def along(kind: Replication, qualifier: int | None) -> AxisType:
        if kind is not SHARDED or qualifier is None:
            return kind, qualifier
        return kind, None if qualifier == FLAT else qualifier + 1

    return tuple(starmap(along, type_))


@lru_cache(256)
def join_of_others(types: tuple[ReplicaType, ...], modified: frozenset[int]) -> ReplicaType | None:
    """Join of the types of unmodified operands; `None` without any."""
    others = tuple([each for i, each in enumerate(types) if i not in modified])
    return join_all(others) if others else None


@lru_cache(256)
def kept_layout(was: ReplicaType, now: ReplicaType) -> ReplicaType:
    """Type of a changed operand, which stays divided along its dimension if the change's is not known."""
    return tuple(
        before if before[0] is SHARDED and (after == SHARDS or differs_by_own_variables(after, OWN)) else after
        for before, after in zip(was, now, strict=True)
    )


@lru_cache(256)
def masked_types(types: tuple[ReplicaType, ...], seed: int) -> tuple[ReplicaType, ...]:
    """Types of the operands of a dropout: for a shard, a seed of each replica's own is as good as one for all."""

    def along(own: AxisType, value: AxisType) -> AxisType:
        return SAME if own[0] is VARYING and value[0] is SHARDED else own

    return (*types[:seed], tuple(map(along, types[seed], types[0])), *types[seed + 1 :])


@lru_cache(256)
def presumed_layout(types: tuple[ReplicaType, ...], modified: frozenset[int]) -> tuple[ReplicaType, ...]:
    """Types of an op's operands, with those that it changes as the shards that they are changed by, where replicas have
    variables of their own whose layout is not stated: such as sums of gradients' shards."""
    by = join_of_others(types, modified)
    if by is None or not any(kind is SHARDED for kind, _ in by):
        return types

    def along(was: AxisType, now: AxisType) -> AxisType:
        return now if now[0] is SHARDED and now[1] is not None and differs_by_own_variables(was, OWN) else was

    return tuple(tuple(map(along, t, by)) if i in modified else t for i, t in enumerate(types))


@lru_cache(256)
def has_known_dimensions(type_: ReplicaType) -> bool:
    """Whether replicas have pieces along a known dimension, which a view may move."""
    return any(kind is SHARDED and dimension not in (None, FLAT) for kind, dimension in type_)


@lru_cache(256)
def exchanged_type(before: ReplicaType, axes: Sequence[int], same: AxisType | None, reduces: bool) -> ReplicaType:
    """Result type of an op between replicas: `same` on all of a group, or else each one's shard of a value."""
    made = list(before)
    for i in axes:
        if same is not None or reduces or before[i][0] < SHARDED:
            made[i] = same or (SHARDED, FLAT)
    return tuple(made)


@lru_cache(256)
def repeated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """Axes along which equal values were summed."""
    repeated = (REPEATED_SUM, (VARYING, AFTER_REPEATED_SUM))
    return tuple(i for i, along in enumerate(type_) if along in repeated)


@lru_cache(256)
def diverged_axes(was: ReplicaType, after: ReplicaType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a variable has lost its declared type: those without a reduction, and the others. None, if a
    type is unknown."""
    if any(kind is UNKNOWN for kind, _ in after):
        return (), ()
    found = [
        i
        for i, (before, (kind, _)) in enumerate(zip(was, after, strict=True))
        if (before[0] is REPLICATED and kind > REPLICATED) or (before == (SHARDED, FLAT) and kind is PARTIAL)
    ]
    certain = tuple(i for i in found if after[i][0] is not VARYING or after_reduction(after[i][1]) != after[i][1])
    return certain, tuple(i for i in found if i not in certain)
