"""Treatments of activations within a budget: one integer program, solved by HiGHS.

For each activation it decides whether calls keep it, copy it to the host, or recompute it; recomputation needs the
operands of its op, each by one of the three. The calls of a graph are one group or two, in the order of the step:
backward calls run in the reverse order, so the first calls recompute where the groups differ, when little else is live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import Any, Literal

from popxl.base.group_by import group_by
from runtime.memory_plans.needs import GraphNeeds, evenly_spaced, host_bandwidth, memory_bandwidth
from runtime.targets.chip import Chip

Treatment = Literal["keep", "recompute", "offload"]

Release = Literal["read", "call", "loop"]
"""Time when an activation's memory is free again: after its last reader, its call, or its loop of calls; compilation
decides which."""

_REST = 1.0
"""Weight of a saved byte relative to a byte of the peak, in the objective of least memory."""

_SPLITS = 8
"""Most divisions of a graph's calls into two groups that are tried; each takes one integer program."""


@dataclass(frozen=True)
class Group:
    """Consecutive calls of a graph with equal treatments, by path."""

    calls: int
    treatments: Mapping[str, Treatment]


Treatments = Mapping[str, Sequence[Group]]
"""Groups of calls by graph, in call order."""


@dataclass(frozen=True)
class Solution:
    """Treatments of activations, with their costs.

    Attributes:
        treatments: treatment by graph and path.
        bytes: peak bytes of activations and gradients.
        seconds: the time that they add to a step, by published figures.
    """

    treatments: Treatments
    bytes: int
    seconds: float


def keep_all(graphs: Sequence[GraphNeeds], release: Release, chip: Chip | None = None) -> Solution:
    """Solution that keeps all activations that gradients read."""
    treatments: Treatments = {
        g.name: [Group(g.calls, {path: "keep" if path in g.read else "recompute" for path in g.bytes})] for g in graphs
    }
    program = _undivided(graphs, chip, (), release)
    return program.solution(program.assignment(treatments))


def least_seconds(graphs: Sequence[GraphNeeds], chip: Chip | None, release: Release) -> float:
    """Least time that treatments add without a limit."""
    _, solution = _undivided(graphs, chip, (), release).solved(float("inf"))
    return 0.0 if solution is None else solution.seconds


def most_bytes(graphs: Sequence[GraphNeeds], treatments: Treatments, release: Release) -> int:
    """Peak bytes of activations and gradients under given treatments."""
    calls = {name: [group.calls for group in groups] for name, groups in treatments.items()}
    program = _IntegerProgram(graphs, calls, None, calls.keys(), release)
    return round(program.peak(program.assignment(treatments)))


def solve(
    graphs: Sequence[GraphNeeds],
    limit: float | None,
    chip: Chip | None,
    offloadable: Collection[str],
    release: Release = "read",
) -> Solution | None:
    """Solve for the treatments that add least time; `None` if no treatments are within the limit.

    Args:
        limit: upper limit of the peak bytes of activations and gradients; `None` for as few as possible, regardless of
            time.
        offloadable: names of the graphs for which offloading to the host is one of the treatments.
        release: time when memory is free again.
    """
    calls: Mapping[str, tuple[int, ...]] = {g.name: (g.calls,) for g in graphs}
    cost, best = _undivided(graphs, chip, offloadable, release).solved(limit)
    for g in sorted(graphs, key=lambda g: g.calls * sum(g.bytes.values()), reverse=True):
        ends = () if release == "loop" else evenly_spaced(g.ends, _SPLITS)  # two loops hold more than one, as compiled
        for end in ends:
            divided = {**calls, g.name: (end, g.calls - end)}
            lower, solution = _IntegerProgram(graphs, divided, chip, offloadable, release).solved(limit)
            if lower < 0.99 * cost:  # a group is one more graph to compile
                cost, best, calls = lower, solution, divided
    return best


_Row = dict[int, float]
"""Coefficients of a constraint, by column."""


