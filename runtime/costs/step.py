"""Schedule of a run of a compiled program: kernels one after the other, and asynchronous operations beside them.

XLA has ordered the instructions. The chip runs kernels in this order. Operations with a `-start` overlap with them
until their `-done`, where the chip waits: collectives over the links, copies to and from host memory. Other collectives
block the kernels for their whole duration. Each iteration of a loop takes as long as the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from popxl.base.pages import OnPage, Page, Picture, Table, seconds_text
from popxl.base.pictures import bars
from popxl.base.records import Record
from runtime.costs.hlo import Computation, Instruction, Module
from runtime.costs.kernels import Limit, kernel_time
from runtime.costs.network import CollectiveTime, Place, collective_time, spans_of
from runtime.costs.work import COLLECTIVES, Collective, Work, collectives_of, is_kernel, work_of
from runtime.lowering.scopes import graph_of, graphs_in
from runtime.targets.chip import Chip, Tpu

LONGEST_TIMELINE = 400


class StepSpan(Record):
    """Activity of a chip in a part of a run.

    Attributes:
        lane: "kernels", or asynchronous operations: "network", "host", "copies".
        name: name of the graph; in the lane "network", the collective and its line.
        start, end: seconds since the start of the run. For a loop, those of the first iteration.
    """

    lane: str
    name: str
    start: float
    end: float


class LineTraffic(Record):
    """Collectives of one source line.

    Attributes:
        line: the line, `train.py:12`; "" where XLA does not say.
        kind: kind of XLA collective: "all-reduce".
        over: the wires, the fastest first: "NVLink, InfiniBand NDR".
        algorithm: algorithm: "ring".
        count: number of executions in a run.
        seconds: total time.
        exposed: time that kernels wait for them.
    """

    line: str
    kind: str
    over: str
    algorithm: str
    count: int
    seconds: float
    exposed: float


class StepTimeline(OnPage, Record):
    """Estimated timeline of a program's run on one chip.

    Attributes:
        seconds: time from start to end.
        limits: share of each bound in this time: "compute", "memory", "launch" of kernels; exposed time of "network"
            and "host"; and "dispatch", the calls of the host.
        graphs: `limits` of each graph, by name; "" for the main graph.
        inclusive: seconds of each graph but the main graph, with those of the graphs that it calls.
        traffic: collectives by lines, those that kernels wait longest for first.
        spans: activities in order; for each loop, those of the first iteration.
    """

    seconds: float
    limits: Mapping[str, float]
    graphs: Mapping[str, Mapping[str, float]]
    inclusive: Mapping[str, float]
    traffic: tuple[LineTraffic, ...]
    spans: tuple[StepSpan, ...]

    @property
    def exposed(self) -> float:
        """Seconds that kernels wait for the network."""
        return self.limits.get("network", 0.0)

    def page(self) -> Page:
        """Page for `print`, notebooks and browsers."""
        total = self.seconds or 1.0
        rows = [[name, seconds_text(each), f"{100 * each / total:.0f} %"] for name, each in self.limits.items() if each]
        parts: list[Any] = [Table(["bound by", "of a run", "share"], rows)]
        traffic = [
            [each.kind, each.line or "unknown", each.over, each.algorithm, str(each.count), seconds_text(each.seconds)]
            + [seconds_text(each.exposed)]
            for each in self.traffic
        ]
        columns = ["collective", "line", "over", "by", "in a run", "takes", "not hidden"]
        parts += [Page("Over the wires", [*Table.first_rows(columns, traffic)])] if traffic else []
        parts += [self.picture()] if self.spans else []
        return Page(f"A run of {seconds_text(self.seconds)}, estimated", parts)

    def picture(self) -> Picture:
        """Timeline with a lane for kernels and one for each kind of asynchronous operation."""
        return bars("A run, estimated", ((s.lane, s.name, s.start, s.end) for s in self.spans))


Pricer = Callable[[Collective], CollectiveTime]


def pricer(chip: Chip, places: Sequence[Place]) -> Pricer:
    """Time of collectives of chips at `places`, in the order of their numbers. The slowest group counts."""
    known: dict[tuple[Any, ...], CollectiveTime] = {}

    def price(collective: Collective) -> CollectiveTime:
        key = collective.kind, collective.bytes, collective.groups
        if key not in known:
            groups = collective.groups or (tuple(range(len(places))),)
            shapes = {spans_of(chip, [places[i % len(places)] for i in group], places) for group in groups}
            times = [collective_time(chip, collective.kind, collective.bytes, spans) for spans in shapes]
            known[key] = max(times, key=lambda each: each.seconds)
        return known[key]

    return price


def places_of(chip: Chip, devices: Sequence[Any]) -> list[Place]:
    """Device positions on the machine's links."""
    if isinstance(chip, Tpu):
        return [(*device.coords[: len(chip.host)], getattr(device, "slice_index", None) or 0) for device in devices]
    joined = chip.levels[0].chips or len(devices)
    seen: defaultdict[int, int] = defaultdict(int)
    found = []
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        found.append((device, (device.process_index * joined + seen[device.process_index],)))
        seen[device.process_index] += 1
    of = {device: place for device, place in found}
    return [of[device] for device in devices]


