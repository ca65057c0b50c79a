"""State of an optimiser on a device, as `poptorch.optim` shows it to programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

State = Mapping[str, torch.Tensor]
DeviceValues = State | None

STATE_KEYS = ("ipu_state", "ipu_param")


class DeviceState:
    """Host copy of an optimiser's state on a device.

    The device's values are newer after a run, the host's after `load_state_dict`. The owner of the program connects it,
    marks the copy stale after each run, and uploads a pending copy before the next one.

    Attributes:
        content: the copy: state and hyperparameters by name; `None` for both before compilation.
    """

    def __init__(self) -> None:
        self.content: dict[str, DeviceValues] = dict.fromkeys(STATE_KEYS)
        self._newer: Literal["host", "device"] | None = None
        self._fetch: Callable[[], Mapping[str, DeviceValues]] | None = None

    @property
    def state(self) -> State:
        """State tensors of the copy, by name."""
        return self.content["ipu_state"] or {}

    @property
    def has_content(self) -> bool:
        """Whether the copy contains values."""
        return any(self.content.values())

    @property
    def pending(self) -> bool:
        """Whether the copy is newer than the device."""
        return self._newer == "host"

    def connect(self, fetch: Callable[[], Mapping[str, DeviceValues]]) -> None:
        """Set the function that reads device values: `{"ipu_state": ..., "ipu_param": ...}`.

        The optimiser keeps the function; it should not keep the device alive.
        """
        self._fetch = fetch
        self.mark_stale()

    def disconnect(self) -> None:
        """Read device values a last time, then release the device."""
        self.refresh()
        self._fetch = None

    def mark_stale(self) -> None:
        """Record a change of device values."""
        if not self.pending:
            self._newer = "device"

    def set(self, content: Mapping[str, DeviceValues], pending: bool) -> None:
        """Replace the copy, by device values or by values `pending` for a device."""
        self.content = {key: content[key] for key in STATE_KEYS}
        self._newer = "host" if pending else None

    def load(self, state: State) -> None:
        """Replace the state tensors, for upload to a device."""
        self.set({**self.content, "ipu_state": state}, pending=True)

    def mark_written(self) -> None:
        """Record the upload of the pending copy."""
        self._newer = "device"

    def refresh(self) -> None:
        """Read device values, if newer."""
        if self._fetch is not None and self._newer == "device":
            self.set(self._fetch(), pending=False)

    def copied(self) -> DeviceState:
        """Copy for a copied optimiser, with the content pending for its future device."""
        copied = DeviceState()
        copied.set(self.content, pending=self.has_content)
        return copied
