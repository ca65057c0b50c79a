"""Kernels controlling value availability and memory space, for devices with separate memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from popxl.ops.kernels import memory
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from runtime.fake_dependency import computed_after


def available_together(values: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Order `values` after `others` with an optimization barrier. XLA drops results of a barrier that nothing reads,
    and the order with them: read both."""
    results = lax.optimization_barrier((*values, *others))
    return results[: len(values)], results[len(values) :]


def in_host_memory(value: Any) -> Any:
    """Copy `value` to pinned host memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def in_device_memory(value: Any) -> Any:
    """Copy `value` to device memory."""
    return jax.device_put(value, jax.memory.Space.Device)


OVERRIDES: Mapping[Kernel, KernelImpl] = {
    memory.available_together: available_together,
    memory.computed_after: computed_after,
    memory.in_host_memory: in_host_memory,
    memory.in_device_memory: in_device_memory,
}
