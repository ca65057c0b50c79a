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

from popxl.core.tensor import Tensor
from popxl.ops.kernels.kernel import Kernel, KernelImpl

Array = Any


class Order(Protocol):
    """What was computed last from each storage of a running graph: what overwrites the storage comes after."""

    def note(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Note that a result was computed from a storage."""

    def note_within(self, storage: Tensor, value: Array) -> None:
        """Note that a graph that was called has computed something from a storage."""

    def computed_from(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """What was computed last from storages, by position."""

    def overwriting(self, storage: Tensor, value: Array, rows: int) -> Array:
        """A value that a storage, one of so many rows of an array, is overwritten with, computed after what was
        computed from the storage."""


class AnyOrder:
    """The order of a compiler that orders by itself all that reads a storage and what overwrites it."""

    def note(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Nothing has to be noted."""

    def note_within(self, storage: Tensor, value: Array) -> None:
        """Nothing has to be noted."""

    def computed_from(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """Nothing was noted."""
        return {}

    def overwriting(self, storage: Tensor, value: Array, rows: int) -> Array:
        """The value as it is."""
        return value


class Turns(Protocol):
    """The turns that executables take whose devices meet, where no two may run at once."""

    def alone(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call an executable after those before, and wait for its end."""

    def turn(self, changing: Sequence[Array]) -> AbstractContextManager[Callable[[Sequence[Array]], None]]:
        """A block that calls an executable, which changes this, after those before. It gives a function to be told what
        the executable makes."""


def _as_it_is(row: Array, number: Array) -> Array:
    """The row, of which the compiler leaves in the turns what it would do to all rows."""
    return row


@dataclass(frozen=True)
class MachineParts:
    """What a kind of machine adds to a program.

    Attributes:
        forms: the kernels that it computes in another form.
        order: makes what keeps the order of updates of one graph, told whether it is in the turns of a loop.
        copied: copies an array that is fed, for the caller may fill it again while the program runs.
        turns: of executables whose devices meet; `None` where they may run at once.
        in_turn: what a turn of a loop has of an array that no turn changes, given the row that it reads and its number.
    """

    forms: Mapping[Kernel, KernelImpl] = field(default_factory=dict)
    order: Callable[[bool], Order] = lambda in_loop: AnyOrder()
    copied: Callable[[np.ndarray], np.ndarray] = np.ndarray.copy
    turns: Turns | None = None
    in_turn: Callable[[Array, Array], Array] = _as_it_is


@cache
def parts_for(platform: str) -> MachineParts:
    """What is added on a platform of JAX's. It is imported here, as it is of no use elsewhere."""
    if platform == "cpu":
        from runtime.cpu import feeds, order, turns
        from runtime.cpu import forms as of_cpus

        return MachineParts(of_cpus.FORMS, order.Order, feeds.copied, turns.Turns())
    if platform == "tpu":
        from runtime.tpu import forms as of_tpus
        from runtime.tpu import rows

        return MachineParts(of_tpus.FORMS, in_turn=rows.in_turn)
    if platform == "gpu":
        from runtime.gpu import forms as of_gpus

        return MachineParts(of_gpus.FORMS)
    return MachineParts()
