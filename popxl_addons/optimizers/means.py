"""Means over a variable and over its rows and columns, where each replica may hold a piece or a part of it only."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from popxl.extend.collectives import OP_MAP, Group, shard_length
from popxl.extend.kernels import Array

__all__ = ["Means", "MeansOverGroups", "MeansOverPieces", "Within"]


class Means:
    """Means over arrays that are whole."""

    def global_mean(self, t: Array) -> Array:
        """The mean of all elements."""
        return jnp.mean(t)

    def of_rows(self, t: Array) -> Array:
        """The means over the last axis, which stays with the size 1."""
        return t.mean(-1, keepdims=True)

    def of_columns(self, t: Array) -> Array:
        """The means over the last axis but one, likewise."""
        return t.mean(-2, keepdims=True)

    def over_rows(self, rows: Array) -> Array:
        """The means over the last axis but one of what `of_rows` gives, likewise."""
        return rows.mean(-2, keepdims=True)

    def own_shard(self, whole: Array) -> Array:
        """A replica's shard of an array."""
        return whole


class MeansOverPieces(Means):
    """Means over sharded arrays; shards are flat, zero-padded at the end.

    A piece is laid into lines that are as long as the rows of the whole, at the place where it begins in its row. Sums
    over lines and columns then are dense, and what replicas tell each other is as long as the means.

    Args:
        group: the replicas that hold the pieces.
        whole: the shape of an array.
        pieces: how many there are: member `i` of the group holds piece `i % pieces`.
    """

    def __init__(self, group: Group, whole: tuple[int, ...], pieces: int) -> None:
        self.group, self.whole, self.pieces = group, whole, pieces
        self.length = shard_length(whole, pieces)

    def global_mean(self, t: Array) -> Array:
        return self._total(t.sum()) / math.prod(self.whole)

    def of_rows(self, t: Array) -> Array:
        lines, first = self._lines(t)
        count = math.prod(self.whole[:-1])
        sums = lax.dynamic_update_slice(jnp.zeros(count + len(lines), t.dtype), lines.sum(1), (first,))
        return self._total(sums[:count]).reshape(*self.whole[:-1], 1) / self.whole[-1]

    def of_columns(self, t: Array) -> Array:
        lines, first = self._lines(t)
        *batch, rows, columns = self.whole
        matrix = (first + jnp.arange(len(lines))) // rows  # the one that a line belongs to; what is too much is zeros
        sums = lines.sum(0) if not batch else jax.ops.segment_sum(lines, matrix, math.prod(batch))
        return self._total(sums).reshape(*batch, 1, columns) / rows

    def own_shard(self, whole: Array) -> Array:
        flat = jnp.pad(whole.reshape(-1), (0, self.pieces * self.length - whole.size))
        return lax.dynamic_slice(flat, (self._start,), (self.length,))

    @property
    def _start(self) -> Array:
        """Offset of the own shard."""
        return self.group.rank % self.pieces * self.length

    def _lines(self, t: Array) -> tuple[Array, Array]:
        """The own shard in lines, with the first line's row number."""
        columns = self.whole[-1]
        count = -(-self.length // columns) + 1
        first, place = self._start // columns, self._start % columns
        return lax.dynamic_update_slice(jnp.zeros(count * columns, t.dtype), t, (place,)).reshape(count, columns), first

    def _total(self, t: Array) -> Array:
        """The sum over the pieces, which several members may hold."""
        return self.group.combined(t, "add") * (self.pieces / self.group.size)


class MeansOverGroups(Means):
    """Means over arrays that groups of replicas divide between them, equally, along an axis.

    All members of a group have the same means over its part, and groups have the same size: so what means over all
    parts are is the mean of what all replicas have.

    Args:
        own: the means over the part of a group.
        everyone: all replicas.
        axis: the axis, counted from the end: -1 divides rows, and -2 columns.
    """

    def __init__(self, own: Means, everyone: Group, axis: int) -> None:
        self.own, self.everyone, self.axis = own, everyone, axis

    def global_mean(self, t: Array) -> Array:
        return self._mean(self.own.global_mean(t))

    def of_rows(self, t: Array) -> Array:
        rows = self.own.of_rows(t)
        return self._mean(rows) if self.axis == -1 else rows

    def of_columns(self, t: Array) -> Array:
        columns = self.own.of_columns(t)
        return self._mean(columns) if self.axis == -2 else columns

    def over_rows(self, rows: Array) -> Array:
        mean = self.own.over_rows(rows)
        return self._mean(mean) if self.axis == -2 else mean

    def own_shard(self, whole: Array) -> Array:
        return self.own.own_shard(whole)

    def _mean(self, t: Array) -> Array:
        return self.everyone.combined(t, "add") / self.everyone.size


class Within(Group):
    """A subgroup for an op over all replicas; values of all replicas are gathered."""

    def __init__(self, everyone: Group, stride: int, size: int) -> None:
        super().__init__(everyone.count, stride, size)
        self.everyone = everyone

    @property
    def rank(self) -> Array:
        return self.everyone.rank // self.stride % self.size

    def members(self, t: Array) -> Array:
        first = self.everyone.rank - self.rank * self.stride
        return self.everyone.members(t)[first + self.stride * jnp.arange(self.size)]

    def combined(self, t: Array, op: str) -> Array:
        return OP_MAP[op]([*self.members(t)])
