"""Types of variables before a run, as their groupings and locations declare them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator
from functools import lru_cache

import numpy as np

from popxl.analysis.mesh import Mesh
from popxl.analysis.replicas.axis_types import (
    FLAT_SHARDS,
    NOT_KNOWN,
    OWN,
    SAME,
    SHARDED,
    VARYING,
    AxisType,
    ReplicaType,
)
from popxl.core.tensor import Tensor, Variable


def begins_different(mesh: Mesh, v: Variable, axis: int) -> bool:
    """Whether replicas along an axis have different numbers to begin with."""
    if v.replica_grouping.num_groups == 1:
        return False
    groups = np.asarray(v.replica_grouping.assignment).reshape(mesh.sizes)
    first = np.broadcast_to(groups.take([0], axis), groups.shape)
    rows = v.numbers()
    return not np.array_equal(rows[groups.ravel()], rows[first.ravel()], equal_nan=v.dtype.is_floating_point)


def variable_types(mesh: Mesh, variables: Iterable[Variable], learned: Container[Tensor]) -> Iterator[ReplicaType]:
    """Declared types of variables. Separate values of replicas count as data, unless they are `learned`."""
    known: dict[Hashable, ReplicaType] = {}  # many variables have the same grouping, that of a weight or of the Ir
    for v in variables:
        grouping, place = v.replica_grouping, v.location_info
        is_learned = grouping.num_groups > 1 and v in learned and v.dtype.is_floating_point
        key = (id(grouping), v.group_axis, is_learned, id(place.buffer if place.sharded else None))
        found = known.get(key)
        if found is None:
            found = known[key] = _variable_type(mesh, v, is_learned)
        yield found


def _variable_type(mesh: Mesh, v: Variable, is_learned: bool) -> ReplicaType:
    shared = mesh.spanned_axes(v.replica_grouping)
    if shared is None:
        return (NOT_KNOWN,) * len(mesh.names)
    own = AxisType(SHARDED, v.group_axis)
    if v.group_axis is None:
        own = AxisType(VARYING, own=OWN if is_learned else None)
    place = v.location_info
    divided: tuple[int, ...] = ()
    if place.sharded and place.buffer is not None:
        group = v.replica_grouping.const_rg
        count = place.buffer.shard_over
        divided = shared if group is None or count is None else mesh.along(group.stride, count)
    return _declared_type(len(mesh.names), shared, own, divided)


@lru_cache(256)
def _declared_type(width: int, shared: tuple[int, ...], own: AxisType, divided: tuple[int, ...]) -> ReplicaType:
    return tuple(FLAT_SHARDS if i in divided else SAME if i in shared else own for i in range(width))
