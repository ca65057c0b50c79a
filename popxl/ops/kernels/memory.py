"""When a value is available, and in which memory it is: identities in plain JAX, and hints for compilers."""

from __future__ import annotations

from typing import Any

from popxl.ops.kernels.kernel import Kernel


@Kernel
def available_after(value: Any, other: Any) -> Any:
    """`value`, which the compiler must not take to be available before `other`, nor to equal any earlier value."""
    return value


@Kernel
def in_host_memory(value: Any) -> Any:
    """A copy of `value` in the memory of the host, where a device has one of its own."""
    return value


@Kernel
def in_device_memory(value: Any) -> Any:
    """A copy, in the memory of the device, of a value in the memory of the host."""
    return value
