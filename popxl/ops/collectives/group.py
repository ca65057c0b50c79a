"""`Group`: operations on the replicas of a group, for lowerings of ops between replicas.

All of them are built on two: gathering the values of the members, and combining them. Implementations depend on the
placement of replicas and are in `runtime.lowering.collectives`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array


def chunk_size(count: int, group_size: int) -> int:
    """Elements per group member, rounded up; last members may hold padding."""
    return -(-count // group_size)


class Group(ABC):
    """The group of each replica, while a program runs: `size` replicas, neighbours `stride` apart, out of `count`.

    Example:
        The largest value that any member has, as an op.

        >>> from popxl.extend.collectives import members
        >>> from popxl.op import BetweenReplicas
        >>> def highest(t, *, group):
        ...     return group.combined(jnp.max(t), "max")
        >>> Highest = popxl.OpKind(
        ...     "Highest", highest, shape=lambda t, **groups: popxl.TensorSpec((), t.dtype), gradient=None,
        ...     traits=[BetweenReplicas()],
        ... )
        >>> with ir.main_graph:
        ...     y = Highest(x, **members("Highest", ir.replica_grouping()))
    """

    def __init__(self, count: int, stride: int, size: int) -> None:
        self.count, self.stride, self.size = count, stride, size

    @property
    @abstractmethod
    def rank(self) -> Array:
        """The place of a replica within its group."""

    @abstractmethod
    def members(self, t: Array) -> Array:
        """All-gather: the members' values of `t` by rank, along a new first dimension."""

    @abstractmethod
    def combined(self, t: Array, op: str) -> Array:
        """Reduce `t` over all members; results may have a wider dtype."""

    def combined_chunk(self, t: Array, op: str) -> Array:
        """Reduce-scatter: the own chunk of `combined`."""
        return self.chunk(self.combined(t, op), chunk_size(t.size, self.size))

    def exchanged(self, t: Array) -> Array:
        """All-to-all: blocks addressed to this member, by sender rank; `t` has one block per receiver along its first
        dimension."""
        length = len(t) // self.size
        return lax.dynamic_slice_in_dim(self.members(t), self.rank * length, length, axis=1).reshape(t.shape)

    def shifted(self, t: Array, distance: int) -> Array:
        """Cyclic shift of `t` over members by a distance."""
        return lax.dynamic_index_in_dim(self.members(t), (self.rank - distance % self.size) % self.size, keepdims=False)

    def chunk(self, t: Array, length: int) -> Array:
        """The replica's own chunk of an array; zeros follow its end."""
        return lax.dynamic_index_in_dim(self.chunks(t, length), self.rank, keepdims=False)

    def chunks(self, t: Array, length: int) -> Array:
        """An array cut into chunks, one for each member."""
        return jnp.pad(t.reshape(-1), (0, length * self.size - t.size)).reshape(self.size, length)
