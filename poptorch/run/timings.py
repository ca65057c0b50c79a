"""Timestamps of input and output transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

Latency = tuple[float, float, float]


@dataclass
class Times:
    """Timestamps of the last call, in seconds since an arbitrary origin.

    All inputs of a call go to the device together, and all results come back together; so the steps of a call have the
    same times.

    Attributes:
        inputs: number of micro-batches of each input.
        outputs: number of micro-batches of each result.
        requested, supplied: times when the inputs were requested, and when the device had them.
        ready, received: times when the results were available, and when the host had them.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    requested: float = 0.0
    supplied: float = 0.0
    ready: float = 0.0
    received: float = 0.0

    def counters(self) -> dict[str, list[list[float]]]:
        """See `PoplarExecutor.getPerfCounters`."""
        if not self.received:
            return {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}
        return {
            "input": [[self.requested] * n for n in self.inputs],
            "input_complete": [[self.supplied] * n for n in self.inputs],
            "output": [[self.ready] * n for n in self.outputs],
            "output_complete": [[self.received] * n for n in self.outputs],
        }

    @staticmethod
    def between(start: float, end: float) -> Latency:
        """Minimum, maximum and average step time."""
        return (end - start,) * 3
