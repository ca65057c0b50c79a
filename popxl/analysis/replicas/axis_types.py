"""`AxisType`: the distribution of a value over replicas along one axis of the mesh; the lattice of the inference.

A value is *replicated* along an axis if it is equal on all replicas that differ along it only; *sharded* if they hold
shards of one value, or results computed from shards; *partial* if the value is the sum over replicas; and *varying* if
replicas hold unrelated values.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple


class Replication(IntEnum):
    """Distribution of a value over replicas along an axis, ordered: an op usually has the largest of its operands.

    Attributes:
        ZERO: zeros on all replicas.
        CONSTANT: equal by construction: constants, and scalars from the host's feeds.
        REPLICATED: equal on all replicas.
        SHARDED: shards of one value, or results computed from them.
        PARTIAL: terms of a sum over replicas.
        VARYING: unrelated values.
        UNKNOWN: result of an op with an unknown effect.
    """

    __hash__ = int.__hash__  # faster than that of enumerations in Python

    ZERO = -1
    CONSTANT = 0
    REPLICATED = 1
    SHARDED = 2
    PARTIAL = 3
    VARYING = 4
    UNKNOWN = 5


class Reduced(IntEnum):
    """Reductions along the axis that a value derives from. Differences between replicas may be intended after one: the
    program has reduced what it wants to be equal.

    Attributes:
        NEVER: no reduction.
        ONCE: a reduction.
        REDUNDANT: a sum of equal values.
    """

    __hash__ = int.__hash__

    NEVER = 0
    ONCE = 1
    REDUNDANT = 2


class PerReplica(IntEnum):
    """Values that differ between replicas only by their per-replica variables.

    Such variables are mostly shards along an undeclared dimension, and products of two such values terms of a sum. They
    are presumed to be terms only if the program sums them later.

    Attributes:
        VALUES: derived from per-replica variables.
        TERMS: presumed terms of a sum.
        TERMS_PLUS_SHARED: presumed terms plus a replicated value on each replica.
        NONLINEAR_TERMS: nonlinear function of presumed terms.
    """

    __hash__ = int.__hash__

    VALUES = 0
    TERMS = 1
    TERMS_PLUS_SHARED = 2
    NONLINEAR_TERMS = 3


ZERO, CONSTANT, REPLICATED, SHARDED, PARTIAL, VARYING, UNKNOWN = Replication
NEVER, ONCE, REDUNDANT = Reduced
VALUES, TERMS, TERMS_PLUS_SHARED, NONLINEAR_TERMS = PerReplica


class AxisType(NamedTuple):
    """Distribution of a value along one axis of the mesh.

    Attributes:
        kind: distribution.
        dimension: for shards, the sharded dimension, or `FLAT`; `None` if unknown.
        reduced: for replicated and varying values, the reductions that they derive from.
        per_replica: for varying values that differ by per-replica variables only; else `None`.
    """

    kind: Replication
    dimension: int | None = None
    reduced: Reduced = NEVER
    per_replica: PerReplica | None = None


ReplicaType = tuple[AxisType, ...]
"""Type of a value: its distribution along each axis of the mesh."""

FLAT = -1
"""Dimension of the shards of a flattened value."""
ZEROS = AxisType(ZERO)
LITERAL = AxisType(CONSTANT)
SAME = AxisType(REPLICATED)
REDUCED = AxisType(REPLICATED, reduced=ONCE)
REPEATED_SUM = AxisType(REPLICATED, reduced=REDUNDANT)
SHARDS = AxisType(SHARDED)  # along an unknown dimension
FLAT_SHARDS = AxisType(SHARDED, FLAT)
SUM = AxisType(PARTIAL)
OWN_DATA = AxisType(VARYING)  # differs by more than per-replica variables
NOT_KNOWN = AxisType(UNKNOWN)


@lru_cache(4096)
def join(left: ReplicaType, right: ReplicaType) -> ReplicaType:
    """Join of two types."""
    return tuple(_join_axis(a, b) for a, b in zip(left, right, strict=True))


def _join_axis(a: AxisType, b: AxisType) -> AxisType:
    if a == b:
        return a
    larger = max(a.kind, b.kind)
    if larger not in (REPLICATED, VARYING):
        if a.kind == b.kind:
            return AxisType(larger)
        return a if a.kind is larger else b
    reduced = max(a.reduced, b.reduced)
    per_replica = {axis.per_replica for axis in (a, b) if axis.kind is VARYING}
    if not per_replica or None in per_replica or reduced is REDUNDANT:
        return AxisType(larger, reduced=reduced)
    return AxisType(VARYING, reduced=reduced, per_replica=per_replica.pop() if len(per_replica) == 1 else VALUES)


def is_term(along: AxisType) -> bool:
    """Test for terms of a sum, stated or presumed."""
    return along.kind is PARTIAL or along.per_replica is TERMS


def join_axis(axes: Sequence[AxisType]) -> AxisType:
    """Join of types along one axis."""
    joined = axes[0]
    for axis in axes[1:]:
        joined = _join_axis(joined, axis)
    return joined


@lru_cache(4096)
def join_all(types: tuple[ReplicaType, ...]) -> ReplicaType:
    """Join of several types."""
    joined = types[0]
    for type_ in types:
        if type_ != joined:
            joined = join(joined, type_)
    return joined
