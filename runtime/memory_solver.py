"""Treatments of activations within a budget: one integer program, solved by HiGHS.

For each activation it decides whether every call keeps it, copies it to the host, or computes it again; what is
computed again needs the operands of its op, each by one of the three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runtime.targets.chip import Chip

Treatment = Literal["keep", "recompute", "offload"]
Treatments = Mapping[str, Mapping[str, Treatment]]
"""By graph and path."""

_FLOPS, _BANDWIDTH = 1e11, 2e10
"""Rates of a device without published figures. What counts is about how many operations are worth a byte."""


@dataclass(frozen=True)
class OpNeeds:
    """What it takes to run an op of a forward graph again.

    Attributes:
        operands, results: paths of activations.
        products: operations of matrix products and convolutions.
        bytes: that it reads and writes.
        dtype: of the factors.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    products: int
    bytes: int
    dtype: str

    def seconds(self, chip: Chip | None) -> float:
        """How long it takes by published figures."""
        flops, bandwidth = (_FLOPS, _BANDWIDTH) if chip is None else (chip.rate(self.dtype), chip.memory_bandwidth)
        return max(self.products / flops, self.bytes / bandwidth)


@dataclass(frozen=True)
class GraphNeeds:
    """The activations of a graph.

    Attributes:
        name: of the graph.
        calls: how often a step calls it.
        bytes: size of each activation, by path.
        read: paths of those that the gradient reads itself.
        ops: the ops that compute them.
    """

    name: str
    calls: int
    bytes: Mapping[str, int]
    read: frozenset[str]
    ops: tuple[OpNeeds, ...]


@dataclass(frozen=True)
class Solution:
    """Treatments, with what they cost.

    Attributes:
        treatments: by graph and path.
        bytes: what is kept in all, and what the largest graph computes again or copies back at once.
        seconds: the time that they add to a step, by published figures.
    """

    treatments: Treatments
    bytes: int
    seconds: float


def keep_all(graphs: Sequence[GraphNeeds]) -> Solution:
    """Keep what gradients read."""
    treatments: dict[str, dict[str, Treatment]] = {
        g.name: {path: "keep" if path in g.read else "recompute" for path in g.bytes} for g in graphs
    }
    return Solution(treatments, sum(g.calls * g.bytes[path] for g in graphs for path in g.read), 0.0)


def solve(graphs: Sequence[GraphNeeds], limit: float | None, chip: Chip | None, may_offload: bool) -> Solution | None:
    """The treatments that add least time.

    Args:
        graphs: those that are planned.
        limit: how many bytes activations may take at the highest; `None` for as few as possible, whatever the time.
        chip: published figures, if there are any.
        may_offload: whether moving to the host is one of the treatments.

    Returns:
        The solution; `None` if nothing is within the limit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # importing it takes a while

    program = _IntegerProgram(graphs, chip, may_offload)
    objective = program.seconds if limit is not None else [0.0] * len(program.seconds)
    objective = [*objective, 0.0 if limit is not None else 1.0]
    most = limit / 1e6 if limit is not None else float("inf")
    if most < 0:
        return None
    count = len(objective)
    found = milp(
        objective,
        integrality=[1] * (count - 1) + [0],
        bounds=Bounds([0.0] * count, [1.0] * (count - 1) + [most]),
        constraints=LinearConstraint(program.matrix(), program.least, float("inf")),
        options={"mip_rel_gap": 1e-3, "time_limit": 30.0},
    )
    return None if found.x is None else program.solution([x > 0.5 for x in found.x[:-1]])


class _IntegerProgram:
    """Variables: for each activation whether it is kept, then whether it is offloaded; for each op whether it runs
    again; and last the bytes at the highest, in megabytes, for HiGHS likes numbers of one size."""

    def __init__(self, graphs: Sequence[GraphNeeds], chip: Chip | None, may_offload: bool) -> None:
        self._graphs = graphs
        self._kept: dict[tuple[str, str], int] = {}
        self._away: dict[tuple[str, str], int] = {}
        self._again: dict[tuple[str, int], int] = {}
        times = list[float]()
        for g in graphs:
            for path, size in g.bytes.items():
                self._kept[g.name, path] = len(times)
                times.append(0.0)
                if may_offload:
                    self._away[g.name, path] = len(times)
                    times.append(g.calls * 2 * size / (_BANDWIDTH / 10 if chip is None else chip.host_bandwidth))
            for number, op in enumerate(g.ops):
                self._again[g.name, number] = len(times)
                times.append(g.calls * op.seconds(chip))
        self._times = times
        whole = sum(times) or 1.0
        self.seconds = [1e3 * each / whole for each in times]
        self._rows: list[dict[int, float]] = []
        self.least: list[float] = []
        for g in graphs:
            self._add_availability(g)
        self._add_memory()

    def matrix(self) -> Any:
        """The constraints, of which each is at least `least`."""
        from scipy.sparse import coo_array

        cells = [(row, column, value) for row, each in enumerate(self._rows) for column, value in each.items()]
        rows, columns, values = zip(*cells, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self._rows), len(self._times) + 1)).tocsr()

    def solution(self, taken: Sequence[bool]) -> Solution:
        """What an assignment means."""
        treatments: dict[str, dict[str, Treatment]] = defaultdict(dict)
        for (graph, path), kept in self._kept.items():
            away = self._away.get((graph, path))
            treatments[graph][path] = (
                "keep" if taken[kept] else "offload" if away is not None and taken[away] else "recompute"
            )
        held, largest = 0.0, 0.0
        for kept_bytes, inside in self._memory():
            held += sum(size for column, size in kept_bytes.items() if taken[column])
            largest = max(largest, sum(size for column, size in inside.items() if taken[column]))
        seconds = sum(time for time, each in zip(self._times, taken, strict=True) if each)
        return Solution(dict(treatments), round(held + largest), seconds)

    def _add_availability(self, g: GraphNeeds) -> None:
        makers = {path: number for number, op in enumerate(g.ops) for path in op.results}

        def available(path: str) -> dict[int, float]:
            ways = [self._kept[g.name, path], self._away.get((g.name, path)), self._again[g.name, makers[path]]]
            return {column: 1.0 for column in ways if column is not None}

        for path in sorted(g.read):
            self._add(available(path), 1.0)
        for number, op in enumerate(g.ops):
            for path in op.operands:
                self._add(available(path) | {self._again[g.name, number]: -1.0}, 0.0)

    def _add_memory(self) -> None:
        memory = list(self._memory())
        kept = {column: size for each, _ in memory for column, size in each.items()}
        for _, inside in memory:
            row = {column: -size / 1e6 for column, size in (kept | inside).items()}
            self._add(row | {len(self._times): 1.0}, 0.0)

    def _memory(self) -> Iterator[tuple[dict[int, float], dict[int, float]]]:
        """For each graph, bytes of what is kept of all calls, and of what one backward call has besides."""
        for g in self._graphs:
            kept = {self._kept[g.name, path]: g.calls * float(size) for path, size in g.bytes.items()}
            inside = {
                self._again[g.name, number]: float(sum(g.bytes[path] for path in op.results))
                for number, op in enumerate(g.ops)
            }
            inside |= {self._away[g.name, p]: float(s) for p, s in g.bytes.items() if (g.name, p) in self._away}
            yield kept, inside

    def _add(self, row: Mapping[int, float], least: float) -> None:
        self._rows.append(dict(row))
        self.least.append(least)
