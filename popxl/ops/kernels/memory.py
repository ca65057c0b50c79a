"""Availability of values, and the memory that they are in: identities in plain JAX, and hints for compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from popxl.ops.kernels.kernel import Kernel


@Kernel
def available_together(value: Any, other: Any) -> tuple[Any, Any]:
    """`value` and `other`. The compiler must take neither `value` to be available before `other`, nor to equal any
    earlier value."""
    return value, other


@Kernel
def all_available_together(values: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """`values` and `others`, which become available together."""
    results = lax.optimization_barrier((*values, *others))
    return results[: len(values)], results[len(values) :]


@Kernel
def computed_after(value: Any, others: Sequence[Any]) -> Any:
    """`value`, with the order after all of `others` enforced at run time: schedulers cannot postpone these."""
    return value


@Kernel
def in_host_memory(value: Any) -> Any:
    """Copy `value` to host memory, on devices with separate memory."""
    return value


@Kernel
def in_device_memory(value: Any) -> Any:
    """Copy a host-memory value to device memory."""
    return value