def timeline_of(
    module: Module, chip: Chip, price: Pricer, cap: Callable[[Work], Work] = lambda work: work
) -> StepTimeline:
    """Schedule one run of an executable.

    Args:
        price: function that returns the time of a collective.
        cap: function that replaces a kernel's work, for example by products with fewer passes.
    """
    walk = _Chip(chip, price, cap)
    walk.computation(module.entry, 1)
    walk.finish()
    return walk.result()


def added(parts: Sequence[tuple[StepTimeline, int]], seconds: float, dispatch: float) -> StepTimeline:
    """Timeline of executables with their numbers of executions, `seconds` long in total.

    The host takes `dispatch` seconds to call each. The spans are those of each executable once, one after the other.
    """
    limits, graphs = defaultdict[str, float](float), defaultdict[str, dict[str, float]](dict)
    inclusive = defaultdict[str, float](float)
    traffic: dict[tuple[str, str, str, str], LineTraffic] = {}
    spans, begin = list[StepSpan](), 0.0
    for part, times in parts:
        for name, own in part.graphs.items():
            for limit, each in own.items():
                limits[limit] += times * each
                graphs[name][limit] = graphs[name].get(limit, 0.0) + times * each
        for name, each in part.inclusive.items():
            inclusive[name] += times * each
        for each_line in part.traffic:
            key = each_line.line, each_line.kind, each_line.over, each_line.algorithm
            before = traffic.get(key)
            traffic[key] = each_line.model_copy(
                update={
                    name: times * getattr(each_line, name) + (getattr(before, name) if before else 0)
                    for name in ("count", "seconds", "exposed")
                }
            )
        spans += (s.model_copy(update={"start": s.start + begin, "end": s.end + begin}) for s in part.spans)
        begin += part.seconds
    if dispatch:
        limits["dispatch"] += dispatch * sum(times for _, times in parts)
    return StepTimeline(
        seconds=seconds,
        limits=dict(limits),
        graphs=dict(graphs),
        inclusive=dict(inclusive),
        traffic=tuple(sorted(traffic.values(), key=lambda each: -each.exposed)),
        spans=tuple(spans[:LONGEST_TIMELINE]),
    )


@dataclass
class _Line:
    time: CollectiveTime
    count: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass
class _Pending:
    """What goes on beside kernels, until `end`, for an instruction with a scope."""

    end: float
    limit: Limit
    scope: str
    lines: list[tuple[str, str]] = field(default_factory=list)


