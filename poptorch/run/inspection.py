"""`ProgramInspection`: what a wrapper's users can read of a compiled model and of its last call.

Names and values of tensors within the model, an estimate of cycles, and times of transfers.
"""

from __future__ import annotations

import torch

from poptorch.errors import createPoptorchError
from poptorch.run.lifecycle import ModelLifecycle
from poptorch.run.timings import Latency, Times
from popxl.extend.graphs import estimate_of


class ProgramInspection(ModelLifecycle):
    """Model lifecycle with tensors, cycles and latencies of its program. Base class of `PoplarExecutor`."""

    def getTensorNames(self) -> list[str]:
        """Tensor names valid for `options.anchorTensor`. Requires a compiled model.

        They are parameters and buffers; inputs, `"input..."`; `"loss"`; the tensors of the model's graph, as it prints
        them; and in training `"Gradient___<parameter>"` (of a micro-batch and a replica, as it is computed),
        `"UpdatedVar___<parameter>"`, the numbers of the optimiser and its state.
        """
        assert self._compiled is not None, "getTensorNames: the model has not been compiled."
        return [*self._compiled.io.names, *(self._trainer.names() if self._trainer is not None else ())]

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """An anchored tensor's values from the last call.

        Args:
            short_name: the name that `options.anchorTensor` gave it.

        Returns:
            Its values, for the micro-batches selected by the output mode of the anchor, joined like results.
            Hyperparameters and optimiser state have their current values.
        """
        anchors = self._options.anchored_tensors
        assert short_name in anchors, (
            f"getAnchoredTensor: {short_name!r} is not anchored; anchored are {', '.join(anchors) or 'none'}."
        )
        compiled = self._required
        name = anchors[short_name].long_name
        if self._trainer is not None and name in self._trainer.names():
            return self._trainer.value(name)
        if short_name not in compiled.anchored:
            raise createPoptorchError("getAnchoredTensor: the model has not been run yet.")
        return compiled.anchored[short_name]

    def cycleCount(self) -> int:
        """Lower bound on IPU cycles per run, estimated by `popxl.analysis.estimate`. Nothing is measured.

        Raises:
            poptorch.Error: if the model is not compiled, or `options.logCycleCount(True)` was not set.
        """
        if not self._options.log_cycle_count:
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        return estimate_of(self._required.session.ir).cycles

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Timestamps of the last call, in seconds since an arbitrary origin.

        Inputs of all steps go to the device at once, and results come back at once, so steps have the same times.

        Returns:
            Under `"input"` (the first input was requested), `"input_complete"`, `"output"` and `"output_complete"` for
            each input or result a list of times, one for each micro-batch.
        """
        return self._times.counters()

    def getHostIpuLatency(self) -> Latency:
        """Host-to-device transfer latency of the last call: minimum, maximum and average step time."""
        return Times.between(self._times.asked, self._times.given)

    def getComputeLatency(self) -> Latency:
        """Compute latency of the last call, from inputs arriving on the device to results being ready."""
        return Times.between(self._times.given, self._times.ready)

    def getIpuHostLatency(self) -> Latency:
        """Device-to-host transfer latency of the last call's results."""
        return Times.between(self._times.ready, self._times.taken)

    def getLatency(self) -> Latency:
        """Total latency of the last call, from requesting inputs to receiving results."""
        return Times.between(self._times.asked, self._times.taken)

    @property
    def _times(self) -> Times:
        return Times() if self._compiled is None else self._compiled.times
