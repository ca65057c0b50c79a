"""Timing of a program's IPUs as separate devices: simulated execution of its plan, with times in place of arrays.

The host queues the segments of a plan without waiting. So a segment starts as soon as its device has finished earlier
ones and its inputs are available, which may first have to be copied: this is how a pipeline fills, waits and drains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from popxl.core.recursion import raised_recursion_limit
from popxl.core.tensor import Tensor
from popxl.values.spec import size_in_bytes
from runtime.lowering.channels import Channel
from runtime.plan.host_steps import HostControlFlow, HostSteps, SubPlan
from runtime.plan.plan import Plan
from runtime.plan.segments import Key, Segment
from runtime.plan.structure import Structure

LONGEST = 64
"""Most simulated iterations of a loop. Further ones take as long as these, on average of their second half."""


@dataclass
class Timing:
    """Timing of one run.

    Attributes:
        seconds: time from the start of the first segment to the end of the last.
        busy: computing time of each IPU.
        copies, copied_bytes: copies between IPUs, and their bytes.
    """

    seconds: float = 0.0
    busy: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    copies: int = 0
    copied_bytes: int = 0


def timing_of(
    plan: Plan,
    seconds: Callable[[Structure], float],
    copying: Callable[[int], float],
    channels: Mapping[Channel, int],
    replicas: int,
) -> Timing:
    """Simulate one run of a plan, and return its timing.

    Args:
        seconds: function that returns the time of a segment.
        copying: function that returns the time of a copy of the given bytes. Copies from one IPU to another are
            sequential.
        channels: bytes of streams and buffers. Those that segments on several IPUs use are copied too.
        replicas: number of replicas that share a device: each has its own values.
    """
    clock = _Clock(seconds, copying, channels, replicas)
    clock.channels = {c: (ipu, 0.0) for c, ipu in plan.steps.homes().items()}
    values: dict[Key, _Arrival] = {}
    with raised_recursion_limit(plan.steps.nesting):
        clock.simulate(plan.steps, values)
    for v, start, end in plan.changed:
        if start != end:
            clock.copy(v, values.get(v, (end, 0.0)), start)
    clock.timing.seconds = max((*clock.free.values(), *clock.links.values()), default=0.0)
    return clock.timing


_Arrival = tuple[int, float]
"""IPU that holds a value, and the time of its arrival."""


@dataclass
class _Clock:
    """Simulation of devices and links.

    Attributes:
        seconds, copying, channel_bytes, replicas: as for `timing_of`.
        channels: arrival of each stream and buffer at the IPU that has it.
        free: time at which each IPU ends its work so far.
        links: likewise of the links from one IPU to another.
    """

    seconds: Callable[[Structure], float]
    copying: Callable[[int], float]
    channel_bytes: Mapping[Channel, int]
    replicas: int
    channels: dict[Channel, _Arrival] = field(default_factory=dict)
    free: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    links: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    timing: Timing = field(default_factory=Timing)

    def simulate(self, steps: HostSteps, values: dict[Key, _Arrival]) -> None:
        """Simulate steps; `values` holds the values produced so far."""
        for step in steps.steps:
            for t, ipu in step.copies:
                values[t, ipu] = self.copy(t, values.get(t, (steps.initial_ipus.get(t, step.ipu), 0.0)), ipu)
            if isinstance(step, Segment):
                self._simulate_segment(step, values)
            else:
                self._control_flow(step, values)
            for key in step.drops:
                values.pop(key, None)

    def _simulate_segment(self, segment: Segment, values: dict[Key, _Arrival]) -> None:
        keys = (segment.keys.get(t, t) for t in (*segment.donated, *segment.borrowed))
        begin = max(self.free[segment.ipu], *(values[key][1] for key in keys if key in values), 0.0)
        for c in segment.shared:
            if self.channels[c][0] != segment.ipu:
                arrival = self._arrival_time(self.channel_bytes.get(c, 0), self.channels[c], segment.ipu)
                self.channels[c] = segment.ipu, arrival
            begin = max(begin, self.channels[c][1])
        seconds = self.seconds(segment.structure)
        end = self.free[segment.ipu] = begin + seconds
        self.timing.busy[segment.ipu] += seconds
        self.channels.update((c, (segment.ipu, end)) for c in segment.shared)
        for t in (*segment.donated, *segment.fresh_results):
            values[t] = segment.ipu, end
        for t, ipu in segment.result_ipus.items():
            if ipu != segment.ipu:
                values[t] = self.copy(t, values[t], ipu)

    def _control_flow(self, step: HostControlFlow, values: dict[Key, _Arrival]) -> None:
        for subplan in step.subplans:  # for a conditional, both: costs count all branches
            self._simulate_subplan(step, subplan, values)

    def _simulate_subplan(self, step: HostControlFlow, subplan: SubPlan, values: dict[Key, _Arrival]) -> None:
        inner: dict[Key, _Arrival] = {
            t: values[key] for (_, t), key in zip(subplan.arguments, subplan.keys, strict=True) if key in values
        }
        ends: list[float] = []
        for iteration in range(min(step.iterations, LONGEST)):
            if iteration:
                inner = self._next_values(subplan, inner)
            self.simulate(subplan.plan, inner)
            ends.append(max(self.free.values(), default=0.0))
            if iteration == LONGEST - 2:
                before = replace(self.timing, busy=dict(self.timing.busy))
        for t, result in subplan.results:
            if result in inner:
                values[t] = inner[result]
        if step.iterations > LONGEST:
            self._extrapolate(step.iterations - LONGEST, ends, before, values)
        for t, ipu in subplan.final_copies:
            values[t] = self.copy(t, values.get(t, (step.ipu, 0.0)), ipu)

    def _next_values(self, subplan: SubPlan, inner: dict[Key, _Arrival]) -> dict[Key, _Arrival]:
        after: dict[Key, _Arrival] = {t: inner[result] for t, result in subplan.carried.items() if result in inner}
        for t, ipu in subplan.carried_copies:
            after[t] = self.copy(t, after.get(t, (subplan.plan.final_ipus.get(subplan.carried[t], ipu), 0.0)), ipu)
        return after

    def _extrapolate(self, iterations: int, ends: list[float], before: Timing, values: dict[Key, _Arrival]) -> None:
        """Extrapolate by `iterations` from the simulated iterations, which end at the times `ends`; `before` is the
        timing up to the last of these."""
        half = len(ends) // 2
        passed = iterations * (ends[-1] - ends[half - 1]) / (len(ends) - half)
        self.free.update([(ipu, time + passed) for ipu, time in self.free.items()])
        self.links.update([(link, time + passed) for link, time in self.links.items()])
        values.update([(key, (ipu, time + passed)) for key, (ipu, time) in values.items()])
        timing = self.timing
        timing.copies += iterations * (timing.copies - before.copies)
        timing.copied_bytes += iterations * (timing.copied_bytes - before.copied_bytes)
        for ipu, seconds in timing.busy.items():
            timing.busy[ipu] += iterations * (seconds - before.busy.get(ipu, 0.0))

    def copy(self, t: Tensor, source_arrival: _Arrival, ipu: int) -> _Arrival:
        return ipu, self._arrival_time(self.replicas * size_in_bytes(t), source_arrival, ipu)

    def _arrival_time(self, bytes: int, source_arrival: _Arrival, ipu: int) -> float:
        """Arrival time of a copy of `bytes` bytes at `ipu`."""
        source, ready = source_arrival
        begin = max(ready, self.links[source, ipu])
        end = self.links[source, ipu] = begin + self.copying(bytes)
        self.timing.copies += 1
        self.timing.copied_bytes += bytes
        return end
