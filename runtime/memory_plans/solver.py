"""Treatments of activations within a budget: one integer program, solved by HiGHS.

For each activation it decides whether calls keep it, copy it to the host, or recompute it; recomputation needs the
operands of its op, each by one of the three. The calls of a graph are one group or two, in the order of the step:
backward calls run in the reverse order, so the first calls recompute where the groups differ, when little else is live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from runtime.memory_plans.needs import GraphNeeds, host_bandwidth, some_of
from runtime.targets.chip import Chip

Treatment = Literal["keep", "recompute", "offload"]

Release = Literal["read", "call", "loop"]
"""When memory of an activation is free again: after the last op that reads it, after the call or after the loop of
calls that it belongs to. It depends on how the program is compiled."""

_REST = 1.0
"""What a byte that is kept counts beside one at the highest, where as little memory as possible is wanted."""

_SPLITS = 8
"""How many ways to divide the calls of a graph are tried at most. There is one integer program for each."""


@dataclass(frozen=True)
class Group:
    """Consecutive calls of a graph with equal treatments, by path."""

    calls: int
    treatments: Mapping[str, Treatment]


Treatments = Mapping[str, Sequence[Group]]
"""By graph, in the order of its calls."""


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


def keep_all(graphs: Sequence[GraphNeeds], release: Release) -> Solution:
    """Keep what gradients read."""
    whole: Treatments = {
        g.name: [Group(g.calls, {path: "keep" if path in g.read else "recompute" for path in g.bytes})] for g in graphs
    }
    return Solution(whole, most_bytes(graphs, whole, release), 0.0)


def most_bytes(graphs: Sequence[GraphNeeds], treatments: Treatments, release: Release) -> int:
    """What activations and gradients take at the highest, with some treatments."""
    divided = [_Divided(g, tuple(group.calls for group in treatments[g.name])) for g in graphs]
    program = _IntegerProgram(divided, None, {g.name for g in graphs}, release)
    return round(program.most(program.columns(treatments)))


def solve(
    graphs: Sequence[GraphNeeds],
    limit: float | None,
    chip: Chip | None,
    offloadable: Collection[str],
    release: Release = "read",
) -> Solution | None:
    """The treatments that add least time; `None` if nothing is within the limit.

    Args:
        limit: upper limit of the peak bytes of activations and gradients; `None` for as few as possible, regardless of
            time.
        offloadable: names of the graphs for which offloading to the host is one of the treatments.
        release: time when memory is free again.
    """
    groups: Mapping[str, tuple[int, ...]] = {g.name: (g.calls,) for g in graphs}

    def solved(groups: Mapping[str, tuple[int, ...]]) -> tuple[float, Solution | None]:
        divided = [_Divided(g, groups[g.name]) for g in graphs]
        return _IntegerProgram(divided, chip, offloadable, release).solved(limit)

    price, best = solved(groups)
    for g in sorted(graphs, key=lambda g: g.calls * sum(g.bytes.values()), reverse=True):
        for end in some_of(g.ends, _SPLITS) if release != "loop" else ():  # two loops hold more than one, as compiled
            tried = {**groups, g.name: (end, g.calls - end)}
            less, found = solved(tried)
            if less < 0.99 * price:  # a group is one more graph to compile
                price, best, groups = less, found, tried
    return best


@dataclass(frozen=True)
class _Divided:
    """Graph, with the sizes of its call groups."""

    graph: GraphNeeds
    counts: tuple[int, ...]


_Row = dict[int, float]


class _IntegerProgram:
    """Integer program. Binary variables: saved, then offloaded, per activation of a group; recomputed, per op; last,
    the peak in megabytes, as HiGHS prefers numbers of one magnitude.
    """

    def __init__(
        self, graphs: Sequence[_Divided], chip: Chip | None, offloadable: Collection[str], release: Release
    ) -> None:
        self._graphs = graphs
        self._release = release
        self._kept: dict[tuple[str, int, str], int] = {}
        self._away: dict[tuple[str, int, str], int] = {}
        self._again: dict[tuple[str, int, int], int] = {}
        self._done: dict[tuple[str, int, int, int], int] = {}
        """For ops that are recomputed as they are read, and each window: whether they have run."""
        self._times = list[float]()
        for each in graphs:
            for group, count in enumerate(each.counts):
                self._declare(each.graph, group, count, chip, each.graph.name in offloadable)
        self._rows: list[_Row] = []
        self._least: list[float] = []
        for each in graphs:
            for group in range(len(each.counts)):
                self._add_availability(each.graph, group)
                self._add_windows(each.graph, group)
        self._memory = [*self._moments()]
        for row, held in self._memory:
            self._add({column: -size / 1e6 for column, size in row.items()} | {len(self._times): 1.0}, held / 1e6)

    def solved(self, limit: float | None) -> tuple[float, Solution | None]:
        """The best assignment within a limit, after its price."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # importing it takes a while

        if limit is not None and limit < 0:
            return float("inf"), None
        count = len(self._times)
        whole = sum(self._times) or 1.0
        objective = [1e3 * each / whole for each in self._times]
        most = float("inf") if limit is None else limit / 1e6
        if limit is None:  # among those with the same peak, one that keeps little
            everything, _ = self._memory[0]
            objective = [_REST * everything.get(column, 0.0) / 1e6 for column in range(count)]
        found = milp(
            [*objective, 1.0 if limit is None else 0.0],
            integrality=[1] * count + [0],
            bounds=Bounds([0.0] * (count + 1), [1.0] * count + [most]),
            constraints=LinearConstraint(self._matrix(), self._least, float("inf")),
            options={"mip_rel_gap": 1e-3, "time_limit": 30.0},
        )
        if found.x is None:
            return float("inf"), None
        return found.fun, self._solution([x > 0.5 for x in found.x[:-1]])

    def columns(self, treatments: Treatments) -> list[bool]:
        """The assignment that treatments mean, as compiled.

        Where XLA compiles forward and backward calls together, fused values with kept operands are not held.
        """
        taken = [False] * len(self._times)
        for each in self._graphs:
            for number, group in enumerate(treatments[each.graph.name]):
                missing = {*each.graph.read}
                for i, op in reversed([*enumerate(each.graph.ops)]):
                    wanted = missing.intersection(op.results)
                    is_held = not op.is_fused or self._release != "read"
                    is_held = is_held or any(group.treatments[path] != "keep" for path in op.operands)
                    for path in wanted:
                        by = {"keep": self._kept, "offload": self._away}.get(group.treatments[path])
                        if by is self._away or (by is not None and is_held):
                            taken[by[each.graph.name, number, path]] = True
                    if any(group.treatments[path] == "recompute" for path in wanted):
                        taken[self._again[each.graph.name, number, i]] = True
                        missing.update(op.operands)
                self._fill_windows(taken, each.graph, number)
        return taken

    def most(self, taken: Sequence[bool]) -> float:
        """Bytes at the highest."""
        return max((held + sum(s for c, s in row.items() if taken[c]) for row, held in self._memory), default=0.0)

    def _declare(self, g: GraphNeeds, group: int, count: int, chip: Chip | None, may_offload: bool) -> None:
        for path, size in g.bytes.items():
            self._kept[g.name, group, path] = len(self._times)
            self._times.append(0.0)
            if may_offload:
                self._away[g.name, group, path] = len(self._times)
                self._times.append(count * 2 * size / host_bandwidth(chip))
        for number, op in enumerate(g.ops):
            self._again[g.name, group, number] = len(self._times)
            self._times.append(count * op.seconds(chip))
        for window in range(len(g.windows) if g.as_read else 0):
            for number in range(len(g.ops)):
                self._done[g.name, group, number, window] = len(self._times)
                self._times.append(0.0)

    def _matrix(self) -> Any:
        """Constraint matrix; `_least` has lower bounds."""
        from scipy.sparse import coo_array

        cells = [(row, column, value) for row, each in enumerate(self._rows) for column, value in each.items()]
        rows, columns, values = zip(*cells, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self._rows), len(self._times) + 1)).tocsr()

    def _solution(self, taken: Sequence[bool]) -> Solution:
        """What an assignment means."""

        def treatment(*key: Any) -> Treatment:
            away = self._away.get(key)
            return "keep" if taken[self._kept[key]] else "offload" if away is not None and taken[away] else "recompute"

        treatments = {
            each.graph.name: [
                Group(count, {path: treatment(each.graph.name, group, path) for path in each.graph.bytes})
                for group, count in enumerate(each.counts)
            ]
            for each in self._graphs
        }
        seconds = sum(time for time, each in zip(self._times, taken, strict=True) if each)
        return Solution(treatments, round(self.most(taken)), seconds)

    def _add_availability(self, g: GraphNeeds, group: int) -> None:
        makers = {path: number for number, op in enumerate(g.ops) for path in op.results}

        def available(path: str) -> _Row:
            key = (g.name, group, path)
            ways = [self._kept[key], self._away.get(key), self._again[g.name, group, makers[path]]]
            return {column: 1.0 for column in ways if column is not None}

        for path in sorted(g.read):
            self._add(available(path), 1.0)
        for number, op in enumerate(g.ops):
            for path in op.operands:
                self._add(available(path) | {self._again[g.name, group, number]: -1.0}, 0.0)

    def _moments(self) -> Iterator[tuple[_Row, float]]:
        """Live activations at each potential peak, and the constant bytes there, with all activations of other
        micro-batches."""
        waiting: _Row = {
            column: (each.graph.held - 1) * size
            for each in self._graphs
            for group, count in enumerate(each.counts)
            for column, size in self._kept_row(each.graph, group, count).items()
            if each.graph.held > 1
        }
        for row, held in self._moments_of_step():
            yield {column: row.get(column, 0.0) + waiting.get(column, 0.0) for column in row | waiting}, held

    def _moments_of_step(self) -> Iterator[tuple[_Row, float]]:
        """Live activations at each potential peak, and the constant bytes there.

        While a group is differentiated, the activations of its other calls and of earlier groups are in memory, and the
        gradients of later ones; of graphs that are called later, their gradients; of other graphs, all activations.
        """
        kept = [[self._kept_row(each.graph, i, n) for i, n in enumerate(each.counts)] for each in self._graphs]
        yield {column: size for groups in kept for row in groups for column, size in row.items()}, 0.0
        for number, each in enumerate(self._graphs):
            g = each.graph
            ended = [other.graph for other in self._graphs if other.graph.span[0] > g.span[1]]
            others = [
                row
                for i, other in enumerate(self._graphs)
                if i != number and other.graph not in ended
                for row in kept[i]
            ]
            gradients = sum(other.gradients * other.calls for other in ended)
            for group, count in enumerate(each.counts):
                later = sum(each.counts[group + 1 :])
                for left in {count - 1, 0} if self._release != "loop" else {count}:
                    mine = [*kept[number][:group], self._kept_row(g, group, left)]
                    row = {column: size for part in (*others, *mine) for column, size in part.items()}
                    done = later + (count - 1 - left if self._release != "loop" else count)
                    for inside, own in self._inside_rows(g, group):
                        both = {column: row.get(column, 0.0) + inside.get(column, 0.0) for column in row | inside}
                        yield both, own + gradients + g.gradients * done

    def _kept_row(self, g: GraphNeeds, group: int, count: int) -> _Row:
        """What some calls of a group keep."""
        return {self._kept[g.name, group, path]: count * float(size) for path, size in g.bytes.items()}

    def _add_windows(self, g: GraphNeeds, group: int) -> None:
        """When ops run that are recomputed as they are read: before a window ends that reads a result, or runs another
        op that needs it, and once for all."""
        makers = {path: number for number, op in enumerate(g.ops) for path in op.results}
        windows = enumerate(g.windows if g.as_read else ())
        for (window, (_, end, _)), (number, op) in product(windows, enumerate(g.ops)):
            column = self._done[g.name, group, number, window]
            if any(path in g.read and g.read[path][0] < end for path in op.results):
                self._add({column: 1.0, self._again[g.name, group, number]: -1.0}, 0.0)
            if window:
                self._add({column: 1.0, self._done[g.name, group, number, window - 1]: -1.0}, 0.0)
            for path in op.operands:
                away = self._away.get((g.name, group, path))
                there = {self._kept[g.name, group, path]: 1.0, self._done[g.name, group, makers[path], window]: 1.0}
                self._add(there | ({} if away is None else {away: 1.0}) | {column: -1.0}, 0.0)

    def _fill_windows(self, taken: list[bool], g: GraphNeeds, group: int) -> None:
        """Say which ops have run in each window, in an assignment that says which are recomputed."""
        for window, (_, end, _) in enumerate(g.windows if g.as_read else ()):
            wanted = {path for path, (first, _) in g.read.items() if first < end}
            for number, op in reversed([*enumerate(g.ops)]):
                if taken[self._again[g.name, group, number]] and not wanted.isdisjoint(op.results):
                    taken[self._done[g.name, group, number, window]] = True
                    wanted.update(op.operands)

    def _inside_rows(self, g: GraphNeeds, group: int) -> Iterator[tuple[_Row, int]]:
        """Activations live within a backward call at each potential peak, and the bytes of gradient values there."""
        if not g.as_read:
            for paths, own in g.moments:
                yield self._inside_row(g, group, paths), own
            return
        readers = {path: number for number, op in reversed([*enumerate(g.ops)]) for path in op.operands}
        for window, (start, _, own) in enumerate(g.windows):
            row: _Row = {}
            for number, op in enumerate(g.ops):
                for path in op.results:
                    if g.needed_until.get(path, -1) < start:
                        continue
                    size = float(g.bytes[path])
                    row[self._kept[g.name, group, path]] = size
                    if not op.is_fused:
                        done = self._done[g.name, group, number, window]
                        row[done] = row.get(done, 0.0) + size
                    if window and path not in g.read and path in readers:  # dead once its reader has run
                        done = self._done[g.name, group, readers[path], window - 1]
                        row[done] = row.get(done, 0.0) - size
            yield row, own

    def _inside_row(self, g: GraphNeeds, group: int, paths: frozenset[str]) -> _Row:
        """Activations live within a backward call.

        A noinline call recomputes everything at its beginning, because XLA for CPUs schedules independent operations
        first: all values that the gradient reads are live, intermediate values are not.
        """
        is_whole = self._release == "call"
        row = {
            self._again[g.name, group, number]: float(
                sum(g.bytes[path] for path in op.results if path in (g.read if is_whole else paths))
            )
            for number, op in enumerate(g.ops)
            if not op.is_fused or is_whole
        }
        away = ((self._away.get((g.name, group, path)), path) for path in paths)
        row |= {column: float(g.bytes[path]) for column, path in away if column is not None}
        if self._release != "loop":
            held = g.bytes if is_whole else paths
            row |= {self._kept[g.name, group, path]: float(g.bytes[path]) for path in held}
        return row

    def _add(self, row: _Row, least: float) -> None:
        self._rows.append(dict(row))
        self._least.append(least)
