"""Results of a program, and the positions where each micro-batch stores its own."""

from __future__ import annotations

from dataclasses import dataclass

import popxl
from poptorch.capture.trace import Value
from poptorch.enums import OutputMode
from poptorch.program.model_graph import UPDATED


@dataclass(frozen=True)
class Returned:
    """A program result.

    Attributes:
        value: the value of each micro-batch, or the name of a tensor, one of `Program.names`.
        mode, period: the micro-batches that return it; for updated parameters, the device iterations.
        anchor: name given by the user to an anchored tensor; empty for results of the model.
    """

    value: Value | str
    mode: OutputMode
    period: int = 1
    anchor: str = ""

    @property
    def key(self) -> int | str:
        """Name of the tensor, or identity of the value."""
        return self.value if isinstance(self.value, str) else id(self.value)

    @property
    def is_single(self) -> bool:
        """Whether each replica returns one result for all micro-batches."""
        return self.mode in (OutputMode.Final, OutputMode.Sum)

    @property
    def updated(self) -> str | None:
        """Name of the parameter whose updated value is returned; `None` for other results."""
        is_updated = isinstance(self.value, str) and self.value.startswith(UPDATED)
        return str(self.value).removeprefix(UPDATED) if is_updated else None


result_slot = popxl.OpKind(
    "ResultSlot",
    lambda iteration, *, micro_batches, period: (
        iteration // (micro_batches * period) * micro_batches + iteration % micro_batches
    ),
    gradient=None,
    key="poptorch.ResultSlot",
)
"""Index of a micro-batch's result: every `period`-th device iteration returns its own."""


iteration_slot = popxl.OpKind(
    "IterationSlot",
    lambda iteration, *, micro_batches, period: (iteration // micro_batches - 1) // period,
    gradient=None,
    key="poptorch.IterationSlot",
)
"""Index of a device iteration's result at its end, likewise."""
