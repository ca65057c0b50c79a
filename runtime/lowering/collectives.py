"""How replicas talk to each other: what `popxl.ops.collectives.Group` is, in each way of running replicas.

On a mesh the answers are JAX's collectives, which know groups. On one device all replicas are in one array, where a
group is an index. A replica that is alone asks nobody. Members are in the order of the replicas, and floats are summed
in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.errors import PopxlError
from popxl.ops.collectives.collectives import OP_MAP, share, wide
from popxl.ops.collectives.group import Group, chunk_size
from runtime.targets.replicas import AXIS, Replicas

Array = Any

LANES = 128
"""TPUs hold arrays in rows of so many numbers. Of chunks that are no whole rows, they would sum all of all replicas."""

BLOCK = 32 * LANES
"""A chunk of whole blocks is summed as it lies; others XLA would pad, and shift what it has summed between TPUs."""

FEW = 8 * LANES
"""So few numbers for each replica a TPU sums whole in any case, as nothing is quicker, and blocks would be padding."""


def group_of(replicas: Replicas, stride: int, size: int) -> Group:
    """The group of each of these replicas, as they run.

    Raises:
        PopxlError: if they do not form such groups.
    """
    if replicas.count % (stride * size):
        raise PopxlError(
            f"it was made for groups of {size} replicas that are {stride} apart, and the program has "
            f"{replicas.count}. Set `ir.replication_factor` before ops are made."
        )
    way = _Alone if size == 1 else _OnOneDevice if replicas.mesh is None else _OnMesh
    return way(replicas.count, stride, size)


class _Alone(Group):
    """A group of one."""

    @property
    def rank(self) -> Array:
        return 0

    def members(self, t: Array) -> Array:
        return t[None]

    def combined(self, t: Array, op: str) -> Array:
        return OP_MAP[op]([t])


class _Several(Group):
    """A group of more than one."""

    @property
    def rank(self) -> Array:
        return lax.axis_index(AXIS) // self.stride % self.size


class _OnOneDevice(_Several):
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


class _OnMesh(_Several):
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
        length = chunk_size(t.size, self.size)
        terms = self.chunks(_TERMS[op](t), length)
        if length <= FEW:
            total = lax.psum_scatter(terms, AXIS, axis_index_groups=self._groups)
        else:
            rows = jnp.pad(terms, ((0, 0), (0, -length % BLOCK))).reshape(-1, LANES)
            total = lax.psum_scatter(rows, AXIS, axis_index_groups=self._groups, tiled=True).reshape(-1)[:length]
        return self._finished(total, op)

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