@dataclass(eq=False)
class _Columns:
    """Columns of the binary variables of a group of calls.

    Attributes:
        on_device, offloaded: for each activation, whether calls save it on the device or on the host.
        release: time when the memory of an activation is freed.
        fused: for each op that XLA fuses into the kernels of the gradient that read its first result, whether it does:
            forward and backward calls are compiled together, and the gradient's kernels have the operands.
        recomputed: for each op, whether backward calls recompute it.
        has_run: for each op that is recomputed as its results are read, and each window, whether it has run.
    """

    graph: GraphNeeds
    calls: int
    release: Release
    on_device: dict[str, int] = field(default_factory=dict)
    offloaded: dict[str, int] = field(default_factory=dict)
    fused: dict[int, int] = field(default_factory=dict)
    recomputed: dict[int, int] = field(default_factory=dict)
    has_run: dict[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """Number of the op that computes each activation."""
        return {path: number for number, op in enumerate(self.graph.ops) for path in op.results}

    @property
    def windows(self) -> Iterator[tuple[int, int, int, int]]:
        """Windows in which ops are recomputed as their results are read: number, first step, end, and own bytes."""
        return ((number, *each) for number, each in enumerate(self.graph.windows if self.graph.as_read else ()))

    def saved(self, calls: int) -> _Row:
        """Bytes of activations kept by some of the calls."""
        return {self.on_device[path]: calls * float(size) for path, size in self.graph.bytes.items()}

    def saved_by_all(self, micro_batches: int) -> _Row:
        """Bytes of activations kept by all calls of some micro-batches."""
        return self.saved(micro_batches * self.calls)

    def fused_into_readers(self, path: str) -> int | None:
        """The variable of the op that computes an activation within the gradient's kernels."""
        number = self.makers[path]
        return self.fused.get(number) if path == self.graph.ops[number].results[0] else None

    def known_to_gradient(self, path: str) -> _Row:
        """Whether the gradient's kernels have an activation without recomputing it."""
        return _at_least_one(self.on_device[path] if path in self.graph.read else None, self.fused_into_readers(path))

    def treatment(self, path: str, values: Sequence[bool]) -> Treatment:
        """Treatment of an activation in an assignment. Activations that the gradient's kernels recompute are kept."""
        if values[self.on_device[path]]:
            return "keep"
        if path in self.offloaded and values[self.offloaded[path]]:
            return "offload"
        column = self.fused_into_readers(path)
        is_fused = path in self.graph.read and column is not None and values[column]
        return "keep" if is_fused and not values[self.recomputed[self.makers[path]]] else "recompute"


class _IntegerProgram:
    """Integer program. Its columns are binary variables, by groups of calls; and last, the peak in megabytes, as HiGHS
    prefers numbers of one magnitude.

    Args:
        calls: for each graph, the sizes of its groups of calls.
    """

    def __init__(
        self,
        graphs: Sequence[GraphNeeds],
        calls: Mapping[str, Sequence[int]],
        chip: Chip | None,
        offloadable: Collection[str],
        release: Release,
    ) -> None:
        self._release = release
        self._seconds = list[float]()
        self._groups = {
            g.name: [self._declare(g, count, chip, g.name in offloadable) for count in calls[g.name]] for g in graphs
        }
        self._all_groups = [*chain.from_iterable(self._groups.values())]
        self._rows: list[_Row] = []
        self._lower_bounds: list[float] = []
        for group in self._all_groups:
            self._add_availability(group)
            self._add_windows(group)
        self._moments = [*self._moments_of_step()]
        for row, fixed in self._moments:
            self._add({column: -size / 1e6 for column, size in row.items()} | {len(self._seconds): 1.0}, fixed / 1e6)

    def solved(self, limit: float | None) -> tuple[float, Solution | None]:
        """Cost and solution of the best assignment within a limit."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # importing it takes a while

        if limit is not None and limit < 0:
            return float("inf"), None
        count = len(self._seconds)
        total = sum(self._seconds) or 1.0
        objective = [1e3 * seconds / total for seconds in self._seconds]
        most_megabytes = float("inf") if limit is None else limit / 1e6
        if limit is None:  # among those with the same peak, one that keeps little
            saved = _merged(each.saved_by_all(each.graph.live_steps) for each in self._all_groups)
            objective = [_REST * saved.get(column, 0.0) / 1e6 for column in range(count)]
        result = milp(
            [*objective, 1.0 if limit is None else 0.0],
            integrality=[1] * count + [0],
            bounds=Bounds([0.0] * (count + 1), [1.0] * count + [most_megabytes]),
            constraints=LinearConstraint(self._matrix(), self._lower_bounds, float("inf")),
            options={"mip_rel_gap": 1e-3, "time_limit": 30.0},
        )
        if result.x is None:
            return float("inf"), None
        return result.fun, self.solution([x > 0.5 for x in result.x[:-1]])

    def assignment(self, treatments: Treatments) -> list[bool]:
        """Assignment equivalent to treatments, as compiled."""
        values = [False] * len(self._seconds)
        for name, groups in self._groups.items():
            for group, planned in zip(groups, treatments[name], strict=True):
                self._fill_fused(values, group, planned.treatments)
                missing, recomputing = {*group.graph.read}, set[str]()
                for number, op in reversed([*enumerate(group.graph.ops)]):
                    treated = {path: planned.treatments[path] for path in missing.intersection(op.results)}
                    for path, treatment in treated.items():
                        if treatment == "offload":
                            values[group.offloaded[path]] = True
                        elif treatment == "keep":
                            column = group.fused_into_readers(path)
                            values[group.on_device[path]] = column is None or path in recomputing or not values[column]
                    if "recompute" in treated.values():
                        values[group.recomputed[number]] = True
                        missing.update(op.operands)
                        recomputing.update(op.operands)
                self._fill_windows(values, group)
        return values

    def peak(self, values: Sequence[bool]) -> float:
        """Peak bytes of an assignment."""
        return max((fixed + sum(s for c, s in row.items() if values[c]) for row, fixed in self._moments), default=0.0)

    def _declare(self, g: GraphNeeds, calls: int, chip: Chip | None, may_offload: bool) -> _Columns:
        """Declare the variables of a group of calls.

        Loops write all activations that they keep, also those that forward kernels could recompute from operands, and
        write results of attention kernels a second time.
        """
        group = _Columns(g, calls, "read" if g.as_read else self._release)
        writing = [op for op in g.ops if op.is_fused or op.is_kernel] if group.release == "loop" else []
        stored = {op.results[0] for op in writing}
        for path, size in g.bytes.items():
            group.on_device[path] = self._column(calls * size / memory_bandwidth(chip) if path in stored else 0.0)
            if may_offload:
                group.offloaded[path] = self._column(calls * 2 * size / host_bandwidth(chip))
        for number, op in enumerate(g.ops):
            group.recomputed[number] = self._column(calls * op.seconds(chip))
            if op.is_fused and group.release == "read":
                group.fused[number] = self._column()
        for window, *_ in group.windows:
            for number in range(len(g.ops)):
                group.has_run[number, window] = self._column()
        return group

    def _column(self, seconds: float = 0.0) -> int:
        """Declare a binary variable, and the time that it adds."""
        self._seconds.append(seconds)
        return len(self._seconds) - 1

    def _matrix(self) -> Any:
        """Constraint matrix; `_lower_bounds` has lower bounds."""
        from scipy.sparse import coo_array

        cells = [(row, column, value) for row, entries in enumerate(self._rows) for column, value in entries.items()]
        rows, columns, values = zip(*cells, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self._rows), len(self._seconds) + 1)).tocsr()

    def solution(self, values: Sequence[bool]) -> Solution:
        """Solution equivalent to an assignment."""
        treatments = {
            name: [
                Group(each.calls, {path: each.treatment(path, values) for path in each.graph.bytes}) for each in groups
            ]
            for name, groups in self._groups.items()
        }
        seconds = sum(time for time, each in zip(self._seconds, values, strict=True) if each)
        return Solution(treatments, round(self.peak(values)), seconds)

    def _add(self, row: _Row, lower_bound: float) -> None:
        self._rows.append(row)
        self._lower_bounds.append(lower_bound)

    def _add_availability(self, group: _Columns) -> None:
        """Constrain activations that the gradient reads, and operands of recomputed ops, to be available."""

        def available(path: str) -> _Row:
            return _at_least_one(group.on_device[path], group.offloaded.get(path), group.recomputed[group.makers[path]])

        for path in sorted(group.graph.read):
            self._add(available(path) | _at_least_one(group.fused_into_readers(path)), 1.0)
        for number, op in enumerate(group.graph.ops):
            for path in op.operands:
                self._add(available(path) | {group.recomputed[number]: -1.0}, 0.0)
            if number in group.fused:
                for path in (*op.operands, *op.statistics):
                    self._add(group.known_to_gradient(path) | {group.fused[number]: -1.0}, 0.0)

    def _add_windows(self, group: _Columns) -> None:
        """Constrain ops that are recomputed as they are read: each runs once, before the end of a window that reads a
        result or runs an op that needs one."""
        read_by_gradient = group.graph.read
        for (window, _, end, _), (number, op) in product(group.windows, enumerate(group.graph.ops)):
            has_run = group.has_run[number, window]
            if any(path in read_by_gradient and read_by_gradient[path][0] < end for path in op.results):
                self._add({has_run: 1.0, group.recomputed[number]: -1.0}, 0.0)
            if window:
                self._add({has_run: 1.0, group.has_run[number, window - 1]: -1.0}, 0.0)
            for path in op.operands:
                maker = group.has_run[group.makers[path], window]
                self._add(_at_least_one(group.on_device[path], maker, group.offloaded.get(path)) | {has_run: -1.0}, 0.0)

    def _fill_fused(self, values: list[bool], group: _Columns, treatments: Mapping[str, Treatment]) -> None:
        """Set the ops that XLA fuses into the gradient's kernels that read their results."""
        saved = {path for path in group.graph.read if treatments[path] == "keep"}
        for number, op in enumerate(group.graph.ops):
            if number in group.fused and saved.issuperset((*op.operands, *op.statistics)):
                values[group.fused[number]] = True
                saved.add(op.results[0])

    def _fill_windows(self, values: list[bool], group: _Columns) -> None:
        """Set the ops that have run in each window, given the recomputed ones."""
        for window, _, end, _ in group.windows:
            wanted = {path for path, (first, _) in group.graph.read.items() if first < end}
            for number, op in reversed([*enumerate(group.graph.ops)]):
                if values[group.recomputed[number]] and not wanted.isdisjoint(op.results):
                    values[group.has_run[number, window]] = True
                    wanted.update(op.operands)

    def _moments_of_step(self) -> Iterator[tuple[_Row, float]]:
        """Live activations at each potential peak, and the constant bytes there, of each model.

        With them are the activations of its other micro-batches, and those of other models that wait meanwhile.
        """
        for model in group_by(self._all_groups, lambda each: each.graph.model).values():
            g = model[0].graph
            waiting = [each for each in self._all_groups if each.graph.model in g.live_models]
            waiting_row = _merged(each.saved_by_all(g.live_models[each.graph.model]) for each in waiting)
            own_row = _merged(
                each.saved_by_all(each.graph.live_steps - 1) for each in model if each.graph.live_steps > 1
            )
            ended = [each for each in self._all_groups if each.graph.model in g.ended_models]
            fixed = g.device_bytes + sum(each.graph.gradients * each.calls for each in ended)
            for row, own_fixed in self._moments_of_model(model):
                yield _total(row, own_row | waiting_row), own_fixed + fixed

    def _moments_of_model(self, model: Sequence[_Columns]) -> Iterator[tuple[_Row, float]]:
        """Live activations of a model's call at each potential peak, and the constant bytes there.

        While a group is differentiated, the activations of its other calls and of earlier groups are in memory, and the
        gradients of later ones; of graphs that are called later, their gradients; of other graphs, all activations.
        """
        yield _merged(each.saved(each.calls) for each in model), 0.0
        for groups in group_by(model, lambda each: each.graph.name).values():
            g, is_loop = groups[0].graph, groups[0].release == "loop"
            ended = [each for each in model if each.graph.span[0] > g.span[1]]
            others = [each for each in model if each not in ended and each not in groups]
            gradients = sum(each.graph.gradients * each.calls for each in ended)
            for number, group in enumerate(groups):
                saved = [each.saved(each.calls) for each in (*others, *groups[:number])]
                later = sum(each.calls for each in groups[number + 1 :])
                for calls_left in {group.calls} if is_loop else {group.calls - 1, 0}:
                    live = _merged([*saved, group.saved(calls_left)])
                    calls_done = later + (group.calls if is_loop else group.calls - 1 - calls_left)
                    for call_row, gradient_bytes in self._rows_within_call(group):
                        yield _total(live, call_row), gradient_bytes + gradients + g.gradients * calls_done

    def _rows_within_call(self, group: _Columns) -> Iterator[tuple[_Row, int]]:
        """Activations live within a backward call at each potential peak, and the bytes of gradient values there."""
        g = group.graph
        if not g.as_read:
            for paths, gradient_bytes in g.moments:
                yield self._row_within_call(group, paths), gradient_bytes
            return
        readers = {path: number for number, op in reversed([*enumerate(g.ops)]) for path in op.operands}
        for window, start, _, gradient_bytes in group.windows:
            row: _Row = {}
            for number, op in enumerate(g.ops):
                for path in op.results:
                    if g.needed_until.get(path, -1) < start:
                        continue
                    size = float(g.bytes[path])
                    row[group.on_device[path]] = size
                    if not op.is_fused:
                        has_run = group.has_run[number, window]
                        row[has_run] = row.get(has_run, 0.0) + size
                    if window and path not in g.read and path in readers:  # dead once its reader has run
                        has_run = group.has_run[readers[path], window - 1]
                        row[has_run] = row.get(has_run, 0.0) - size
            yield row, gradient_bytes

    def _row_within_call(self, group: _Columns, paths: frozenset[str]) -> _Row:
        """Activations live within a backward call.

        A noinline call recomputes everything at its beginning, because XLA for CPUs schedules independent operations
        first: all values that the gradient reads are live, intermediate values are not.
        """
        g, is_noinline = group.graph, group.release == "call"
        row = {
            group.recomputed[number]: float(
                sum(g.bytes[path] for path in op.results if path in (g.read if is_noinline else paths))
            )
            for number, op in enumerate(g.ops)
            if not op.is_fused or is_noinline
        }
        row |= {group.offloaded[path]: float(g.bytes[path]) for path in paths if path in group.offloaded}
        if group.release != "loop":
            row |= {group.on_device[path]: float(g.bytes[path]) for path in (g.bytes if is_noinline else paths)}
        return row


def _at_least_one(*columns: int | None) -> _Row:
    """Constraint row: at least one of some variables is set."""
    return {column: 1.0 for column in columns if column is not None}


def _merged(rows: Iterable[_Row]) -> _Row:
    """Union of rows without common columns."""
    return {column: size for row in rows for column, size in row.items()}


def _total(a: _Row, b: _Row) -> _Row:
    """Sum of two rows."""
    return {column: a.get(column, 0.0) + b.get(column, 0.0) for column in a | b}


def _undivided(
    graphs: Sequence[GraphNeeds], chip: Chip | None, offloadable: Collection[str], release: Release
) -> _IntegerProgram:
    """Integer program with equal treatments for all calls of a graph."""
    return _IntegerProgram(graphs, {g.name: (g.calls,) for g in graphs}, chip, offloadable, release)
