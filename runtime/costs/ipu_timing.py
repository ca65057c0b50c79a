"""Timing of a program's IPUs as separate devices: simulated execution of its plan, with times in place of arrays.

The host queues the segments of a plan without waiting. So a segment starts as soon as its device has finished earlier
ones and its inputs are available, which may first have to be copied: this is how a pipeline fills, waits and drains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from popxl.core.recursion import raised_recursion_limit
from popxl.core.tensor import Tensor
from popxl.values.spec import size_in_bytes
from runtime.lowering.channels import Channel
from runtime.plan.host_steps import HostControlFlow, HostSteps, SubPlan
from runtime.plan.plan import Plan
from runtime.plan.segments import Key, PlanRun, Segment, Step
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
    bytes_of_channels: Mapping[Channel, int],
    replicas: int,
) -> Timing:
    """Simulate one run of a plan, and return its timing.

    Args:
        seconds: function that returns the time of a segment.
        copying: function that returns the time of a copy of the given bytes. Copies from one IPU to another are
            sequential.
        bytes_of_channels: bytes of streams and buffers. Those that segments on several IPUs use are copied too.
        replicas: number of replicas that share a device: each has its own values.
    """
    channels = {c: _Arrival(ipu, 0.0, bytes_of_channels.get(c, 0)) for c, ipu in plan.steps.homes().items()}
    run = _SimulatedRun(seconds, copying, replicas, channels)
    values: dict[Key, _Arrival] = {}
    with raised_recursion_limit(plan.steps.nesting):
        run.simulate(plan.steps, values)
    for v, start, end in plan.changed:
        if start != end:
            run.copy_to_ipu(values[v], start)
    run.timing.seconds = max((*run.free.values(), *run.links.values()), default=0.0)
    return run.timing


class _Arrival(NamedTuple):
    """Arrival of an array: IPU, time of availability, and bytes."""

    ipu: int
    time: float
    bytes: int


@dataclass
class _SimulatedRun(PlanRun):
    """A run with arrivals in place of arrays; subplans and steps bind and copy these as they do arrays.

    Attributes:
        seconds, copying, replicas: as for `timing_of`.
        arrivals: arrival of each stream and buffer at the IPU that has it.
        free: time at which each IPU ends its work so far.
        links: likewise of the links from one IPU to another.
    """

    seconds: Callable[[Structure], float]
    copying: Callable[[int], float]
    replicas: int
    arrivals: dict[Channel, _Arrival]
    free: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    links: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    timing: Timing = field(default_factory=Timing)

    def simulate(self, steps: HostSteps, values: dict[Key, _Arrival]) -> None:
        """Simulate steps; `values` holds the values produced so far. Others are there from the start of the run."""
        for t, ipu in steps.initial_ipus.items():
            values.setdefault(t, self._arrival(t, ipu, 0.0))
        for step in steps.steps:
            self.execute(step, values)

    def execute(self, step: Step, values: dict[Key, _Arrival]) -> None:
        """Simulate a step."""
        step.copy_operands(values, self)
        if isinstance(step, Segment):
            self._simulate_segment(step, values)
        elif isinstance(step, HostControlFlow):
            for subplan in step.subplans:  # for a conditional, both: costs count all branches
                self._simulate_subplan(step, subplan, values)
        for key in step.drops:
            values.pop(key, None)

    def constants_of(self, subplan: SubPlan) -> dict[Key, _Arrival]:
        """Values that a graph does not have from its caller: they are there from the start."""
        own = subplan.plan.initial_ipus.items()
        return {t: self._arrival(t, ipu, 0.0) for t, ipu in own if t not in subplan.keys_by_input}

    def _simulate_segment(self, segment: Segment, values: dict[Key, _Arrival]) -> None:
        begin = max([self.free[segment.ipu], *(values[segment.keys.get(t, t)].time for t in segment.reads)])
        for c in segment.shared_channels:
            if self.arrivals[c].ipu != segment.ipu:
                self.arrivals[c] = self.copy_to_ipu(self.arrivals[c], segment.ipu)
            begin = max(begin, self.arrivals[c].time)
        seconds = self.seconds(segment.structure)
        end = self.free[segment.ipu] = begin + seconds
        self.timing.busy[segment.ipu] += seconds
        self.arrivals.update((c, self.arrivals[c]._replace(time=end)) for c in segment.shared_channels)
        for t in segment.makes:
            values[t] = self._arrival(t, segment.ipu, end)
        segment.copy_results(values, self)

    def _simulate_subplan(self, step: HostControlFlow, subplan: SubPlan, values: dict[Key, _Arrival]) -> None:
        inner: dict[Key, _Arrival] = {}
        ends: list[float] = []
        counts: list[Timing] = []  # before and after the last iteration for which others have begun as usual
        ahead = 0 if step.overlapped is None else len(step.overlapped.actions) - 1
        count = min(step.iterations, LONGEST + ahead)
        for inner in self._iterations(step, subplan, values, count):  # noqa: B007 (the last one is read below)
            ends.append(max(self.free.values(), default=0.0))
            if len(ends) in (LONGEST - 1, LONGEST):
                counts.append(replace(self.timing, busy=dict(self.timing.busy)))
        if step.iterations > count:
            self._extrapolate(step.iterations - count, ends[:LONGEST], counts, (values, inner))
        subplan.finish(inner, values, self)

    def _iterations(
        self, step: HostControlFlow, subplan: SubPlan, values: dict[Key, _Arrival], count: int
    ) -> Iterator[dict[Key, _Arrival]]:
        """Simulate `count` iterations, and yield the values of the graph at the end of each."""
        if step.overlapped is not None:
            yield from step.overlapped.iterate(values, self, count)
            return
        inner: dict[Key, _Arrival] = {t: values[key] for t, key in subplan.keys_by_input.items() if key in values}
        for iteration in range(count):
            if iteration:
                inner = subplan.next(inner, self)
            self.simulate(subplan.plan, inner)
            yield inner

    def _extrapolate(
        self, iterations: int, ends: list[float], counts: list[Timing], arrivals: Iterable[dict[Any, _Arrival]]
    ) -> None:
        """Extrapolate the simulated iterations by `iterations` further ones. `ends` are end times of simulated ones,
        `counts` the timing before and after one of these."""
        half = len(ends) // 2
        passed = iterations * (ends[-1] - ends[half - 1]) / (len(ends) - half)
        self.free.update([(ipu, time + passed) for ipu, time in self.free.items()])
        self.links.update([(link, time + passed) for link, time in self.links.items()])
        for values in arrivals:
            values.update([(key, each._replace(time=each.time + passed)) for key, each in values.items()])
        timing, (before, after) = self.timing, counts
        timing.copies += iterations * (after.copies - before.copies)
        timing.copied_bytes += iterations * (after.copied_bytes - before.copied_bytes)
        for ipu, seconds in after.busy.items():
            timing.busy[ipu] += iterations * (seconds - before.busy.get(ipu, 0.0))

    def duplicate(self, array: _Arrival) -> _Arrival:
        """Copy a value on its IPU, which takes no time of its own."""
        return array

    def _arrival(self, t: Tensor, ipu: int, time: float) -> _Arrival:
        return _Arrival(ipu, time, self.replicas * size_in_bytes(t))

    def copy_to_ipu(self, array: _Arrival, ipu: int) -> _Arrival:
        """Copy a value to another IPU, as soon as it is available and the link is free."""
        link = array.ipu, ipu
        end = self.links[link] = max(array.time, self.links[link]) + self.copying(array.bytes)
        self.timing.copies += 1
        self.timing.copied_bytes += array.bytes
        return _Arrival(ipu, end, array.bytes)
