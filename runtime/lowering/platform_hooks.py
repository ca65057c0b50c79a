"""`PlatformHooks`: platform-specific parts of the lowering: kernel overrides, order of in-place updates, copies of
feeds, the lock of collectives, loop-invariant rows.

`runtime.cpu`, `runtime.gpu` and `runtime.tpu` are imported for these platforms only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import jax
import numpy as np

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from popxl.ops.kernels.kernel import Kernel, KernelImpl


class UpdateOrder(Protocol):
    """Order of in-place updates: an update of a storage comes after results that read it."""

    def record_read(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Record a result computed from a storage."""

    def record_nested_read(self, storage: Tensor, value: Array) -> None:
        """Record a result that a called graph computed from a storage."""

    def last_computed(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """The last results computed from storages, by position."""

    def order_write(self, storage: Tensor, value: Array, rows: int) -> Array:
        """Order an updated value after recorded reads of its storage, one of `rows` rows of an array."""


class Unordered:
    """Update order of compilers that order reads and updates themselves."""

    def record_read(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """No-op."""

    def record_nested_read(self, storage: Tensor, value: Array) -> None:
        """No-op."""

    def last_computed(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """No results."""
        return {}

    def order_write(self, storage: Tensor, value: Array, rows: int) -> Array:
        """The unchanged value."""
        return value


class CollectiveLock(Protocol):
    """A lock for executables with collectives, which must not run concurrently."""

    def run_exclusive(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call an executable after earlier ones, and wait for its results."""

    def acquire(self, changing: Sequence[Array]) -> AbstractContextManager[Callable[[Sequence[Array]], None]]:
        """Hold the lock while an executable is called that updates `changing`. Yields a function that takes its
        results."""


@dataclass(frozen=True)
class PlatformHooks:
    """Platform-specific parts of the lowering.

    Attributes:
        update_order: creates the update order of a graph, given whether it is in a loop body.
        copy_feed: copies a fed array, because the caller may overwrite it while the program runs.
        collective_lock: the lock of executables with collectives; `None` if they may run concurrently.
        invariant_row: function that gives an iteration's row of a loop-invariant array, from the row and its number;
            the row itself, for compilers that keep operations inside loops.
    """

    overrides: Mapping[Kernel, KernelImpl] = field(default_factory=dict)
    update_order: Callable[[bool], UpdateOrder] = lambda in_loop: Unordered()
    copy_feed: Callable[[np.ndarray], np.ndarray] = np.ndarray.copy
    collective_lock: CollectiveLock | None = None
    invariant_row: Callable[[Array, Array], Array] = lambda row, number: row


@cache
def hooks_for(platform: str) -> PlatformHooks:
    """The hooks of a JAX platform; imports platform modules on demand."""
    if platform == "cpu":
        from runtime.cpu import collective_lock, feeds, kernel_overrides, update_order

        lock = collective_lock.CpuCollectiveLock()
        return PlatformHooks(kernel_overrides.OVERRIDES, update_order.CpuUpdateOrder, feeds.copy_feed, lock)
    if platform == "tpu":
        from runtime.tpu import invariant_rows
        from runtime.tpu import kernel_overrides as tpu_overrides

        return PlatformHooks(tpu_overrides.OVERRIDES, invariant_row=invariant_rows.invariant_row)
    if platform == "gpu":
        from runtime.gpu import kernel_overrides as gpu_overrides

        return PlatformHooks(gpu_overrides.OVERRIDES)
    return PlatformHooks()


@cache
def hooks_for_device(platform: str, device: jax.Device, is_present: bool) -> PlatformHooks:
    """Hooks for a device: its platform's hooks, with kernels of libraries that it supports."""
    hooks = hooks_for(platform)
    if platform != "gpu":
        return hooks
    from runtime.gpu import attention

    return replace(hooks, overrides={**hooks.overrides, **attention.overrides(device, is_present)})
