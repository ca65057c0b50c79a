"""What a program takes from the machine that it is for: other forms of kernels, an order of updates, copies of feeds,
turns of executables, and rows that turns of loops read.

`runtime.cpu`, `runtime.gpu` and `runtime.tpu` are imported for these machines only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from popxl.ops.kernels.kernel import Kernel, KernelImpl


class UpdateOrder(Protocol):
    """What was computed last from each storage of a running graph: what overwrites the storage comes after."""

    def record_read(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Note that a result was computed from a storage."""

    def record_nested_read(self, storage: Tensor, value: Array) -> None:
        """Note that a graph that was called has computed something from a storage."""

    def last_computed(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """What was computed last from storages, by position."""

    def order_write(self, storage: Tensor, value: Array, rows: int) -> Array:
        """A value that a storage, one of so many rows of an array, is overwritten with, computed after what was
        computed from the storage."""


class Unordered:
    """The order of a compiler that orders by itself all that reads a storage and what overwrites it."""

    def record_read(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Nothing has to be noted."""

    def record_nested_read(self, storage: Tensor, value: Array) -> None:
        """Nothing has to be noted."""

    def last_computed(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """Nothing was noted."""
        return {}

    def order_write(self, storage: Tensor, value: Array, rows: int) -> Array:
        """The value as it is."""
        return value


class CollectiveLock(Protocol):
    """The turns that executables take whose devices meet, where no two may run at once."""

    def run_exclusive(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call an executable after those before, and wait for its end."""

    def acquire(self, changing: Sequence[Array]) -> AbstractContextManager[Callable[[Sequence[Array]], None]]:
        """A block that calls an executable, which changes this, after those before. It gives a function to be told what
        the executable makes."""


def _same_row(row: Array, number: Array) -> Array:
    """The row, of which the compiler leaves in the turns what it would do to all rows."""
    return row


@dataclass(frozen=True)
class PlatformHooks:
    """What a kind of machine adds to a program.

    Attributes:
        overrides: the kernels that it computes in another form.
        update_order: makes what keeps the order of updates of one graph, told whether it is in the turns of a loop.
        copy_feed: copies an array that is fed, for the caller may fill it again while the program runs.
        collective_lock: of executables whose devices meet; `None` where they may run at once.
        invariant_row: what an iteration reads of an array that no iteration changes, given the row and its number.
    """

    overrides: Mapping[Kernel, KernelImpl] = field(default_factory=dict)
    update_order: Callable[[bool], UpdateOrder] = lambda in_loop: Unordered()
    copy_feed: Callable[[np.ndarray], np.ndarray] = np.ndarray.copy
    collective_lock: CollectiveLock | None = None
    invariant_row: Callable[[Array, Array], Array] = _same_row


@cache
def hooks_for(platform: str) -> PlatformHooks:
    """What is added on a platform of JAX's. It is imported here, as it is of no use elsewhere."""
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
