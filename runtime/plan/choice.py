"""Which calls of a program become pieces of a plan, whether a plan pays, and where ops run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache

from popxl.core.aliasing import callees_first, reachable, shares_by_reference
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call, is_loop
from popxl.graph import Graph
from runtime.plan.placement import Places, can_enter
from runtime.plan.stacks import Stack, stacks_of
from runtime.plan.structure import Encoding, Structure, Structures, encoded

SMALLEST = 16
"""A graph of fewer ops is not worth a dispatch of its own: it is part of the piece that calls it."""

REPEATED = 600
"""It pays to compile called graphs by themselves if XLA would otherwise compile this many ops that it has compiled
already. So it is on CPUs, as `tests/benchmarks/ways.py` measured for blocks with norms, blocks without, and GPTs: from
there on to keep the calls takes up to twice as long to compile and more; below, as long or less."""

LARGE = 1_000_000
"""How many numbers a call reads and writes, on average, from which on a CPU runs a plan as fast as anything else. Calls
of fewer are quicker as turns of a loop, which need no dispatch. (Measured likewise.)"""


class Choice:
    """Which calls of a program become pieces: those of graphs that are called twice or more, and are large enough.

    Args:
        main: the graph that the program runs.
        smallest: how many ops are enough. `None`: no calls are pieces.
        places: the IPUs of the ops, if they are devices of their own.

    Attributes:
        repeated: how many ops XLA would compile again in one program that a plan compiles once.
        lost: inputs of loops that are known not to be owned in all turns, so that planning a nest of loops finds that
            out once.
    """

    def __init__(self, main: Graph, smallest: int | None = SMALLEST, places: Places | None = None) -> None:
        self._structures = Structures(main)
        self._places = places
        self.lost: defaultdict[Op, set[Tensor]] = defaultdict(set)
        self._numbers_in = cache(lambda graph: self.numbers(graph.ops))
        for graph in () if places is None else callees_first(main)[:-1]:  # so that none has to look far
            self._numbers_in(graph)
        calls = Counter(self._structures.calls(main))
        for graph in () if places is None else places.gone_through:
            calls += self._structures.calls(graph)
        sizes = {self._structures.of(graph): self._structures.size(graph) for graph in reachable(main)[1:]}
        self._pieces = {s for s, count in calls.items() if smallest is not None and count > 1 and sizes[s] >= smallest}
        self._main, self._calls = main, calls
        self.repeated = self._repeated()

    def _repeated(self) -> int:
        """How many ops are in pieces beyond the first of each structure. One in a piece is not counted again."""
        around = [graph for graph in callees_first(self._main) if self._structures.of(graph) not in self._pieces]
        alone: dict[Graph, int] = {}
        met: dict[Structure, int] = {}
        for graph in around:
            alone[graph] = 0
            for op in graph.ops:
                alone[graph] += 1
                for callee in op.called_graphs:
                    if is_call(op) and (structure := self._structures.of(callee)) in self._pieces:
                        met[structure] = self._structures.size(callee)
                    else:
                        alone[graph] += alone[callee] if is_call(op) else self._structures.size(callee)
        return self.size(self._main.ops) - alone[self._main] - sum(met.values())

    def is_worth_it(self) -> bool:
        """Whether a plan pays, for what it saves XLA."""
        return self.repeated >= REPEATED

    def has_large_calls(self) -> bool:
        """Whether what calls compute takes much longer than to dispatch them, on average."""
        graphs = {self._structures.of(graph): graph for graph in reachable(self._main)[1:]}
        calls = {graphs[s]: self._calls[s] for s in self._pieces}
        numbers = sum(count * self.numbers(graph.ops) for graph, count in calls.items())
        return numbers >= LARGE * sum(calls.values())

    def is_piece(self, op: Op) -> bool:
        """Whether an op is a call that is a piece of its own."""
        is_alike = is_call(op) and self._structures.of(op.called_graphs[0]) in self._pieces
        return is_alike and not self.is_on_several(op) and not shares_by_reference(op)

    def is_entered(self, op: Op) -> bool:
        """Whether an op is a call or loop that the host carries out step by step: because there are pieces in the graph
        that it calls, or because its ops are in several places."""
        if self.is_on_several(op):
            return True
        if not is_call(op) or self.is_piece(op):
            return False
        return can_enter(op) and not self._pieces.isdisjoint(self._structures.calls(op.called_graphs[0]))

    def is_on_several(self, op: Op) -> bool:
        """Whether an op runs in several places."""
        return self._places is not None and self._places.spans(op)

    def place(self, op: Op) -> int:
        """Where an op runs: the number of an IPU. Of one that is entered, what none of its steps touches is there."""
        if self._places is None:
            return 0
        return self._places.default(op) if self._places.spans(op) else min(self._places.of(op))

    def stacks(self, op: Op) -> tuple[Stack, ...]:
        """What a loop stacks that is entered; nothing, of other ops."""
        if self._places is None or not is_loop(op) or not self.is_on_several(op):
            return ()
        return stacks_of(op, self._places.home)

    def landing(self, t: Tensor, place: int) -> int:
        """Where a result is to go that is made in a place."""
        found = None if self._places is None else self._places.landing(t)
        return place if found is None else found

    def numbers(self, ops: Iterable[Op]) -> int:
        """How many numbers ops read and write, with all that they call."""
        return sum(map(self._numbers_of, ops))

    def size(self, ops: Iterable[Op]) -> int:
        """How many ops XLA sees."""
        return sum(1 + sum(map(self._structures.size, op.called_graphs)) for op in ops)

    def _numbers_of(self, op: Op) -> int:
        own = sum(t.nelms for t in (*op.inputs, *op.outputs))
        return own + sum(run.turns * self._numbers_in(run.graph) for run in op.runs)

    def encoded(self, ops: Iterable[Op], changed: Iterable[Tensor] = ()) -> Encoding:
        """Ops, written down. Calls that are pieces are alike whatever numbers they are passed: of a layer, say. So are
        ops that are passed constants that were `changed` before."""
        ops = tuple(ops)
        given = (t.origin for op in ops if self.is_piece(op) for t in op.inputs)
        passed = {*changed, *(t for t in given if isinstance(t, Constant))}
        return encoded(ops, self._structures, passed)
