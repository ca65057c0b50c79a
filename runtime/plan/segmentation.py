"""`SegmentationPolicy`: which calls are segments of a plan, and the estimated benefit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache

from popxl.core.aliasing import callees_first, reachable, shares_by_reference
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call
from popxl.graph import Graph
from runtime.plan.placement import IpuPlacement, OpPlacement, can_enter
from runtime.plan.structure import StructuralEncoder, Structure, Structures, encoded

SMALLEST = 16
"""Least number of ops of a graph that is dispatched separately; smaller graphs belong to the calling segment."""

REPEATED = 600
"""Number of repeatedly compiled ops from which separate compilation of called graphs pays, as
`tests/benchmarks/ways.py` measured on CPUs for blocks with norms, blocks without, and GPTs: above it, keeping the calls
takes longer to compile, up to twice as long and more; below, as long or less."""

LARGE = 1_000_000
"""Average number of elements that a call reads and writes, from which a CPU runs a plan as fast as other modes. Smaller
calls are faster as loop iterations, which need no dispatch. (Measured likewise.)"""


class SegmentationPolicy:
    """Selection of calls as segments: calls of sufficiently large graphs with at least two call sites.

    Args:
        smallest: minimal number of ops of a segment. `None`: no calls are segments.
        placement: IPUs of the ops, if they are separate devices.

    Attributes:
        placement: likewise; on one device without these.
        total_size: number of ops that XLA compiles in a single program without calls.
        repeated: those among them that XLA would compile repeatedly, and that a plan compiles once.
        not_owned: inputs of loops that are known not to be owned in all iterations, so that planning nested loops
            determines this once.
    """

    def __init__(self, main: Graph, smallest: int | None = SMALLEST, placement: IpuPlacement | None = None) -> None:
        self._structures = Structures(main)
        self.placement = placement or OpPlacement()
        self.not_owned: defaultdict[Op, set[Tensor]] = defaultdict(set)
        self._numbers_in = cache(lambda graph: self.numbers(graph.ops))
        for graph in () if placement is None else callees_first(main)[:-1]:  # so that none has to look far
            self._numbers_in(graph)
        calls = Counter(self._structures.calls(main))
        for graph in self.placement.host_executed:
            calls += self._structures.calls(graph)
        sizes = {self._structures.of_graph(graph): self._structures.size(graph) for graph in reachable(main)[1:]}
        self._segment_structures = {
            s for s, count in calls.items() if smallest is not None and count > 1 and sizes[s] >= smallest
        }
        self._main, self._calls = main, calls
        self.total_size = self.size(main.ops)
        self.repeated = self.total_size - self._compiled_once()

    def _compiled_once(self) -> int:
        """Number of ops outside of segments, and in one segment of each structure, ignoring nested segments."""
        outside: dict[Graph, int] = {}
        segments: dict[Structure, int] = {}
        for graph in callees_first(self._main):
            if self._structures.of_graph(graph) in self._segment_structures:
                continue
            outside[graph] = 0
            for op in graph.ops:
                outside[graph] += 1
                for callee in op.called_graphs:
                    if is_call(op) and (structure := self._structures.of_graph(callee)) in self._segment_structures:
                        segments[structure] = self._structures.size(callee)
                    else:
                        outside[graph] += outside[callee] if is_call(op) else self._structures.size(callee)
        return outside[self._main] + sum(segments.values())

    def has_large_calls(self) -> bool:
        """Whether calls, on average, compute much longer than their dispatch takes."""
        graphs = {self._structures.of_graph(graph): graph for graph in reachable(self._main)[1:]}
        calls = {graphs[s]: self._calls[s] for s in self._segment_structures}
        numbers = sum(count * self.numbers(graph.ops) for graph, count in calls.items())
        return numbers >= LARGE * sum(calls.values())

    def is_segment(self, op: Op) -> bool:
        """Whether an op is a call compiled as a separate segment."""
        is_alike = is_call(op) and self._structures.of_graph(op.called_graphs[0]) in self._segment_structures
        return is_alike and not self.placement.spans(op) and not shares_by_reference(op)

    def is_host_executed(self, op: Op) -> bool:
        """Whether the host executes a call or loop step by step: its graph contains segments, or its ops span several
        IPUs."""
        if self.placement.spans(op):
            return True
        if not is_call(op) or self.is_segment(op):
            return False
        return can_enter(op) and not self._segment_structures.isdisjoint(self._structures.calls(op.called_graphs[0]))

    def numbers(self, ops: Iterable[Op]) -> int:
        """Count of numbers read and written by ops, including called graphs."""
        return sum(map(self._numbers_of, ops))

    def size(self, ops: Iterable[Op]) -> int:
        """Number of ops visible to XLA."""
        return sum(1 + sum(map(self._structures.size, op.called_graphs)) for op in ops)

    def _numbers_of(self, op: Op) -> int:
        own = sum(t.nelms for t in (*op.inputs, *op.outputs))
        return own + sum(run.iterations * self._numbers_in(run.graph) for run in op.runs)

    def encoded(self, ops: Iterable[Op], changed: Iterable[Tensor] = ()) -> StructuralEncoder:
        """Structural encoding of ops. Segment calls match regardless of constants passed to them, such as a layer
        index; so do ops with constants `changed` earlier."""
        ops = tuple(ops)
        given = (t.origin for op in ops if self.is_segment(op) for t in op.inputs)
        passed = {*changed, *(t for t in given if isinstance(t, Constant))}
        return encoded(ops, self._structures, passed)
