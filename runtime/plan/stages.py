"""Stages over processes: descriptions of arrays on IPUs of other processes, and copies between processes.

All processes execute the same steps in the same order, and each runs only the steps of its own IPUs. An array on IPUs
of other processes is described by a `jax.ShapeDtypeStruct` with its sharding. A copy between IPUs of different
processes is a collective of the devices of both. Steps have one order, so copies do too, and no two processes wait for
each other in different copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from popxl.base.arrays import Array
from runtime.jax_private import copied
from runtime.lowering.platform_hooks import CollectiveLock, hooks_for
from runtime.plan.compile_options import CompileOptions
from runtime.targets.compile_target import HOST
from runtime.targets.replicas import AXIS

Call = Callable[..., Any]
"""Calls an executable: see `call_now`."""


def call_now(executable: Any, name: Callable[[], str], *arguments: Any, lock: CollectiveLock | None = None) -> Any:
    """Call an executable, which has a name for people, holding `lock` if given."""
    return executable(*arguments) if lock is None else lock.run_exclusive(executable, *arguments)


class Stages:
    """Assignment of IPUs to processes, for replicas that span several processes.

    Attributes:
        own_ipu: the first IPU of this process.
    """

    def __init__(self, options_at: Mapping[int, CompileOptions]) -> None:
        self.own_ipu = next(ipu for ipu, options in options_at.items() if not options.compile_target.is_elsewhere)
        self._own_processes = _processes(options_at[self.own_ipu].replicas.sharding())
        self._firsts: dict[tuple[int, ...], Any] = {}  # sharding of the first IPU, by the processes of its replicas
        for options in options_at.values():
            sharding = options.replicas.sharding()
            self._firsts.setdefault(_processes(sharding), sharding)

    def copy(self, array: Array, sharding: Any, call: Call) -> Array:
        """Copy an array to other devices. All processes call this, including those without any of these devices."""
        return _link(array.sharding, sharding)(array, call)

    def own_copy(self, array: Array, call: Call = call_now) -> Array:
        """Array view on this process's devices for the same replicas. All processes call this."""
        if array.sharding.memory_kind == HOST:  # from where nothing is sent
            sharding = array.sharding.with_memory_kind("device")
            is_there = isinstance(array, jax.Array)
            array = jax.device_put(array, sharding) if is_there else array.update(sharding=sharding)
        found, processes = array, _processes(array.sharding)
        for others, sharding in self._firsts.items():
            if others != processes:
                copy = self.copy(array, sharding, call)
                found = copy if others == self._own_processes else found
        return found


def stages_of(options_at: Mapping[int, CompileOptions]) -> Stages | None:
    """Stages of a program partly owned by other processes."""
    return Stages(options_at) if any(options.compile_target.is_elsewhere for options in options_at.values()) else None


class StageLink:
    """Copy path between devices of two IPUs, replica by replica.

    Args:
        source: sharding of the sent array.
        target: sharding of the received array.
    """

    def __init__(self, source: Any, target: Any) -> None:
        self._target = target
        senders, receivers = _devices(source), _devices(target)
        self._is_within = _processes(source) == _processes(target)
        here = jax.process_index()
        self._own_devices = [device for device in (*senders, *receivers) if device.process_index == here]
        self._receivers = frozenset(receivers)
        self._is_distributed = len(senders) > 1
        self._mesh = Mesh(np.asarray([senders, receivers]), (_ENDS, AXIS))
        # Each replica has one array at either end; that both ends have the same is true afterwards only.
        self._both = NamedSharding(self._mesh, PartitionSpec(AXIS) if self._is_distributed else PartitionSpec())
        self._lock = hooks_for(senders[0].platform).collective_lock
        self._executables: dict[Any, Any] = {}

    def __call__(self, array: Array, call: Call) -> Array:
        """Send an array, receive it, or describe what others send."""
        description = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._target)
        if not self._own_devices:
            return description
        if self._is_within:
            return copied(array, self._target)
        sent = {} if isinstance(array, jax.ShapeDtypeStruct) else _shards(array)
        shape = self._both.shard_shape(array.shape)
        parts = [sent[d] if d in sent else jnp.zeros(shape, array.dtype, device=d) for d in self._own_devices]
        given = jax.make_array_from_single_device_arrays(array.shape, self._both, parts)
        both = call(self._executable(given), lambda: "copy between processes", given, lock=self._lock)
        received = [part for device, part in _shards(both).items() if device in self._receivers]
        if not received:
            return description
        return jax.make_array_from_single_device_arrays(array.shape, self._target, received)

    def _executable(self, array: Array) -> Any:
        """Compiled transfer of arrays of one kind."""
        kind = (array.shape, array.dtype)
        if kind not in self._executables:
            spec = self._both.spec
            send = jax.shard_map(_send, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
            self._executables[kind] = jax.jit(send).lower(array).compile()
        return self._executables[kind]


_ENDS = "ends"


def _send(array: Array) -> Array:
    return lax.ppermute(array, _ENDS, [(0, 1)])


_link = cache(StageLink)


def _devices(sharding: Any) -> Sequence[jax.Device]:
    """Devices of a sharding, in replica order."""
    return [*sharding.mesh.devices.flat] if isinstance(sharding, NamedSharding) else [*sharding.device_set]


@cache
def _processes(sharding: Any) -> tuple[int, ...]:
    """Process of each replica's device."""
    return tuple(device.process_index for device in _devices(sharding))


def _shards(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """Local shards of an array, by device."""
    return {shard.device: shard.data for shard in array.addressable_shards}
