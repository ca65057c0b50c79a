"""`AxisType`: the distribution of a value over replicas, along one axis of the mesh.

A value is *replicated* along an axis if it is the same on all replicas that differ along it only; *sharded* if they
have shards of one value, or results computed from shards; *partial* if the value is the sum over replicas; and
*varying* if each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple


class Replication(IntEnum):
    """Distribution of a value over replicas along an axis. A result of two values usually has the larger of their
    types.

    Attributes:
        ZERO: zeros on all.
        GIVEN: the same on all replicas by construction: constants, and scalars from the host's feeds.
        REPLICATED: the same on all.
        SHARDED: shards of one value, or results computed from them.
        PARTIAL: terms of a sum, which is the value.
        VARYING: each has its own.
        UNKNOWN: result of an op with an unknown effect.
    """

    __hash__ = int.__hash__  # which is not that of enumerations in Python

    ZERO = -1
    GIVEN = 0
    REPLICATED = 1
    SHARDED = 2
    PARTIAL = 3
    VARYING = 4
    UNKNOWN = 5


class Reduced(IntEnum):
    """Whether a value was made of one that was reduced along the axis. What differs then may be meant, as the program
    has reduced what it wants to be the same.

    Attributes:
        NEVER: of none.
        ONCE: of one.
        AGAIN: of a sum of what was the same already.
    """

    __hash__ = int.__hash__

    NEVER = 0
    ONCE = 1
    AGAIN = 2


class OwnVariables(IntEnum):
    """What was made of variables that each replica has for itself, if nothing else differs between replicas.

    Such variables are mostly pieces whose dimension the program does not say, and products of two such values, terms of
    a sum; so they are taken to be if they are summed in the end, and only then.

    Attributes:
        OWN: something of these variables.
        TERMS: presumed terms of a sum.
        TERMS_PLUS_SHARED: such terms to which something was added on each replica.
        NONLINEAR_TERMS: results of a function of such terms that is not linear.
    """

    __hash__ = int.__hash__

    OWN = 0
    TERMS = 1
    TERMS_PLUS_SHARED = 2
    NONLINEAR_TERMS = 3


ZERO, GIVEN, REPLICATED, SHARDED, PARTIAL, VARYING, UNKNOWN = Replication
NEVER, ONCE, AGAIN = Reduced
OWN, TERMS, TERMS_PLUS_SHARED, NONLINEAR_TERMS = OwnVariables


class AxisType(NamedTuple):
    """Distribution of a value along one axis of the mesh.

    Attributes:
        kind: distribution.
        dimension: for shards, the dimension that they are along, or `FLAT`; `None` if that is not known.
        reduced: for replicated and varying values, whether they were reduced along the axis.
        own: for varying values, what was made of the replicas' own variables, if nothing else differs; else `None`.
    """

    kind: Replication
    dimension: int | None = None
    reduced: Reduced = NEVER
    own: OwnVariables | None = None


ReplicaType = tuple[AxisType, ...]
"""Type of a value: its distribution along each axis of the mesh."""

FLAT = -1
"""Dimension of the shards of a flattened value."""
ZEROS = AxisType(ZERO)
LITERAL = AxisType(GIVEN)
SAME = AxisType(REPLICATED)
REDUCED = AxisType(REPLICATED, reduced=ONCE)
REPEATED_SUM = AxisType(REPLICATED, reduced=AGAIN)
SHARDS = AxisType(SHARDED)  # along an unknown dimension
FLAT_SHARDS = AxisType(SHARDED, FLAT)
SUM = AxisType(PARTIAL)
OWN_DATA = AxisType(VARYING)  # not only by variables
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
        return AxisType(larger) if a.kind == b.kind else a if a.kind is larger else b
    reduced, own = max(a.reduced, b.reduced), {each.own for each in (a, b) if each.kind is VARYING}
    if not own or None in own or reduced is AGAIN:
        return AxisType(larger, reduced=reduced)
    return AxisType(VARYING, reduced=reduced, own=own.pop() if len(own) == 1 else OWN)


def is_term(along: AxisType) -> bool:
    """Whether replicas hold terms of a sum, or presumably do."""
    return along.kind is PARTIAL or along.own is TERMS


def join_axis(all: Sequence[AxisType]) -> AxisType:
    """The join of several, along one axis."""
    found = all[0]
    for each in all[1:]:
        found = _join_axis(found, each)
    return found


@lru_cache(4096)
def join_all(types: tuple[ReplicaType, ...]) -> ReplicaType:
    """The join of several types."""
    found = types[0]
    for each in types:
        if each != found:
            found = join(found, each)
    return found