class _Chip:
    """State of a chip during a walk through a program. Takes the arguments of `timeline_of`."""

    def __init__(self, chip: Chip, price: Pricer, cap: Callable[[Work], Work]) -> None:
        self.chip, self.price, self.cap = chip, price, cap
        self.now = 0.0
        self.free: defaultdict[str, float] = defaultdict(float)
        self.pending: dict[Instruction, _Pending] = {}
        self.unwaited: list[_Pending] = []
        self.graphs: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.inclusive: defaultdict[str, float] = defaultdict(float)
        self.lines: dict[tuple[str, str], _Line] = {}
        self.spans: list[StepSpan] = []
        self.times = 1

    def computation(self, computation: Computation, times: int) -> None:
        """Run a computation, which is run `times` times in all."""
        outer, self.times = self.times, times
        for instruction in computation.instructions.values():
            self._run(instruction)
        self.finish()
        self.times = outer

    def _run(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            (body,), iterations, begin = instruction.called, instruction.trip_count, self.now
            self.computation(body, self.times * iterations)
            self.now += (iterations - 1) * (self.now - begin)
        elif opcode in ("call", "conditional"):
            for callee in instruction.called:
                self.computation(callee, self.times)
        elif opcode.endswith(("-done", "-update")):
            start = next(iter(instruction.operands), None)
            waiting = None if start is None else self.pending.pop(start, None)
            if waiting is not None and opcode.endswith("-update"):
                self.pending[instruction] = waiting
            elif waiting is not None:
                self._wait(waiting)
        elif opcode == "async-start":
            self.pending[instruction] = self._beside(instruction)
        elif is_kernel(instruction):
            self._kernel(instruction)

    def _kernel(self, instruction: Instruction) -> None:
        work, scope = self.cap(work_of(instruction)), instruction.scope
        graph = graph_of(scope)
        found = collectives_of(instruction, graph)
        is_start = instruction.opcode.endswith("-start")
        if instruction.kind in COLLECTIVES:
            for each in found:
                going = self._sent(each, scope)
                if is_start:
                    self.pending[instruction] = going
                else:
                    self._wait(going)
            return
        if is_start:  # a copy from memory to memory
            limit: Limit = "host" if work.host_bytes else "memory"
            seconds = kernel_time(self.chip, replace(work, kernels=0)).seconds
            self.pending[instruction] = self._begin(
                "host" if work.host_bytes else "copies", graph, limit, seconds, scope
            )
            return
        for each in found:  # a TPU overlaps it with the products of its fusion and of later ones
            self.unwaited.append(self._sent(each, scope))
        time = kernel_time(self.chip, work)
        self._span("kernels", graph or "main graph", self.now, self.now + time.seconds)
        self.now += time.seconds
        self._spent(scope, time.limit, time.seconds)

    def _beside(self, instruction: Instruction) -> _Pending:
        """Begin a computation that goes on beside kernels."""
        graph, seconds, lines = graph_of(instruction.scope), 0.0, list[tuple[str, str]]()
        for inside in instruction.called:
            for each in filter(is_kernel, inside.instructions.values()):
                for collective in collectives_of(each, graph):
                    seconds += self.price(collective).seconds
                    lines.append(self._noted(collective))
                if each.kind not in COLLECTIVES:
                    seconds += kernel_time(self.chip, self.cap(work_of(each))).seconds
        limit: Limit = "network" if lines else "memory"
        found = self._begin("network" if lines else "copies", graph, limit, seconds, instruction.scope)
        return replace(found, lines=lines)

    def _noted(self, collective: Collective) -> tuple[str, str]:
        key, time = (collective.source, collective.kind), self.price(collective)
        line = self.lines.setdefault(key, _Line(time))
        line.count += self.times
        line.seconds += self.times * time.seconds
        return key

    def _sent(self, collective: Collective, scope: str) -> _Pending:
        """Begin a collective."""
        key, seconds = self._noted(collective), self.price(collective).seconds
        name = f"{collective.kind} {collective.source}".strip()
        return replace(self._begin("network", name, "network", seconds, scope), lines=[key])

    def _begin(self, lane: str, name: str, limit: Limit, seconds: float, scope: str) -> _Pending:
        begin = max(self.now, self.free[lane])
        self.free[lane] = begin + seconds
        self._span(lane, name or "main graph", begin, begin + seconds)
        return _Pending(begin + seconds, limit, scope)

    def _wait(self, going: _Pending) -> None:
        waited = max(0.0, going.end - self.now)
        self.now = max(self.now, going.end)
        self._spent(going.scope, going.limit, waited)
        for key in going.lines:
            self.lines[key].exposed += self.times * waited / len(going.lines)

    def _spent(self, scope: str, limit: Limit, seconds: float) -> None:
        """Add an instruction's seconds to its graph and to the callers."""
        self.graphs[graph_of(scope)][limit] += self.times * seconds
        for name in dict.fromkeys(graphs_in(scope)):
            self.inclusive[name] += self.times * seconds

    def _span(self, lane: str, name: str, start: float, end: float) -> None:
        """Add a span, merged with the previous one if they are alike."""
        before = self.spans[-1] if self.spans else None
        if before is not None and (before.lane, before.name) == (lane, name) and start - before.end <= 1e-9:
            self.spans[-1] = before.model_copy(update={"end": end})
        elif end > start and len(self.spans) < LONGEST_TIMELINE:
            self.spans.append(StepSpan(lane=lane, name=name, start=start, end=end))

    def finish(self) -> None:
        """Wait for what no instruction waits for."""
        for going in self.unwaited:
            self._wait(going)
        self.unwaited.clear()

    def result(self) -> StepTimeline:
        """The timeline, after the walk."""
        limits: defaultdict[str, float] = defaultdict(float)
        for own in self.graphs.values():
            for limit, seconds in own.items():
                limits[limit] += seconds
        traffic = (
            LineTraffic(
                line=line,
                kind=kind,
                over=", ".join(each.time.over),
                algorithm=each.time.algorithm,
                count=each.count,
                seconds=each.seconds,
                exposed=each.exposed,
            )
            for (line, kind), each in self.lines.items()
        )
        return StepTimeline(
            seconds=self.now,
            limits=dict(limits),
            graphs={name: {**own} for name, own in self.graphs.items()},
            inclusive=dict(self.inclusive),
            traffic=tuple(sorted(traffic, key=lambda each: -each.exposed)),
            spans=tuple(self.spans),
        )
