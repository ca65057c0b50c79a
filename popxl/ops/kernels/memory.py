"""Availability of values, and the memory that they are in: identities in plain JAX, and hints for compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from popxl.ops.kernels.kernel import Kernel


@Kernel
def available_together(values: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """`values` and `others`. The compiler must take no value to be available before `others`, nor to equal any earlier
    value."""
    return values, others


@Kernel
def scheduled_together(values: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """`values` and `others`. A hint to compute `values` after `others`, for compilers that schedule by it."""
    return values, others


@Kernel
def computed_after(value: Any, others: Sequence[Any]) -> Any:
    """`value`, with the order after all of `others` enforced at run time: schedulers cannot postpone these."""
    return value


@Kernel
def prefetched_after(value: Any, other: Any) -> Any:
    """`value`, computed after `other` on platforms whose compiler would prefetch it at any earlier time."""
    return value


@Kernel
def in_host_memory(value: Any) -> Any:
    """Copy `value` to host memory, on devices with separate memory."""
    return value


@Kernel
def in_device_memory(value: Any) -> Any:
    """Copy a host-memory value to device memory."""
    return value
