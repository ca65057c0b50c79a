"""Means over variables, and over their rows and columns, also for sharded variables and those of replica groups."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from popxl.extend.collectives import OP_MAP, Group, shard_length
from popxl.extend.kernels import Array


class Means:
    """Means over whole arrays."""

    def global_mean(self, t: Array) -> Array:
        """Mean of all elements."""
        return jnp.mean(t)

    def of_rows(self, t: Array) -> Array:
        """Means over the last axis, kept with size 1."""
        return t.mean(-1, keepdims=True)

    def of_columns(self, t: Array) -> Array:
        """Means over the second to last axis, kept with size 1."""
        return t.mean(-2, keepdims=True)

    def over_rows(self, rows: Array) -> Array:
        """Means over the second to last axis of results of `of_rows`, kept with size 1."""
        return rows.mean(-2, keepdims=True)

    def own_shard(self, whole: Array) -> Array:
        """A replica's shard of an array."""
        return whole


class ShardedMeans(Means):
    """Means over sharded arrays; shards are flat, zero-padded at the end.

    A shard is aligned to rows of the whole array, padded with zeros before its first and after its last element. Sums
    over rows and columns are then dense, and replicas exchange arrays of the size of the means.

    Args:
        group: the members that hold the shards.
        shape: shape of the whole array.
        num_shards: number of shards: member `i` of the group holds shard `i % num_shards`.
    """

    def __init__(self, group: Group, shape: tuple[int, ...], num_shards: int) -> None:
        self.group, self.shape, self.num_shards = group, shape, num_shards
        self.length = shard_length(shape, num_shards)

    def global_mean(self, t: Array) -> Array:
        return self._total(t.sum()) / math.prod(self.shape)

    def of_rows(self, t: Array) -> Array:
        lines, first = self._lines(t)
        count = math.prod(self.shape[:-1])
        sums = lax.dynamic_update_slice(jnp.zeros(count + len(lines), t.dtype), lines.sum(1), (first,))
        return self._total(sums[:count]).reshape(*self.shape[:-1], 1) / self.shape[-1]

    def of_columns(self, t: Array) -> Array:
        lines, first = self._lines(t)
        *batch, rows, columns = self.shape
        matrix = (first + jnp.arange(len(lines))) // rows  # of each line; surplus lines are zeros
        sums = lines.sum(0) if not batch else jax.ops.segment_sum(lines, matrix, math.prod(batch))
        return self._total(sums).reshape(*batch, 1, columns) / rows

    def own_shard(self, whole: Array) -> Array:
        flat = jnp.pad(whole.reshape(-1), (0, self.num_shards * self.length - whole.size))
        return lax.dynamic_slice(flat, (self._start,), (self.length,))

    @property
    def _start(self) -> Array:
        """Offset of the own shard."""
        return self.group.rank % self.num_shards * self.length

    def _lines(self, t: Array) -> tuple[Array, Array]:
        """The own shard in lines, with the first line's row number."""
        columns = self.shape[-1]
        count = -(-self.length // columns) + 1
        first, offset = self._start // columns, self._start % columns
        return lax.dynamic_update_slice(jnp.zeros(count * columns, t.dtype), t, (offset,)).reshape(
            count, columns
        ), first

    def _total(self, t: Array) -> Array:
        """Sum over all shards, of which several members may hold copies."""
        return self.group.combined(t, "add") * (self.num_shards / self.group.size)


class MeansOverGroups(Means):
    """Means over arrays divided equally between replica groups along an axis.

    Members of a group have equal means over its part, and groups have equal sizes: means over all parts are the mean
    over all replicas.

    Args:
        axis: the axis, counted from the end: -1 divides rows, and -2 columns.
    """

    def __init__(self, shard_means: Means, all_replicas: Group, axis: int) -> None:
        self.shard_means, self.all_replicas, self.axis = shard_means, all_replicas, axis

    def global_mean(self, t: Array) -> Array:
        return self._mean(self.shard_means.global_mean(t))

    def of_rows(self, t: Array) -> Array:
        rows = self.shard_means.of_rows(t)
        return self._mean(rows) if self.axis == -1 else rows

    def of_columns(self, t: Array) -> Array:
        columns = self.shard_means.of_columns(t)
        return self._mean(columns) if self.axis == -2 else columns

    def over_rows(self, rows: Array) -> Array:
        mean = self.shard_means.over_rows(rows)
        return self._mean(mean) if self.axis == -2 else mean

    def own_shard(self, whole: Array) -> Array:
        return self.shard_means.own_shard(whole)

    def _mean(self, t: Array) -> Array:
        return self.all_replicas.combined(t, "add") / self.all_replicas.size


class SubGroup(Group):
    """A subgroup of an op over all replicas; values of all replicas are gathered."""

    def __init__(self, all_replicas: Group, stride: int, size: int) -> None:
        super().__init__(all_replicas.count, stride, size)
        self.all_replicas = all_replicas

    @property
    def rank(self) -> Array:
        return self.all_replicas.rank // self.stride % self.size

    def members(self, t: Array) -> Array:
        first = self.all_replicas.rank - self.rank * self.stride
        return self.all_replicas.members(t)[first + self.stride * jnp.arange(self.size)]

    def combined(self, t: Array, op: str) -> Array:
        return OP_MAP[op]([*self.members(t)])
