"""State of an optimiser on a device, as `poptorch.optim` shows it to programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

DeviceValues = Mapping[str, torch.Tensor] | None

STATE_KEYS = ("ipu_state", "ipu_param")


class DeviceState:
    """Optimiser state on a device: last read, or pending upload.

    The executor that runs the program connects it, says when a run has changed the device's values, and before a run
    writes what is pending.

    Attributes:
        content: state and hyperparameters by name; `None` for both before compilation.
        pending: the content is newer than the device.
    """

    def __init__(self) -> None:
        self.content: dict[str, DeviceValues] = dict.fromkeys(STATE_KEYS)
        self.pending = False
        self._stale = False
        self._fetch: Callable[[], Mapping[str, DeviceValues]] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether an upload is pending."""
        return any(self.content.values())

    def connect(self, fetch: Callable[[], Mapping[str, DeviceValues]]) -> None:
        """Set the function that reads device values: `{"ipu_state": ..., "ipu_param": ...}`.

        The optimiser keeps the function; it should not keep the device alive.
        """
        self._fetch, self._stale = fetch, True

    def disconnect(self) -> None:
        """Read device values a last time, then release the device."""
        self.refresh()
        self._fetch = None

    def mark_stale(self) -> None:
        """Record a change of device values."""
        self._stale = True

    def set(self, content: Mapping[str, DeviceValues], pending: bool) -> None:
        """Replace the content, by device values or by values `pending` for a device."""
        self.content = {key: content[key] for key in STATE_KEYS}
        self.pending, self._stale = pending, False

    def mark_written(self) -> None:
        """Record the upload of the pending content."""
        self.pending, self._stale = False, True

    def refresh(self) -> None:
        """Read device values, if newer."""
        if self._fetch is not None and self._stale and not self.pending:
            self.set(self._fetch(), pending=False)

    def copied(self) -> DeviceState:
        """Copy for a copied optimiser, with the content pending for its future device."""
        copied = DeviceState()
        copied.set(self.content, pending=self.has_pending)
        return copied
