"""Where the ops of a program run, if they are on several IPUs, and each IPU is a device of its own.

An op runs on its IPU (`popxl.ipu`). What it makes stays there, but for what is copied to another one: `ops.ipu_copy`
runs at either end, so that a graph that begins or ends with copies can be on one IPU. A graph whose ops are all on one
IPU runs where it is called, as a whole. One that is on several is gone through by the host, whose steps run on one IPU
each; see `runtime.plan`.
"""

from __future__ import annotations

from functools import cached_property

from popxl.aliasing import callees_first
from popxl.graph import Graph
from popxl.op import Op
from popxl.ops.call import call_kind
from popxl.ops.repeat import EXTRA_INPUTS, EXTRA_OUTPUTS, loop_kind
from popxl.tensor import Constant, Tensor
from runtime.lower import view_of


def can_enter(op: Op) -> bool:
    """Whether the host can go through the graph of an op: of a call, or of a loop that stacks nothing.

    What is passed and returned has to be whole: neither views, nor constants that are returned.
    """
    if op.kind is loop_kind:
        if op.attributes["repeat_count"] == 0 or len(op.outputs) > op.attributes["carried"]:
            return False
        inputs, outputs = EXTRA_INPUTS, EXTRA_OUTPUTS
    elif op.kind is call_kind:
        inputs = outputs = 0
    else:
        return False
    (graph,) = op.called_graphs
    returned = graph.outputs[outputs:]
    whole = all(view_of(t.origin) is None for t in (*op.inputs, *returned))
    made = not any(isinstance(t.origin, Constant) for t in returned)
    return whole and made and inputs + len(op.inputs) == len(graph.inputs)


class Places:
    """The IPUs of the ops of a program.

    Attributes:
        ipus: those that ops run on, in ascending order.
    """

    def __init__(self, main: Graph) -> None:
        self._of_graph: dict[Graph, frozenset[int]] = {}
        self._landings: dict[Graph, tuple[int | None, ...]] = {}
        self._of_copies: dict[Op, frozenset[int]] = {}
        for graph in callees_first(main):
            self._visit(graph)
        self.ipus = tuple(sorted(self._of_graph[main]))

    def _visit(self, graph: Graph) -> None:
        """Find out where the ops of a graph are; those of the graphs that it calls are known."""
        ops = [op for op in graph.ops if op.kind.put is None]  # a view is made where somebody looks through it
        copies = [op for op in ops if op.outputs and op.location[0] != op.ipu]
        others = frozenset[int]().union(*(self.of(op) for op in ops if not op.outputs or op.location[0] == op.ipu))
        for op in copies:
            ipu = op.location[0] if op.location[0] in others and op.ipu not in others else op.ipu
            self._of_copies[op] = frozenset((ipu or 0,))
        self._of_graph[graph] = others.union(*(self._of_copies[op] for op in copies))
        self._landings[graph] = tuple(self._landing(t.origin) for t in graph.outputs)

    def of(self, op: Op) -> frozenset[int]:
        """The IPUs that an op runs on: several, if the host has to go through its graph."""
        if op in self._of_copies:
            return self._of_copies[op]
        if can_enter(op):
            (graph,) = op.called_graphs
            if len(self._of_graph[graph]) > 1:
                return self._of_graph[graph]
        return frozenset((op.ipu or 0,))

    def spans(self, op: Op) -> bool:
        """Whether an op runs on several IPUs."""
        return len(self.of(op)) > 1

    @cached_property
    def loops(self) -> tuple[Graph, ...]:
        """The graphs of loops that are on several IPUs."""
        ops = (op for graph, ipus in self._of_graph.items() if len(ipus) > 1 for op in graph.ops)
        return tuple(op.called_graphs[0] for op in ops if op.kind is loop_kind and self.spans(op))

    def default(self, op: Op) -> int:
        """Where an op is that runs on several, for what none of its steps touches."""
        return op.ipu if op.ipu in self.ipus else self.ipus[0]

    def landing(self, t: Tensor) -> int | None:
        """The IPU that a result goes to, if that is not where it is made."""
        ipu = self._landing(t)
        return ipu if ipu in self.ipus else None

    def _landing(self, t: Tensor) -> int | None:
        op = t.producer
        if op is None or op.kind.put is not None or t not in op.outputs:
            return None
        if op.kind in (call_kind, loop_kind):
            number = op.outputs.index(t) + (EXTRA_OUTPUTS if op.kind is loop_kind else 0)
            return self._landings[op.called_graphs[0]][number]
        ipu, _ = op.location_of(t)
        return None if ipu == op.ipu else ipu
