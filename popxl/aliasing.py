"""Who runs whom, who shares storage with whom, and what is written: facts about graphs that hold across ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from popxl.tensor import Tensor

if TYPE_CHECKING:
    from popxl.graph import Graph


def owners(t: Tensor) -> Iterator[Tensor]:
    """The tensors whose storage `t` is (a part of): itself, unless it is a view or the result of an in-place op."""
    waiting = [t]
    while waiting:
        t = waiting.pop()
        producer = t.producer
        bases = () if producer is None or producer.outputs[0] is not t else producer.bases
        if bases:
            waiting += reversed(bases)
        else:
            yield t


def reachable(graph: Graph) -> tuple[Graph, ...]:
    """A graph, and all graphs that running it runs; each once, in a fixed order."""
    found = {graph: None}
    waiting = [graph]
    while waiting:
        new = [callee for callee in waiting.pop().called_graphs if callee not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return tuple(found)


def written_tensors(graph: Graph) -> set[Tensor]:
    """The storage owners that running the graph writes to, calls included."""
    return {owner for op in graph.ops for i in op.modified for owner in owners(op.inputs[i])}


def written_inputs(graph: Graph) -> frozenset[int]:
    """Positions of the graph inputs whose storage running the graph writes to."""
    written = written_tensors(graph)
    return frozenset(i for i, t in enumerate(graph.inputs) if t in written)
