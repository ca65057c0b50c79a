"""Collectives of replicas: implementations of `popxl.ops.collectives.Group` for each placement of replicas.

On a mesh they are JAX's collectives with groups. On one device all replicas are in one array, and a group is an index.
A single replica has no exchange. Members are in replica order, and floats are summed in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial, reduce
from operator import add
from typing import Literal

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.core.aliasing import lowered_ops
from popxl.core.recording import Op
from popxl.errors import PopxlError, PopxlInternalError
from popxl.ops.collectives.collectives import OP_MAP
from popxl.ops.collectives.exchanging import CollectiveBackend
from popxl.ops.collectives.group import Group, chunk_size
from runtime.noinline import noinline
from runtime.targets.replicas import AXIS, DividedReplicas, Replicas


def group_of(replicas: Replicas, stride: int, size: int) -> Group:
    """Build the group of each replica.

    Raises:
        PopxlError: if they do not form such groups.
    """
    if replicas.count % (stride * size):
        raise PopxlError(
            f"it was made for groups of {size} replicas that are {stride} apart, and the program has "
            f"{replicas.count}. Set `ir.replication_factor` before ops are made."
        )
    if size == 1:
        return _SingletonGroup(replicas.count, stride, size)
    if replicas.mesh is None:
        return _VmappedGroup(replicas.count, stride, size)
    return (_OrderedMeshGroup if sums_are_ordered(replicas) else _MeshGroup)(replicas, stride, size)


def sums_are_ordered(replicas: Replicas) -> bool:
    """Whether groups of these replicas use `OrderedSums`."""
    return isinstance(replicas, DividedReplicas) and replicas.is_cpu


class _SingletonGroup(Group):
    """A group of one replica."""

    @property
    def rank(self) -> Array:
        return 0

    def members(self, t: Array) -> Array:
        return t[None]

    def combined(self, t: Array, op: str) -> Array:
        return OP_MAP[op]([t])


class _VmappedGroup(Group):
    """Group of replicas on one device: gathers all values, then selects each group's.

    The values of a group are selected by its number after the reduction, so that each group is reduced once.
    """

    @property
    def rank(self) -> Array:
        return lax.axis_index(AXIS) // self.stride % self.size

    def members(self, t: Array) -> Array:
        return self._select_group(self._groups(t))

    def combined(self, t: Array, op: str) -> Array:
        groups = self._groups(t)
        return self._select_group(OP_MAP[op]([groups[:, rank] for rank in range(self.size)]))

    def _groups(self, t: Array) -> Array:
        """Gathered values of all replicas, by group and rank."""
        count = self.count // self.size
        blocks = lax.all_gather(t, AXIS).reshape(count // self.stride, self.size, self.stride, *t.shape)
        return blocks.swapaxes(1, 2).reshape(count, self.size, *t.shape)

    def _select_group(self, groups: Array) -> Array:
        replica = lax.axis_index(AXIS)
        number = replica % self.stride + self.stride * (replica // (self.stride * self.size))
        return groups[0] if len(groups) == 1 else lax.dynamic_index_in_dim(groups, number, keepdims=False)


class _MeshGroup(CollectiveBackend):
    """A group of replicas on separate devices: along mesh axes, or by `axis_index_groups` of a single axis."""

    def __init__(self, replicas: Replicas, stride: int, size: int) -> None:
        super().__init__(replicas.count, stride, size)
        self._axis = replicas.axis
        self._along = replicas.along(stride, size)
        self._groups: list[list[int]] | None = None  # one group of all
        if self._along is None:
            if replicas.axis != (AXIS,):
                raise PopxlInternalError(f"{self.size} replicas {stride} apart are not along {replicas.mesh}.")
            block = stride * size
            firsts = [start + i for start in range(0, self.count, block) for i in range(stride)]
            self._groups = [list(range(first, first + block, stride)) for first in firsts]
            self._along = (AXIS,)

    @property
    def rank(self) -> Array:
        return lax.axis_index(self._axis) // self.stride % self.size

    def members(self, t: Array) -> Array:
        return lax.all_gather(t, self._along, axis_index_groups=self._groups)

    def summed(self, t: Array) -> Array:
        return lax.psum(t, self._along, axis_index_groups=self._groups)

    def extreme(self, t: Array, op: Literal["min", "max"]) -> Array:
        return (lax.pmin if op == "min" else lax.pmax)(t, self._along, axis_index_groups=self._groups)

    def scattered(self, rows: Array) -> Array:
        return lax.psum_scatter(rows, self._along, axis_index_groups=self._groups, tiled=True)

    def exchanged(self, t: Array) -> Array:
        return lax.all_to_all(t, self._along, 0, 0, axis_index_groups=self._groups, tiled=True)

    def shifted(self, t: Array, distance: int) -> Array:
        groups = self._groups or [list(range(self.size))]  # along some dimensions of the mesh, all groups do the same
        pairs = [(group[i - distance % self.size], member) for group in groups for i, member in enumerate(group)]
        return lax.ppermute(t, self._along, pairs)


class OrderedSums(CollectiveBackend):
    """The sums of a group of CPU devices of several processes: those of one process, bit for bit.

    Within a process, XLA for CPUs adds the members' values to zero, in order. Between processes it adds along a ring,
    starting at another member for each part. So here each member receives its part of the others' values, and adds them
    itself. The number of bytes sent is the same. XLA fuses neither the additions, nor the joining of parts, with
    neighbouring ops, which would round differently. The exchanges stay within these ops: XLA orders the collectives of
    one computation only.
    """

    def summed(self, t: Array) -> Array:
        is_rounded = jnp.issubdtype(t.dtype, jnp.inexact)
        if self.size == 2 or not is_rounded:
            total: Array = super().summed(t)  # type: ignore[safe-super]  # of the group that these are the sums of
            return noinline(_added_to_zero)(total) if is_rounded else total
        own = self.scattered(self.chunks(t, chunk_size(t.size, self.size)))
        return noinline(partial(_unpadded, shape=t.shape))(self.members(own))

    def scattered(self, rows: Array) -> Array:
        if not jnp.issubdtype(rows.dtype, jnp.inexact):
            total: Array = super().scattered(rows)  # type: ignore[safe-super]
            return total
        return noinline(_sum_in_order)(self.exchanged(rows).reshape(self.size, len(rows) // self.size, *rows.shape[1:]))


class _OrderedMeshGroup(OrderedSums, _MeshGroup):
    """A group of CPU devices of several processes."""


def _sum_in_order(of_members: Array) -> Array:
    """Sum over the first dimension, one after the other."""
    return _added_to_zero(reduce(add, of_members))


def _unpadded(chunks: Array, shape: tuple[int, ...]) -> Array:
    """Array of chunks, without the padding at its end."""
    return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)


def _added_to_zero(total: Array) -> Array:
    """A sum to which zero was added first: it is never -0."""
    return jnp.where(total == 0, jnp.zeros_like(total), total)


def devices_meet(ops: Iterable[Op], replicas: Replicas) -> bool:
    """Whether any op is a collective over several devices."""
    if replicas.mesh is None:
        return False
    return any(op.kind.between_replicas and op.attributes["group_size"] > 1 for op in lowered_ops([*ops]))
