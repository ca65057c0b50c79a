"""IPUs that read the tensors of a graph, and updates of variables that run on another IPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from popxl.core.aliasing import callees_first
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, Variable
from popxl.graph import Graph

Readers = Mapping[Tensor, Collection[int | None]]
"""IPUs that read each tensor of a graph, in order of their first reader."""


def ipus_by_graph(main: Graph) -> dict[Graph, set[int | None]]:
    """Map a graph, and the graphs that it calls, to the IPUs of their ops, including those of called graphs."""
    ipus: dict[Graph, set[int | None]] = {}
    for graph in callees_first(main):
        ipus[graph] = {op.ipu for op in graph.ops}.union(*(ipus[each] for op in graph.ops for each in op.called_graphs))
    return ipus


def reading_ipus(main: Graph) -> Readers:
    """Map each tensor of a graph to the IPUs of its readers, in reader order.

    A called graph on several IPUs reads its inputs where its ops do, or where these overwrite them if none reads them;
    one on a single IPU runs where it is called. Ops of `main` that overwrite a tensor do not count.
    """
    ipus = ipus_by_graph(main)
    readers: dict[Graph, dict[Tensor, dict[int | None, None]]] = {}
    for graph in callees_first(main):
        found: dict[Tensor, dict[int | None, None]] = defaultdict(dict)
        overwritten: dict[Tensor, dict[int | None, None]] = defaultdict(dict)
        for op in graph.ops:
            spread = [run for run in op.runs if len(ipus[run.graph]) > 1]
            passed = {t for run in spread for t in run.operands}
            for run in spread:
                for inner, t in run.bindings:
                    found[t] |= readers[run.graph].get(inner, {})
            for i, t in enumerate(op.inputs):
                if t not in passed and (op.runs or i not in op.modified):
                    found[t][op.ipu] = None
                elif t not in passed and graph is not main:
                    overwritten[t][op.ipu] = None
        readers[graph] = overwritten | {t: found[t] for t in found if found[t]}
    return readers[main]


def crossing_updates(main: Graph) -> Iterator[tuple[Variable, Op]]:
    """Variables read on one IPU and updated on another, with the updating op. Scalars excluded."""
    readers = reading_ipus(main)
    for op in main.ops:
        for i in sorted(op.modified):
            v = op.inputs[i].origin
            if (
                isinstance(v, Variable)
                and v.nelms > 1
                and not op.called_graphs
                and op.ipu not in readers.get(v, [op.ipu])
            ):
                yield v, op
