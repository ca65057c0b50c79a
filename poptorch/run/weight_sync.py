"""`WeightSync`: host and device copies of a wrapper's weights, with tracking of the current one.

The device's copy is newer after a run that changes weights, the host's after a write to the module or after a run of
another wrapper that trains the same module. `LazyWeights` copies the device's values back at their first read,
`TrainingRegistry` finds newer values of other wrappers, `HostWrites` finds writes to the module.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from poptorch.capture.torch_private import without_modes
from poptorch.run.graph_breaks import CompiledModel
from poptorch.run.host_model import HostModel
from poptorch.run.host_writes import HostWrites
from poptorch.run.weights import LazyWeights, TrainingRegistry


class WeightSync:
    """Parameters and buffers of a model: synchronisation of host and device copies.

    Attributes:
        host_writes: writes to the module since the device has read it.
        lazy: module and tensors that the device changes, if any; reads the host's values.
    """

    def __init__(self, host: HostModel, training: bool) -> None:
        self._host, self._training = host, training
        self._trainings = TrainingRegistry(host.module)
        self._program: CompiledModel | None = None
        self._structure: tuple[tuple[str, Any], ...] = ()  # structure of the module at compilation
        self.host_writes = HostWrites(host.module)
        self.lazy = self._watching(())

    def _watching(self, changed: Container[str] | None) -> LazyWeights:
        return LazyWeights(self._host.module, self._fetch, self._host.grouped, changed)

    # The program ----------------------------------------------------------------------------------------------------

    def instrument(self) -> None:
        """Instrument a module before training, with its current parameters and buffers.

        Raises:
            RuntimeError: if another wrapper trains it.
        """
        if self._training and not (self.lazy.trains and self.lazy.covers_module()):
            self.lazy.destroy()  # nothing has been trained yet
            self.lazy = self._watching(None)

    def connect(self, program: CompiledModel) -> None:
        """Record the program that has the device's copy."""
        self._program, self._structure = program, self._host.structure()
        self._trainings.track()
        if not self._training and (written := program.io.written):
            self.lazy = self._watching(written)

    def disconnect(self) -> None:
        """Release the program and the module. Values not yet copied back are lost."""
        self._program = None
        self.lazy.destroy()
        self.lazy = self._watching(())

    def release(self, disconnect: Callable[[], None] | None) -> None:
        """Copy unread device values back when a wrapper is garbage-collected.

        Args:
            disconnect: disconnects the optimiser; `None` without training.
        """
        with without_modes():  # a capture may be going on
            self.lazy.to_host_if_stale()
            self.lazy.destroy()
            if disconnect is not None:
                disconnect()

    def _fetch(self) -> Mapping[str, np.ndarray]:
        """Values of tensors that the device may have changed: all in training, otherwise those it overwrites."""
        assert self._program is not None
        return self._program.weights(None if self._training else self._program.io.written)

    @property
    def structure_changed(self) -> bool:
        """Whether the module's structure differs from that at compilation; see `HostModel.structure`."""
        return self._host.structure() != self._structure

    # Transfers ------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the program to its device with the newest values."""
        assert self._program is not None
        self.has_news()  # copies stale values back
        self._program.attach(self.lazy.read_values())
        self.host_writes.mark_transferred()

    def upload(self) -> None:
        """Copy the module's values to the device, if there is a program."""
        if self._program is not None:
            self._program.write_weights(self.lazy.read_values())
        self.lazy.mark_uploaded()
        self.host_writes.mark_transferred()

    def to_host(self) -> None:
        """Copy the device's values to the module, changed or not."""
        assert self._program is not None
        self.lazy.to_host(self._program.weights)

    # Changes --------------------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether other wrappers of this module have changed it since the previous call; if so, the module is
        current."""
        return self._trainings.have_news(self.lazy)

    def host_has_changed(self) -> bool:
        """Whether host writes to the module differ from the device's values."""
        if self._program is None or not self._program.is_attached or self.lazy.is_stale:
            return False
        if not self.host_writes.changed_tensors() and not self.lazy.data_accessed:
            return False
        host = self.lazy.read_values()
        if any(not np.array_equal(host[name], array) for name, array in self._program.weights().items()):
            return True
        if self.host_writes.changed_tensors():
            self.host_writes.mark_transferred()
        return False
