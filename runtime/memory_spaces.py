"""Kernels controlling value availability and memory space, for devices with separate memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

from popxl.ops.kernels import memory
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from runtime.fake_dependency import computed_after


def available_after(value: Any, other: Any) -> Any:
    """Order `value` after `other` with an optimization barrier."""
    return lax.optimization_barrier((value, other))[0]


def in_host_memory(value: Any) -> Any:
    """Copy `value` to pinned host memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def in_device_memory(value: Any) -> Any:
    """Copy `value` to device memory."""
    return jax.device_put(value, jax.memory.Space.Device)


OVERRIDES: Mapping[Kernel, KernelImpl] = {
    memory.available_after: available_after,
    memory.computed_after: computed_after,
    memory.in_host_memory: in_host_memory,
    memory.in_device_memory: in_device_memory,
}
