"""The replicas of a program: one axis, over devices if there are enough of them, else over the arrays of one device.

A program is written for one replica. `Replicas.spread` makes a function of all of them out of a function of one: every
array gains a leading dimension, one element for each replica. With a device for each replica that is `jax.shard_map`
over a mesh; otherwise it is `jax.vmap`. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Array = Any

AXIS = "replicas"
"""Name of the axis, for `jax.lax` collectives inside of a spread function."""


class Replicas:
    """How many replicas there are, and where they are.

    Args:
        count: how many. One replica has no axis: nothing is spread.
        devices: where they run: one device for each, or one for all.

    Attributes:
        mesh: the devices along the axis; `None` if they all run on one device. Only on a mesh do JAX's collectives take
            groups of the axis (`axis_index_groups`).
    """

    def __init__(self, count: int, devices: Sequence[Any]) -> None:
        self.count = count
        self.mesh = Mesh(np.asarray(devices), (AXIS,)) if count > 1 and len(devices) == count else None
        self._device = devices[0]

    def spread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of arrays, as one of the arrays of all replicas."""
        if self.count == 1:
            return function
        if self.mesh is None:
            return jax.vmap(function, axis_name=AXIS, axis_size=self.count)
        each = PartitionSpec(AXIS)

        def of_one(*blocks: Any) -> Any:  # a block has a leading dimension of size 1
            results = function(*jax.tree.map(lambda block: block[0], blocks))
            return jax.tree.map(lambda result: result[None], results)

        return jax.shard_map(of_one, mesh=self.mesh, in_specs=each, out_specs=each, check_vma=False)

    def sharding(self, axis: int = 0) -> Any:
        """Where arrays of all replicas are, whose dimension `axis` counts the replicas."""
        if self.mesh is None:
            return SingleDeviceSharding(self._device)
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXIS))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array of all replicas."""
        return shape if self.count == 1 else (self.count, *shape)
