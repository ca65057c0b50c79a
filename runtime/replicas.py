"""The replicas of a program: one axis, over devices if there are enough of them, else over the arrays of one device.

A program is written for one replica. `Replicas.spread` makes a function of all of them out of a function of one: every
array gains a leading dimension, one element for each replica. With a device for each replica that is `jax.shard_map`
over a mesh; otherwise it is `jax.vmap`. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Array = Any

AXIS = "replicas"
"""Name of the axis, for `jax.lax` collectives inside of a spread function."""


_SAFE: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}


@cache
def _cpu_options() -> dict[str, str | bool] | None:
    """Options for XLA on CPUs: of YNNPACK's fusions only products, as some of reductions compute something else.

    (Products summed along the last axis of three, twice in one expression, are off by their own size with jaxlib
    0.10.2.) A jaxlib that does not have the option does not have the fusions.
    """
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_SAFE)
    except jax.errors.JaxRuntimeError as problem:
        if "No such compile option" not in str(problem):
            raise
        return None
    return _SAFE


class Replicas:
    """How many replicas there are, and where they are.

    Args:
        count: how many. One replica has no axis: nothing is spread.
        devices: where they run: one device for each, or one for all.

    Attributes:
        mesh: the devices along the axis; `None` if they all run on one device. Only on a mesh do JAX's collectives take
            groups of the axis (`axis_index_groups`).
    """

    def __init__(self, count: int = 1, devices: Sequence[Any] = (None,)) -> None:
        self.count = count
        self.mesh = Mesh(np.asarray(devices[:count]), (AXIS,)) if 1 < count <= len(devices) else None
        self._device = devices[0]

    def __str__(self) -> str:
        if self.count == 1:
            return "one replica"
        return f"{self.count} replicas on {'as many devices' if self.mesh is not None else 'one device'}"

    def spread(self, function: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
        """A function of arrays, as one of the arrays of all replicas.

        Args:
            function: takes trees of arrays.
            shared: the last argument is the same for all replicas, and has no dimension for them.
        """
        if self.count == 1:
            return function
        return self._by_vmap(function, shared) if self.mesh is None else self._by_shard_map(function, shared)

    def _by_vmap(self, function: Callable[..., Any], shared: bool) -> Callable[..., Any]:
        def of_all(*trees: Any) -> Any:
            axes = (*[0] * (len(trees) - shared), *[None] * shared)
            return jax.vmap(function, axes, axis_name=AXIS, axis_size=self.count)(*trees)

        return of_all

    def _by_shard_map(self, function: Callable[..., Any], shared: bool) -> Callable[..., Any]:
        def of_one(*trees: Any) -> Any:  # of arrays with a leading dimension of size 1
            own, others = (trees[:-1], trees[-1:]) if shared else (trees, ())
            results = function(*jax.tree.map(lambda block: block[0], own), *others)
            return jax.tree.map(lambda result: result[None], results)

        def of_all(*trees: Any) -> Any:
            specs = (*[PartitionSpec(AXIS)] * (len(trees) - shared), *[PartitionSpec()] * shared)
            mapped = jax.shard_map(
                of_one, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), check_vma=False
            )
            return mapped(*trees)

        return of_all

    def compile(self, lowered: Any) -> Any:
        """What XLA makes of a lowered function for the devices of the replicas."""
        platform = jax.default_backend() if self._device is None else self._device.platform
        return lowered.compile(compiler_options=_cpu_options() if platform == "cpu" else None)

    def sharding(self, axis: int | None = 0) -> Any:
        """Where arrays of all replicas are, whose dimension `axis` counts the replicas; `None` for shared ones."""
        if self.mesh is None:
            return SingleDeviceSharding(self._device)
        return NamedSharding(self.mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array of all replicas."""
        return shape if self.count == 1 else (self.count, *shape)

    def spec(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The array of all replicas, for lowering, where each replica has an array of this shape."""
        return jax.ShapeDtypeStruct(self.shape(shape), dtype, sharding=self.sharding())

    def put(self, array: Array) -> Array:
        """The array of all replicas, where each replica has this one."""
        return jax.device_put(np.broadcast_to(array, self.shape(array.shape)), self.sharding())
