"""Types of variables before a run, from their groupings and locations."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator
from functools import lru_cache

import numpy as np

from popxl.analysis.mesh import Mesh
from popxl.analysis.replicas.axis_types import (
    FLAT_SHARDS,
    NOT_KNOWN,
    SAME,
    SHARDED,
    VALUES,
    VARYING,
    AxisType,
    ReplicaType,
)
from popxl.core.tensor import Tensor, Variable


def starts_different(mesh: Mesh, v: Variable, axis: int) -> bool:
    """Whether the initial values of replicas along an axis differ."""
    if v.replica_grouping.num_groups == 1:
        return False
    groups = np.asarray(v.replica_grouping.assignment).reshape(mesh.sizes)
    first = np.broadcast_to(groups.take([0], axis), groups.shape)
    rows = v.numbers()
    return not np.array_equal(rows[groups.ravel()], rows[first.ravel()], equal_nan=v.dtype.is_floating_point)


def variable_types(mesh: Mesh, variables: Iterable[Variable], trained: Container[Tensor]) -> Iterator[ReplicaType]:
    """Declared types of variables. Per-replica values count as data, unless they are `trained`."""
    cache: dict[Hashable, ReplicaType] = {}  # many variables have the same grouping
    for v in variables:
        grouping, location = v.replica_grouping, v.location_info
        is_trained = grouping.num_groups > 1 and v in trained and v.dtype.is_floating_point
        key = (id(grouping), v.group_axis, is_trained, id(location.buffer if location.sharded else None))
        type_ = cache.get(key)
        if type_ is None:
            type_ = cache[key] = _variable_type(mesh, v, is_trained)
        yield type_


def _variable_type(mesh: Mesh, v: Variable, is_trained: bool) -> ReplicaType:
    shared_axes = mesh.spanned_axes(v.replica_grouping)
    if shared_axes is None:
        return (NOT_KNOWN,) * len(mesh.names)
    separate = AxisType(SHARDED, v.group_axis)
    if v.group_axis is None:
        separate = AxisType(VARYING, per_replica=VALUES if is_trained else None)
    location = v.location_info
    sharded_axes: tuple[int, ...] = ()
    if location.sharded and location.buffer is not None:
        group = v.replica_grouping.const_rg
        count = location.buffer.shard_over
        sharded_axes = shared_axes if group is None or count is None else mesh.along(group.stride, count)
    return _declared_type(len(mesh.names), shared_axes, separate, sharded_axes)


@lru_cache(256)
def _declared_type(
    width: int, shared_axes: tuple[int, ...], separate: AxisType, sharded_axes: tuple[int, ...]
) -> ReplicaType:
    return tuple(FLAT_SHARDS if i in sharded_axes else SAME if i in shared_axes else separate for i in range(width))
