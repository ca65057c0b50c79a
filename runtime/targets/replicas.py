"""Replicas of a program: distributed over devices if available, otherwise batched on a single device.

A program is written for one replica. `Replicas.vmap_replicas` turns a function of one replica into a function of all:
every array gains a leading dimension, one element for each replica. With a device for each replica it uses
`jax.shard_map` over a mesh; otherwise `jax.vmap`. The numbers are the same.

On a mesh, arrays in host memory gain no dimension: those of the replicas are concatenated along the first one. TPUs
would fetch whole arrays to drop a dimension.

The mesh may have devices of several processes, each of which drives its own share of the replicas; then no process has
the arrays of all of them: `DividedReplicas`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from popxl.base.arrays import Array
from runtime import processes
from runtime.noinline import noinline
from runtime.signals import defer_signals, deliver_pending_signals

AXIS = "replicas"
"""Name of the axis, for `jax.lax` collectives inside of a spread function, unless a mesh has several dimensions."""


class Dimension(NamedTuple):
    """Dimension of a replica mesh.

    Attributes:
        name: name for `jax.lax` collectives.
        size: number of replicas along it.
        bytes: bytes that a replica sends along it in a run, if they matter for the placement of replicas.
    """

    name: str
    size: int
    bytes: int = 0


class Replicas:
    """Number and placement of replicas.

    Args:
        count: number of replicas. A single replica has no axis.
        devices: devices of the replicas: one per replica, or a single one.
        dimensions: mesh dimensions, the outermost first; by default a single one.

    Attributes:
        is_present: whether their devices can run a program, as opposed to offline targets.
        mesh: the devices, as the replicas stand; `None` if they all run on one device. Only on a mesh of one dimension
            do JAX's collectives take groups of it (`axis_index_groups`).
        axis: the names of all dimensions, which together count the replicas.
        local_count: number of replicas that this process drives.
        device: the first device of this process.
    """

    is_present = True

    def __init__(self, count: int = 1, devices: Sequence[Any] = (None,), dimensions: Sequence[Dimension] = ()) -> None:
        self.count = count
        self.mesh: Mesh | None = None
        self.axis: tuple[str, ...] = (AXIS,)
        if 1 < count <= len(devices):
            stand = dimensions or (Dimension(AXIS, count),)
            self.axis = tuple(dimension.name for dimension in stand)
            shape = [dimension.size for dimension in stand]
            self.mesh = Mesh(np.asarray(devices[:count]).reshape(shape), self.axis)
        self.local_count = count
        self.device = devices[0]

    def __str__(self) -> str:
        if self.count == 1:
            return "one replica"
        return f"{self.count} replicas on {'as many devices' if self.mesh is not None else 'one device'}"

    @property
    def per_device(self) -> int:
        """Replicas per device, and so array copies per device."""
        return self.count if self.mesh is None else 1

    @property
    def platform(self) -> str:
        """JAX platform name; if unspecified, of JAX's default device."""
        device = self.device
        if device is None:
            device = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform, or none
        return jax.default_backend() if device is None else str(getattr(device, "platform", device))

    @property
    def is_cpu(self) -> bool:
        """Whether they run on CPUs."""
        return self.platform == "cpu"

    @property
    def devices(self) -> tuple[Any, ...]:
        """Replica devices: one each, or one shared device."""
        return (self.device,) if self.mesh is None else tuple(self.mesh.devices.flat)

    def along(self, stride: int, size: int) -> tuple[str, ...] | None:
        """Mesh dimensions spanning groups of `size` replicas at `stride`; `None` unless such groups span whole
        dimensions."""
        assert self.mesh is not None
        distance, names, length_of_names = 1, list[str](), 1
        for name, length in reversed(self.mesh.shape.items()):
            if stride <= distance < stride * size:
                names.insert(0, name)
                length_of_names *= length
            distance *= length
        return tuple(names) if length_of_names == size else None

    def vmap_replicas(self, function: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
        """Lift a per-replica array function to arrays of all replicas.

        Args:
            shared: whether all replicas share the last argument, which then has no replica dimension.
        """
        if self.count == 1:
            return function
        return self._by_vmap(function, shared) if self.mesh is None else self._by_shard_map(function, shared)

    def _by_vmap(self, function: Callable[..., Any], shared: bool) -> Callable[..., Any]:
        def unstack_replicas(block: Any) -> Any:  # in host memory, the replicas' arrays are concatenated
            return block.reshape(self.count, -1, *block.shape[1:]) if is_on_host(block) else block

        def restack_replicas(block: Any) -> Any:
            return block.reshape(-1, *block.shape[2:]) if is_on_host(block) else block

        def apply_vmapped(*trees: Any) -> Any:
            axes = (*[0] * (len(trees) - shared), *[None] * shared)
            vmapped = jax.vmap(function, axes, axis_name=AXIS, axis_size=self.count)
            return jax.tree.map(restack_replicas, vmapped(*jax.tree.map(unstack_replicas, trees)))

        return apply_vmapped

    def _by_shard_map(self, function: Callable[..., Any], shared: bool) -> Callable[..., Any]:
        # On CPUs XLA would fuse the reshapes below with updates, and then copy donated arrays instead of overwriting
        # them.
        called = noinline(function) if self.is_cpu else function

        def apply_per_device(*trees: Any) -> Any:  # of arrays with a leading dimension of size 1
            own, others = (trees[:-1], trees[-1:]) if shared else (trees, ())
            results = called(*jax.tree.map(lambda block: block if is_on_host(block) else block[0], own), *others)
            return jax.tree.map(lambda result: result if is_on_host(result) else result[None], results)

        def apply_sharded(*trees: Any) -> Any:
            each = PartitionSpec(self.axis)
            specs = (*[each] * (len(trees) - shared), *[PartitionSpec()] * shared)
            mapped = jax.shard_map(apply_per_device, mesh=self.mesh, in_specs=specs, out_specs=each, check_vma=False)
            return mapped(*trees)

        return apply_sharded

    def sharding(self, axis: int | None = 0) -> Any:
        """Sharding of all replicas' arrays, with replica dimension `axis`; `None` means shared arrays."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axis))

    @cached_property
    def shared(self) -> Callable[[list[Array]], list[Array]]:
        """Function from arrays of all replicas, equal on all, to arrays that they share: each device keeps its own."""

        def first(arrays: list[Array]) -> list[Array]:
            return [array[0] for array in arrays]

        if self.mesh is None:
            return jax.jit(first)
        specs = PartitionSpec(self.axis), PartitionSpec()
        return jax.jit(jax.shard_map(first, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array of all replicas, given one replica's shape."""
        return shape if self.count == 1 else (self.count, *shape)

    def spec(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Abstract array of all replicas for lowering, given one replica's shape."""
        return jax.ShapeDtypeStruct(self.shape(shape), dtype, sharding=self.sharding())

    # Arrays of the host ---------------------------------------------------------------------------------------------

    def broadcast(self, array: Array) -> Array:
        """Replicate `array` to all replicas."""
        return self.transfer(np.broadcast_to(array, self.shape(array.shape)), self.sharding())

    def transfer(self, array: np.ndarray, sharding: Any) -> Array:
        """Transfer an array of all replicas from the host to devices."""
        return defer_signals(partial(jax.device_put, array, sharding))

    def build_array(self, shape: tuple[int, ...], part: Callable[[int], np.ndarray], where: Any = None) -> Array:
        """Build an array of all replicas on a mesh, calling `part` for each local replica.

        Args:
            part: function that returns a replica's elements, in any shape.
            where: memory kind, if it is not that of the devices.
        """
        share = shape[0] // self.count  # in the host's memory, a replica has several rows

        def rows(index: Any) -> np.ndarray:
            deliver_pending_signals()
            return part((index[0].start or 0) // share).reshape(share, *shape[1:])

        where = self.sharding() if where is None else where
        return defer_signals(partial(jax.make_array_from_callback, shape, where, rows))

    def fetched(self, array: Array) -> np.ndarray:
        """Copy an array of all replicas, with leading replica dimension, to the host."""
        return defer_signals(partial(np.asarray, array))

    def fetched_once(self, array: Array) -> np.ndarray:
        """Copy a replicated array to the host as rows of numbers, reading only one local device."""
        if self.count == 1:
            return self.fetched(array).reshape(1, -1)
        first = defer_signals(lambda: np.asarray(array.addressable_shards[0].data)[:1])
        return np.broadcast_to(first.reshape(1, -1), (self.count, first.size))

    def assemble_global(self, array: Array, shape: tuple[int, ...], axis: int) -> Array:
        """Assemble the global array of all replicas from this process's local array.

        Args:
            array: local array of this process, with or without a dimension for a single replica.
        """
        return array

    def barrier(self, place: str, runs: int, payload: Any = None) -> list[Any]:
        """Wait for all processes that drive replicas at barrier `place`, after `runs` runs.

        Returns the payloads of all processes.
        """
        return [payload]


class DividedReplicas(Replicas):
    """Replicas driven by several processes, one device per replica.

    Args:
        devices: the devices of all processes, in the order of the replicas.
        dimensions: as for `Replicas`.

    Attributes:
        own_replicas: numbers of the replicas that this process drives.
    """

    def __init__(self, count: int, devices: Sequence[Any], dimensions: Sequence[Dimension] = ()) -> None:
        super().__init__(count, devices, dimensions)
        self.own_replicas = [i for i, each in enumerate(devices) if each.process_index == jax.process_index()]
        self.local_count = len(self.own_replicas)
        self.device = devices[self.own_replicas[0]]

    def __str__(self) -> str:
        return f"{self.count} replicas on as many devices, {self.local_count} of them of this process"

    def transfer(self, array: np.ndarray, sharding: Any) -> Array:
        return defer_signals(partial(jax.make_array_from_callback, array.shape, sharding, array.__getitem__))

    def fetched(self, array: Array) -> np.ndarray:
        """Copy an array of all replicas to every process's host; a collective operation.

        It goes shard by shard, because each device temporarily has the shards of all other replicas. It waits for all
        devices of this process: a CPU might start the next exchange before this one, and confuse the two.
        """
        if self.count == 1:  # its device is this process's
            return super().fetched(array)
        size, everywhere = int(np.prod(array.shape[1:], dtype=np.int64)), self.sharding(None)
        step = max(1, min(size, _PIECE // (len(array) * array.dtype.itemsize)))
        whole = np.empty((len(array), size), array.dtype)
        for start in (min(first, size - step) for first in range(0, size, step)):
            pieces = defer_signals(partial(_slice_per_replica, array, start, step, everywhere))
            whole[:, start : start + step] = jax.block_until_ready(pieces).addressable_data(0)
        return whole.reshape(array.shape)

    def fetched_here(self, array: Array, replicas: Collection[int]) -> dict[int, np.ndarray]:
        """Copy the shards of some local replicas from an array of all replicas to the host, without other processes."""
        share = len(array) // self.count  # in host memory, a replica has several rows
        shards = defer_signals(
            lambda: {(shard.index[0].start or 0) // share: shard.data for shard in array.addressable_shards}
        )
        return {replica: np.array(shards[replica]) for replica in replicas}

    def barrier(self, place: str, runs: int, payload: Any = None) -> list[Any]:
        # Collectives of unequal numbers of runs would wait for each other, or meet other collectives.
        return processes.barrier(f"{place} after {runs} run{'s' * (runs != 1)}", payload)

    def assemble_global(self, array: Array, shape: tuple[int, ...], axis: int) -> Array:
        own = array if self.count == 1 else array.reshape(*shape[:axis], self.local_count, *shape[axis + 1 :])
        return jax.make_array_from_process_local_data(self.sharding(axis), own, shape)

    def local_shards(self, array: Array, shape: tuple[int, ...]) -> Array:
        """This process's local shards of an array of all replicas, reshaped to `shape`, on their current devices."""
        shards = array.addressable_shards
        if self.local_count == 1:
            return shards[0].data.reshape(shape)
        own = Mesh(np.asarray([shard.device for shard in shards]), (AXIS,))
        sharding = NamedSharding(own, PartitionSpec(*(None if part is None else AXIS for part in array.sharding.spec)))
        return jax.make_array_from_single_device_arrays(shape, sharding, [shard.data for shard in shards])


class DescribedReplicas(Replicas):
    """Replicas on absent devices, with abstract arrays only."""

    is_present = False

    def transfer(self, array: np.ndarray, sharding: Any) -> Array:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def is_on_host(array: Array) -> bool:
    """Whether a traced array resides in host memory."""
    return jax.typeof(array).memory_space is jax.memory.Space.Host


_PIECE = 1 << 26  # bytes


@partial(jax.jit, static_argnums=(2, 3))
def _slice_per_replica(array: Array, start: int, length: int, sharding: Any) -> Array:
    """Slice `length` elements of each replica's array, placed with `sharding`."""
    rows = array.reshape(len(array), -1)
    return lax.with_sharding_constraint(lax.dynamic_slice_in_dim(rows, start, length, 1), sharding)
