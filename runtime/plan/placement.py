"""Op placement over several IPUs as separate devices.

An op runs on its IPU (`popxl.ipu`). Its results stay there, except for copies: `ops.ipu_copy` runs at either end, so
that a graph that starts or ends with copies can be on one IPU. A graph whose ops are all on one IPU runs as a whole.
The host executes a graph that is on several IPUs, step by step, each on one IPU; see `runtime.plan.plan`.
"""

from __future__ import annotations

from popxl.core.aliasing import callees_first, shares_by_reference, view_of
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import chooses, is_call, is_loop
from popxl.graph import Graph
from popxl.ops.repeat import final_ipu
from runtime.plan.stacks import Stack, stacks_of


def can_enter(op: Op, replicas: int = 1) -> bool:
    """Whether the host can execute an op's graphs: calls; loops, iteration by iteration; conditionals, after fetching
    the condition. Excludes conditionals with several replicas, which may diverge in branches.

    Bindings must be whole storages: neither views, nor constants that are returned. By-reference bindings must not
    overlap, because each host-executed graph has its own storages.
    """
    runs = op.runs
    if not runs or any(run.iterations == 0 for run in runs) or shares_by_reference(op):
        return False
    if chooses(op) and (replicas > 1 or isinstance(op.inputs[0].origin, Constant)):
        return False
    returned = [t for run in runs for _, t in run.results]
    whole = all(view_of(t.origin) is None for t in (*op.inputs, *returned))
    made = not any(isinstance(t.origin, Constant) for t in returned)
    return whole and made and all(run.is_bound for run in runs)


class OpPlacement:
    """Placement of ops on one device, which represents all IPUs as IPU 0; base class of others.

    Attributes:
        host_executed: graphs on several IPUs, which the host executes step by step, but for those of calls.
    """

    host_executed: tuple[Graph, ...] = ()

    def spans(self, op: Op) -> bool:
        """Whether an op spans several IPUs."""
        return False

    def ipu_of(self, op: Op) -> int:
        """IPU of an op. For one that spans several, the default IPU of values that no step touches."""
        return 0

    def stacks(self, op: Op) -> tuple[Stack, ...]:
        """Stacked outputs of a host-executed loop; empty for other ops."""
        return ()

    def result_ipu(self, t: Tensor) -> int | None:
        """Destination IPU of a copied result; `None` if it stays on its producer's IPU."""
        return None


class IpuPlacement(OpPlacement):
    """Placement of ops on their IPUs, which are separate devices.

    Attributes:
        ipus: IPUs of ops, in ascending order.
    """

    def __init__(self, main: Graph, replicas: int) -> None:
        self._replicas = replicas
        self._of_graph: dict[Graph, frozenset[int]] = {}
        self._output_ipus: dict[Graph, tuple[int | None, ...]] = {}
        self._of_copies: dict[Op, frozenset[int]] = {}
        for graph in callees_first(main):
            self._visit(graph)
        self.ipus = tuple(sorted(self._of_graph[main]))
        ops = (op for graph, ipus in self._of_graph.items() if len(ipus) > 1 for op in graph.ops)
        spanning = (op for op in ops if not is_call(op) and self.spans(op))
        self.host_executed = tuple(graph for op in spanning for graph in op.called_graphs)

    def _visit(self, graph: Graph) -> None:
        """Determine op placement in a graph, after its called graphs."""
        ops = [op for op in graph.ops if op.kind.view is None]  # a view is made when a reader looks through it
        copies = [op for op in ops if op.outputs and op.location[0] != op.ipu]
        others = frozenset[int]().union(*map(self._ipus_of, set(ops).difference(copies)))
        for op in copies:
            ipu = op.location[0] if op.location[0] in others and op.ipu not in others else op.ipu
            self._of_copies[op] = frozenset((ipu or 0,))
        self._of_graph[graph] = others.union(*(self._of_copies[op] for op in copies))
        self._output_ipus[graph] = tuple(self._result_ipu(t.origin) for t in graph.outputs)

    def _ipus_of(self, op: Op) -> frozenset[int]:
        """IPUs of an op: several, if the host must execute its graph."""
        if op in self._of_copies:
            return self._of_copies[op]
        if can_enter(op, self._replicas):
            inside = frozenset[int]().union(*(self._of_graph[graph] for graph in op.called_graphs))
            if len(inside) > 1:
                return inside
        return frozenset((op.ipu or 0,))

    def spans(self, op: Op) -> bool:
        return len(self._ipus_of(op)) > 1

    def ipu_of(self, op: Op) -> int:
        if not self.spans(op):
            return min(self._ipus_of(op))
        return op.ipu if op.ipu in self.ipus else self.ipus[0]

    def stacks(self, op: Op) -> tuple[Stack, ...]:
        return stacks_of(op, self._home) if is_loop(op) and self.spans(op) else ()

    def _home(self, t: Tensor) -> int:
        """IPU storing the stacked values of a tensor over all iterations."""
        ipu = final_ipu(t)
        return ipu if ipu in self.ipus else self.ipus[0]

    def result_ipu(self, t: Tensor) -> int | None:
        ipu = self._result_ipu(t)
        return ipu if ipu in self.ipus else None

    def _result_ipu(self, t: Tensor) -> int | None:
        op = t.producer
        if op is None or op.kind.view is not None or t not in op.outputs:
            return None
        if op.runs and not chooses(op):
            (run,) = op.runs
            return self._output_ipus[run.graph][len(run.graph.outputs) - len(run.outputs) + op.outputs.index(t)]
        ipu, _ = op.location_of(t)
        return None if ipu == op.ipu else ipu
