"""The kernels that say when a value is available and in which memory it is, for devices with a memory of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

from popxl.ops.kernels import memory
from popxl.ops.kernels.kernel import Kernel, KernelImpl


def available_after(value: Any, other: Any) -> Any:
    """`value` behind a barrier that it passes together with `other`."""
    return lax.optimization_barrier((value, other))[0]


def in_host_memory(value: Any) -> Any:
    """A copy of `value` in pinned memory of the host."""
    return jax.device_put(value, jax.memory.Space.Host)


def in_device_memory(value: Any) -> Any:
    """A copy in the memory of the device."""
    return jax.device_put(value, jax.memory.Space.Device)


OVERRIDES: Mapping[Kernel, KernelImpl] = {
    memory.available_after: available_after,
    memory.in_host_memory: in_host_memory,
    memory.in_device_memory: in_device_memory,
}
