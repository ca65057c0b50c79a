"""Who runs whom, who shares storage with whom, and what is written: facts about graphs that hold across ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl.tensor import Tensor

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.op import Op


def storages(graph: Graph) -> dict[Tensor, tuple[Tensor, ...]]:
    """For each operand and aliasing result of a graph's ops, the tensors whose storage it is made of.

    That is the tensor itself, unless it is a view or the result of an in-place op.
    """
    found: dict[Tensor, tuple[Tensor, ...]] = {}
    for op in graph.ops:
        for part in op.parts:
            for t in part.inputs:
                found.setdefault(t, (t,))
            if part.bases:
                found[part.outputs[0]] = tuple(dict.fromkeys(s for base in part.bases for s in found[base]))
    return found


def reachable(graph: Graph) -> tuple[Graph, ...]:
    """A graph, and all graphs that running it runs; each once, in a fixed order."""
    found = {graph: None}
    waiting = [graph]
    while waiting:
        new = [callee for callee in waiting.pop().called_graphs if callee not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return tuple(found)


def has_effect(op: Op) -> bool:
    """Whether an op, or one in a graph that it runs, does more than compute its results."""
    return op.kind.effect or any(inner.kind.effect for g in op.called_graphs for r in reachable(g) for inner in r.ops)


def written_tensors(graph: Graph) -> set[Tensor]:
    """The tensors whose storage running the graph writes to, calls included."""
    made_of = storages(graph) if any(op.modified for op in graph.ops) else {}
    return {s for op in graph.ops for i in op.modified for s in made_of[op.inputs[i]]}


def written_inputs(graph: Graph) -> frozenset[int]:
    """Positions of the graph inputs whose storage running the graph writes to."""
    written = written_tensors(graph)
    return frozenset(i for i, t in enumerate(graph.inputs) if t in written)
