"""How replicas talk to each other: what the ops of `popxl.ops.collectives` mean.

Two questions are asked of a group: what values its members have, and what they are combined. Each way of running
replicas answers both. On a mesh that is JAX's collectives, which know groups. On one device all replicas are in one
array, where a group is an index. A replica that is alone asks nobody. All else is built on the answers, and so the
same: members are in the order of the replicas, and floats are summed in that order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.errors import PopxlError
from popxl.op import Op, OpKind
from popxl.ops.collectives.collectives import OP_MAP, share, wide
from popxl.ops.collectives.replicated import (
    all_gather_kind,
    all_reduce_inplace_kind,
    all_reduce_kind,
    chunk_size,
    reduce_scatter_kind,
    sharded_slice_kind,
    slice_kind,
)
from runtime.effects import Channels
from runtime.lower import Environment, Lowering, meaning, store_results
from runtime.replicas import AXIS, Replicas

Array = Any

# Groups -------------------------------------------------------------------------------------------------------------


class Group(ABC):
    """The group of each replica: `size` replicas, neighbours `stride` apart, out of `count`."""

    def __init__(self, count: int, stride: int, size: int) -> None:
        self.count, self.stride, self.size = count, stride, size

    @staticmethod
    def of(replicas: Replicas, stride: int, group_size: int) -> Group:
        """Of these replicas, as they run."""
        if replicas.count % (stride * group_size):
            raise PopxlError(
                f"it was made for groups of {group_size} replicas that are {stride} apart, and the program has "
                f"{replicas.count}. Set `ir.replication_factor` before ops are made."
            )
        way = _Alone if group_size == 1 else _OnOneDevice if replicas.mesh is None else _OnMesh
        return way(replicas.count, stride, group_size)

    @property
    def rank(self) -> Array:
        """The place of a replica within its group."""
        return lax.axis_index(AXIS) // self.stride % self.size

    @abstractmethod
    def members(self, t: Array) -> Array:
        """What `t` is on the members, by rank, along a new first dimension."""

    @abstractmethod
    def combined(self, t: Array, op: str) -> Array:
        """What `t` is on all members, combined; it may be wider than `t`."""

    def combined_chunk(self, t: Array, op: str) -> Array:
        """The own chunk of that."""
        return self.chunk(self.combined(t, op), chunk_size(t.size, self.size))

    def chunk(self, t: Array, length: int) -> Array:
        """The own chunk of an array; zeros lie behind its end."""
        return lax.dynamic_index_in_dim(self.chunks(t, length), self.rank, keepdims=False)

    def chunks(self, t: Array, length: int) -> Array:
        """An array cut into chunks, one for each member."""
        return jnp.pad(t.reshape(-1), (0, length * self.size - t.size)).reshape(self.size, length)


class _Alone(Group):
    """A group of one."""

    @property
    def rank(self) -> Array:
        return 0

    def members(self, t: Array) -> Array:
        return t[None]

    def combined(self, t: Array, op: str) -> Array:
        return OP_MAP[op]([t])


class _OnOneDevice(Group):
    """A group of replicas that all run on one device: the values of all are gathered, and the group picks its own.

    Groups are told apart by number only after they have been reduced, so that this is done once for each.
    """

    def members(self, t: Array) -> Array:
        return self._own(self._groups(t))

    def combined(self, t: Array, op: str) -> Array:
        groups = self._groups(t)
        return self._own(OP_MAP[op]([groups[:, rank] for rank in range(self.size)]))

    def _groups(self, t: Array) -> Array:
        """What `t` is on all replicas: by number of the group, and by rank."""
        blocks = lax.all_gather(t, AXIS).reshape(-1, self.size, self.stride, *t.shape)
        return blocks.swapaxes(1, 2).reshape(-1, self.size, *t.shape)

    def _own(self, groups: Array) -> Array:
        replica = lax.axis_index(AXIS)
        number = replica % self.stride + self.stride * (replica // (self.stride * self.size))
        return groups[0] if len(groups) == 1 else lax.dynamic_index_in_dim(groups, number, keepdims=False)


class _OnMesh(Group):
    """A group of replicas that have a device each."""

    @property
    def _groups(self) -> list[list[int]] | None:
        """The replicas of each group; `None` for one group of all."""
        if self.size == self.count:
            return None
        block = self.stride * self.size
        firsts = [start + i for start in range(0, self.count, block) for i in range(self.stride)]
        return [list(range(first, first + block, self.stride)) for first in firsts]

    def members(self, t: Array) -> Array:
        return lax.all_gather(t, AXIS, axis_index_groups=self._groups)

    def combined(self, t: Array, op: str) -> Array:
        if op in _TERMS:
            return self._finished(lax.psum(_TERMS[op](t), AXIS, axis_index_groups=self._groups), op)
        if op in _EXTREMES:
            return self._extreme(t, *_EXTREMES[op])
        return OP_MAP[op](list(self.members(t)))

    def combined_chunk(self, t: Array, op: str) -> Array:
        if op not in _TERMS:
            return super().combined_chunk(t, op)
        terms = self.chunks(_TERMS[op](t), chunk_size(t.size, self.size))
        return self._finished(lax.psum_scatter(terms, AXIS, axis_index_groups=self._groups), op)

    def _finished(self, total: Array, op: str) -> Array:
        return share(total, self.size) if op == "mean" else total

    def _extreme(self, t: Array, reduce: Callable[..., Array], neutral: float) -> Array:
        """The smallest or largest value. Devices may overlook NaN, which is told apart: nobody wants to miss it."""
        t = wide(t)
        if not jnp.issubdtype(t.dtype, jnp.floating):
            return reduce(t, AXIS, axis_index_groups=self._groups)
        unknown = jnp.isnan(t)
        extreme = reduce(jnp.where(unknown, jnp.asarray(neutral, t.dtype), t), AXIS, axis_index_groups=self._groups)
        any_unknown = lax.pmax(unknown.astype(jnp.int32), AXIS, axis_index_groups=self._groups)
        return jnp.where(any_unknown > 0, jnp.asarray(jnp.nan, t.dtype), extreme)


_TERMS: dict[str, Callable[[Array], Array]] = {"add": wide, "mean": wide, "square_add": lambda t: jnp.square(wide(t))}
"""The reductions that are sums, and what they are sums of."""

_EXTREMES = {"min": (lax.pmin, jnp.inf), "max": (lax.pmax, -jnp.inf)}

# Ops ----------------------------------------------------------------------------------------------------------------


def _between_replicas(kind: OpKind) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register what an op between replicas computes: a function of the group, the operand, and the attributes."""

    def register(function: Callable[..., Array]) -> Callable[..., Array]:
        @meaning(kind)
        def carry_out(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> None:
            attributes = dict(op.attributes)
            try:
                group = Group.of(lowering.replicas, attributes.pop("stride"), attributes.pop("group_size"))
            except PopxlError as problem:
                raise PopxlError(f"Session: {op!r} ({op.source}) cannot be run: {problem}") from None
            store_results(op, function(group, environment.read(op.inputs[0]), **attributes), environment)

        return function

    return register


@_between_replicas(all_reduce_kind)
@_between_replicas(all_reduce_inplace_kind)
def all_reduce(group: Group, t: Array, *, op: str) -> Array:
    """The values of all members, combined."""
    return group.combined(t, op)


@_between_replicas(reduce_scatter_kind)
def reduce_scatter(group: Group, t: Array, *, op: str, sharded: bool) -> Array:
    """The own chunk of the values of all members, combined."""
    return group.combined_chunk(t, op)


@_between_replicas(all_gather_kind)
def all_gather(group: Group, t: Array, *, shape: tuple[int, ...]) -> Array:
    """The values of all members, one after the other, as far as the shape goes."""
    joined = group.members(_as_bytes(t)).reshape(-1)
    return _as(t.dtype, joined[: math.prod(shape)].reshape(shape))


@_between_replicas(sharded_slice_kind)
@_between_replicas(slice_kind)
def own_chunk(group: Group, t: Array, *, chunk: int) -> Array:
    """The own chunk of the own value."""
    return _as(t.dtype, group.chunk(_as_bytes(t), chunk))


def _as_bytes(t: Array) -> Array:
    """Float8 as bytes, which nothing converts or rounds on the way; other arrays as they are."""
    return lax.bitcast_convert_type(t, jnp.uint8) if _is_float8(t.dtype) else t


def _as(dtype: Any, t: Array) -> Array:
    return lax.bitcast_convert_type(t, dtype) if _is_float8(dtype) else t


def _is_float8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
