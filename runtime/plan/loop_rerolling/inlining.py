"""Inlining of graphs with a single call site, before searching for loops.

The gradient of a model whose layers are called is a graph; the updates follow it, in the graph that calls it. After
inlining, each update can be in the same iteration as its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

from popxl.core.aliasing import call_counts, changed_inputs, storages, view_of
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call
from popxl.graph import Graph


class InlinedGraphs:
    """Graphs of a program, with single-call graphs inlined.

    Attributes:
        graphs: graphs that are not inlined, each with its ops and those of inlined graphs, in order.
        aliases: tensors bound to the inputs of inlined graphs, and returned tensors for the results of their calls.
    """

    def __init__(self, main: Graph) -> None:
        self._sites = call_counts(main.ops)
        self._storages = cache(lambda graph: storages(graph.ops))
        self.aliases: dict[Tensor, Tensor] = {}
        self.graphs: dict[Graph, tuple[Op, ...]] = {}
        waiting = [main]
        while waiting:
            graph = waiting.pop()
            if graph not in self.graphs:
                self.graphs[graph] = tuple(self._ops(graph))
                waiting += [callee for op in self.graphs[graph] for callee in op.called_graphs]

    def _ops(self, graph: Graph) -> Iterator[Op]:
        """Ops of a graph, replacing calls of inlined graphs by their ops."""
        entered = [iter(graph.ops)]
        while entered:
            op = next(entered[-1], None)
            if op is None:
                entered.pop()
            elif self._is_inlined(op):
                (run,) = op.runs
                self.aliases.update(run.bindings)
                self.aliases.update(run.results)
                entered.append(iter(run.graph.ops))
            else:
                yield op

    def _is_inlined(self, op: Op) -> bool:
        """Whether a call is inlined: sole call site of a graph with calls, requiring no copies: modified inputs passed
        by reference, outputs computed by its own ops."""
        if not is_call(op) or self._sites[op.called_graphs[0]] > 1 or not op.runs[0].is_bound:
            return False
        (run,) = op.runs
        if not run.graph.called_graphs:
            return False
        changed = changed_inputs(run.graph)
        made_of = self._storages(op.graph)
        count = Counter(s for t in run.operands for s in made_of[t])
        apart = all(count[s] == 1 for i in changed for s in made_of[run.operands[i]])
        outputs = [output.origin for _, output in run.results]
        own = all(view_of(t) is None and t not in run.inputs and not isinstance(t, Constant) for t in outputs)
        return apart and own and changed <= op.modified and len(set(outputs)) == len(outputs)
