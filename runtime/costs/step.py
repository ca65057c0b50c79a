"""Schedule of a compiled program's run: sequential kernels, and asynchronous operations that overlap with them.

XLA has ordered the instructions. The chip runs kernels in this order. Operations with a `-start` overlap with them
until their `-done`, where the chip waits: collectives over the links, copies to and from host memory. Other collectives
block the kernels for their whole duration. Each iteration of a loop takes as long as the first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from runtime.costs.hlo import Computation, Instruction, Module
from runtime.costs.kernels import Limit, kernel_time
from runtime.costs.network import Wires
from runtime.costs.precision import LEVELS, capped
from runtime.costs.step_timeline import LONGEST_TIMELINE, LineTraffic, StepSpan, StepTimeline
from runtime.costs.work import COLLECTIVES, Collective, collectives_of, is_kernel, work_of
from runtime.lowering.scopes import graph_of, graphs_in


def timeline_of(module: Module, wires: Wires, level: str = LEVELS[0]) -> StepTimeline:
    """Schedule one run of an executable, with the precision of its float32 products capped at `level`."""
    walk = _StepWalk(wires, level)
    walk.computation(module.entry, 1)
    return walk.result()


@dataclass
class _LineTotals:
    """Collectives of one kind and source line, with fields of `LineTraffic`."""

    over: str
    algorithm: str
    count: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass
class _Pending:
    """Asynchronous operation, with its end, its bound and the scope of its instruction."""

    end: float
    limit: Limit
    scope: str
    lines: list[tuple[str, str]] = field(default_factory=list)


class _StepWalk:
    """State of a chip during a walk through a program.

    Attributes:
        now: seconds since the start of the run.
        lane_ends: time at which the last asynchronous operation of each lane ends.
        pending: operations that have begun, by the instructions that a `-done` names.
        never_awaited: operations that no instruction waits for.
        graphs, inclusive, spans: as in `StepTimeline`.
        lines: totals of collectives, by source line and kind.
        times: number of executions of the present computation in a run.
    """

    def __init__(self, wires: Wires, level: str) -> None:
        self.chip, self.wires, self.level = wires.chip, wires, level
        self.now = 0.0
        self.lane_ends: defaultdict[str, float] = defaultdict(float)
        self.pending: dict[Instruction, _Pending] = {}
        self.never_awaited: list[_Pending] = []
        self.graphs: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.inclusive: defaultdict[str, float] = defaultdict(float)
        self.lines: dict[tuple[str, str], _LineTotals] = {}
        self.spans: list[StepSpan] = []
        self.times = 1

    def computation(self, computation: Computation, times: int) -> None:
        """Schedule a computation that runs `times` times in all."""
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
            self.pending[instruction] = self._begin_computation(instruction)
        elif is_kernel(instruction):
            self._kernel(instruction)

    def _kernel(self, instruction: Instruction) -> None:
        work, scope = capped(self.level, work_of(instruction)), instruction.scope
        graph = graph_of(scope)
        collectives = collectives_of(instruction, graph)
        is_start = instruction.opcode.endswith("-start")
        if instruction.kind in COLLECTIVES:
            for each in collectives:
                pending = self._begin_collective(each, scope)
                if is_start:
                    self.pending[instruction] = pending
                else:
                    self._wait(pending)
            return
        if is_start:  # a copy from memory to memory
            limit: Limit = "host" if work.host_bytes else "memory"
            seconds = kernel_time(self.chip, replace(work, kernels=0)).seconds
            self.pending[instruction] = self._begin(
                "host" if work.host_bytes else "copies", graph, limit, seconds, scope
            )
            return
        for each in collectives:  # a TPU overlaps it with the products of its fusion and of later ones
            self.never_awaited.append(self._begin_collective(each, scope))
        time = kernel_time(self.chip, work)
        self._span("kernels", graph or "main graph", self.now, self.now + time.seconds)
        self.now += time.seconds
        self._add_seconds(scope, time.limit, time.seconds)

    def _begin_computation(self, instruction: Instruction) -> _Pending:
        """Begin an asynchronous computation."""
        graph, seconds, lines = graph_of(instruction.scope), 0.0, list[tuple[str, str]]()
        for computation in instruction.called:
            for each in filter(is_kernel, computation.instructions.values()):
                for collective in collectives_of(each, graph):
                    seconds += self.wires.time(collective).seconds
                    lines.append(self._count_collective(collective))
                if each.kind not in COLLECTIVES:
                    seconds += kernel_time(self.chip, capped(self.level, work_of(each))).seconds
        limit: Limit = "network" if lines else "memory"
        pending = self._begin("network" if lines else "copies", graph, limit, seconds, instruction.scope)
        return replace(pending, lines=lines)

    def _count_collective(self, collective: Collective) -> tuple[str, str]:
        """Add a collective to the totals of its line. Returns their key."""
        key, time = (collective.source, collective.kind), self.wires.time(collective)
        line = self.lines.setdefault(key, _LineTotals(", ".join(time.over), time.algorithm))
        line.count += self.times
        line.seconds += self.times * time.seconds
        return key

    def _begin_collective(self, collective: Collective, scope: str) -> _Pending:
        """Begin a collective."""
        key, seconds = self._count_collective(collective), self.wires.time(collective).seconds
        name = f"{collective.kind} {collective.source}".strip()
        return replace(self._begin("network", name, "network", seconds, scope), lines=[key])

    def _begin(self, lane: str, name: str, limit: Limit, seconds: float, scope: str) -> _Pending:
        """Begin an asynchronous operation, after earlier ones of its lane."""
        begin = max(self.now, self.lane_ends[lane])
        self.lane_ends[lane] = begin + seconds
        self._span(lane, name or "main graph", begin, begin + seconds)
        return _Pending(begin + seconds, limit, scope)

    def _wait(self, pending: _Pending) -> None:
        """Wait for the end of an operation. Collectives of an operation share the time equally."""
        waited = max(0.0, pending.end - self.now)
        self.now = max(self.now, pending.end)
        self._add_seconds(pending.scope, pending.limit, waited)
        for key in pending.lines:
            self.lines[key].exposed += self.times * waited / len(pending.lines)

    def _add_seconds(self, scope: str, limit: Limit, seconds: float) -> None:
        """Add an instruction's seconds to its graph and to the callers."""
        self.graphs[graph_of(scope)][limit] += self.times * seconds
        for name in dict.fromkeys(graphs_in(scope)):
            self.inclusive[name] += self.times * seconds

    def _span(self, lane: str, name: str, start: float, end: float) -> None:
        """Append a span, merged with the previous one if both are alike."""
        before = self.spans[-1] if self.spans else None
        if before is not None and (before.lane, before.name) == (lane, name) and start - before.end <= 1e-9:
            self.spans[-1] = before.model_copy(update={"end": end})
        elif end > start and len(self.spans) < LONGEST_TIMELINE:
            self.spans.append(StepSpan(lane=lane, name=name, start=start, end=end))

    def finish(self) -> None:
        """Wait for operations that no instruction waits for."""
        for pending in self.never_awaited:
            self._wait(pending)
        self.never_awaited.clear()

    def result(self) -> StepTimeline:
        """The timeline, after the walk."""
        limits: defaultdict[str, float] = defaultdict(float)
        for own in self.graphs.values():
            for limit, seconds in own.items():
                limits[limit] += seconds
        traffic = (LineTraffic(line=line, kind=kind, **vars(each)) for (line, kind), each in self.lines.items())
        return StepTimeline(
            seconds=self.now,
            limits=dict(limits),
            graphs={name: {**own} for name, own in self.graphs.items()},
            inclusive=dict(self.inclusive),
            traffic=tuple(sorted(traffic, key=lambda each: -each.exposed)),
            spans=tuple(self.spans),
        )
