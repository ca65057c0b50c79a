"""Timing of a program's IPUs as separate devices: simulated execution of its plan, with times in place of arrays.

The host queues the segments of a plan without waiting. So a segment starts as soon as its device has finished earlier
ones and its inputs are available, which may first have to be copied: this is how a pipeline fills, waits and drains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from popxl.core.recursion import FRAMES, raised_recursion_limit
from popxl.core.tensor import Tensor
from runtime.lowering.channels import Channel
from runtime.plan.plan import Plan
from runtime.plan.planning import PlanBuilder
from runtime.plan.segments import HostControlFlow, Key, Segment, SubPlan
from runtime.plan.structure import Structure

LONGEST = 64
"""Turns of a loop that are gone through. Those beyond take as long as those before, on average of the second half."""


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
        plan: the plan.
        seconds: function that returns the time of a segment.
        copying: function that returns the time of a copy of the given bytes. Copies from one IPU to another are
            sequential.
        channels: bytes of streams and buffers. Those that segments on several IPUs use are copied too.
        replicas: number of replicas that share a device: each has its own values.
    """
    clock = _Clock(plan, seconds, copying, channels, replicas)
    values: dict[Key, _There] = {}
    with raised_recursion_limit(FRAMES * plan.steps.nesting):
        clock.steps(plan.steps, values)
    for v, start, end in plan.changed:
        if start != end:
            clock.copied(v, values.get(v, (end, 0.0)), start)
    clock.found.seconds = max((*clock.free.values(), *clock.links.values()), default=0.0)
    return clock.found


_There = tuple[int, float]
"""IPU that holds a value, and the time of its arrival."""


class _Clock:
    """Simulation state of devices and links. Takes the arguments of `timing_of`."""

    def __init__(
        self,
        plan: Plan,
        seconds: Callable[[Structure], float],
        copying: Callable[[int], float],
        channels: Mapping[Channel, int],
        replicas: int,
    ) -> None:
        self._seconds, self._copying, self._replicas = seconds, copying, replicas
        self._bytes = channels
        self._channels: dict[Channel, _There] = {c: (place, 0.0) for c, place in plan.steps.homes().items()}
        self.free: dict[int, float] = defaultdict(float)
        self.links: dict[tuple[int, int], float] = defaultdict(float)
        self.found = Timing()

    def steps(self, steps: PlanBuilder, values: dict[Key, _There]) -> None:
        """Simulate steps; `values` holds the values produced so far."""
        for step in steps.steps:
            for t, place in step.fetches:
                values[t, place] = self.copied(t, values.get(t, (steps.starts.get(t, step.place), 0.0)), place)
            if isinstance(step, Segment):
                self._run_segment(step, values)
            else:
                self._entry(step, values)
            for key in step.drops:
                values.pop(key, None)

    def _run_segment(self, piece: Segment, values: dict[Key, _There]) -> None:
        keys = (piece.keys.get(t, t) for t in (*piece.donated, *piece.kept))
        begin = max(self.free[piece.place], *(values[key][1] for key in keys if key in values), 0.0)
        for c in piece.shared:
            if self._channels[c][0] != piece.place:
                self._channels[c] = (
                    piece.place,
                    self._arrival_time(self._bytes.get(c, 0), self._channels[c], piece.place),
                )
            begin = max(begin, self._channels[c][1])
        seconds = self._seconds(piece.structure)
        end = self.free[piece.place] = begin + seconds
        self.found.busy[piece.place] += seconds
        self._channels.update((c, (piece.place, end)) for c in piece.shared)
        for t in (*piece.donated, *piece.new):
            values[t] = piece.place, end
        for t, place in piece.ends.items():
            if place != piece.place:
                values[t] = self.copied(t, values[t], place)

    def _entry(self, entry: HostControlFlow, values: dict[Key, _There]) -> None:
        for way in entry.ways:  # of a conditional both, as costs count all branches
            self._run_subplan(entry, way, values)

    def _run_subplan(self, entry: HostControlFlow, way: SubPlan, values: dict[Key, _There]) -> None:
        inner: dict[Key, _There] = {
            t: values[key] for (_, t), key in zip(way.given, way.keys, strict=True) if key in values
        }
        ends: list[float] = []
        for turn in range(min(entry.turns, LONGEST)):
            if turn:
                inner = self._next(way, inner)
            self.steps(way.inside, inner)
            ends.append(max(self.free.values(), default=0.0))
            if turn == LONGEST - 2:
                before = replace(self.found, busy=dict(self.found.busy))
        for t, result in way.returned:
            if result in inner:
                values[t] = inner[result]
        if entry.turns > LONGEST:
            self._go_on(entry.turns - LONGEST, ends, before, values)
        for t, place in way.sent:
            values[t] = self.copied(t, values.get(t, (entry.place, 0.0)), place)

    def _next(self, way: SubPlan, inner: dict[Key, _There]) -> dict[Key, _There]:
        after: dict[Key, _There] = {t: inner[result] for t, result in way.again.items() if result in inner}
        for t, place in way.returns:
            after[t] = self.copied(t, after.get(t, (way.inside.at.get(way.again[t], place), 0.0)), place)
        return after

    def _go_on(self, turns: int, ends: list[float], before: Timing, values: dict[Key, _There]) -> None:
        """Extrapolate `turns` more iterations from the simulated ones, which end at `ends`; `before` is the timing up
        to the last simulated iteration."""
        half = len(ends) // 2
        passed = turns * (ends[-1] - ends[half - 1]) / (len(ends) - half)
        self.free.update([(place, time + passed) for place, time in self.free.items()])
        self.links.update([(link, time + passed) for link, time in self.links.items()])
        values.update([(key, (place, time + passed)) for key, (place, time) in values.items()])
        found = self.found
        found.copies += turns * (found.copies - before.copies)
        found.copied_bytes += turns * (found.copied_bytes - before.copied_bytes)
        for place, seconds in found.busy.items():
            found.busy[place] += turns * (seconds - before.busy.get(place, 0.0))

    def copied(self, t: Tensor, there: _There, place: int) -> _There:
        return place, self._arrival_time(self._replicas * t.nelms * t.dtype.itemsize, there, place)

    def _arrival_time(self, bytes: int, there: _There, place: int) -> float:
        """Arrival time of a copy of `bytes` bytes at `place`."""
        source, ready = there
        begin = max(ready, self.links[source, place])
        end = self.links[source, place] = begin + self._copying(bytes)
        self.found.copies += 1
        self.found.copied_bytes += bytes
        return end
