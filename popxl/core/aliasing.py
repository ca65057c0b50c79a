"""Analyses of graphs across ops: reachable graphs, readers of tensors, aliased storage, and written tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from popxl.core.tensor import Tensor
from popxl.core.traits import is_call

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


def storages(ops: Iterable[Op]) -> dict[Tensor, tuple[Tensor, ...]]:
    """Map operands and aliasing results of ops, in order, to their base tensors.

    The base of a tensor is the tensor itself, unless it is a view or the result of an in-place op.
    """
    found: dict[Tensor, tuple[Tensor, ...]] = {}
    for op in ops:
        for part in op.parts:
            for t in part.inputs:
                found.setdefault(t, (t,))
            add_alias(part, found)
    return found


def add_alias(op: Op, found: dict[Tensor, tuple[Tensor, ...]]) -> None:
    """Map an op's first result to its base tensors, if it has any; `found` has those of earlier aliases."""
    if bases := op.bases:
        found[op.outputs[0]] = tuple(dict.fromkeys(s for base in bases for s in found.get(base, (base,))))


def view_of(t: Tensor) -> Op | None:
    """The view op that produces a tensor, if any."""
    op = t.producer
    return op if op is not None and op.kind.view is not None else None


def bases_first(
    t: Tensor, known: Container[Tensor], bases_of: Callable[[Tensor], Sequence[Tensor]]
) -> Iterator[Tensor]:
    """Yield all bases of a view, each after its own bases, then the view itself.

    Args:
        known: tensors to leave out. The caller adds each tensor that it gets.
        bases_of: function that returns the bases of a view; none for other tensors.
    """
    waiting = [t]
    while waiting:
        t = waiting[-1]
        missing = () if t in known else [base for base in bases_of(t) if base not in known]
        if missing:
            waiting += reversed(missing)
        else:
            waiting.pop()
            if t not in known:
                yield t


def used_storages(graph: Graph) -> set[Tensor]:
    """Base tensors of all storage that the ops of a graph use."""
    return {s for made_of in storages(graph.ops).values() for s in made_of}


def reachable(graph: Graph) -> tuple[Graph, ...]:
    """A graph and all transitively called graphs, each once, in order of first mention."""
    found: dict[Graph, None] = {}
    waiting = [graph]
    while waiting:
        new = waiting.pop()
        if new not in found:
            found[new] = None
            waiting += reversed(new.called_graphs)
    return tuple(found)


def lowered_ops(graph: Graph) -> Iterator[Op]:
    """All executed ops of a graph and its callees: each graph once, composite ops expanded."""
    return (part for each in reachable(graph) for op in each.ops for part in op.parts)


def readers(graph: Graph) -> dict[Tensor, list[Op]]:
    """Ops of a graph that read each tensor, in order, each once."""
    found: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for t in dict.fromkeys(op.inputs):
            found.setdefault(t, []).append(op)
    return found


def callees_first(graph: Graph, without: Container[Graph] = ()) -> tuple[Graph, ...]:
    """Transitively called graphs, each once, callees before callers; the graph itself last.

    Graphs in `without` are excluded, with graphs that only these call.
    """
    found: dict[Graph, None] = {}
    waiting = [(graph, False)]
    while waiting:
        new, visited = waiting.pop()
        if visited:
            found[new] = None
        elif new not in found:
            waiting.append((new, True))
            waiting += [(callee, False) for callee in new.called_graphs if callee not in without]
    return tuple(found)


def through_calls(t: Tensor) -> Iterator[Tensor]:
    """Source of a tensor through calls: the corresponding output of the called graph, recursively."""
    yield t
    while (op := t.producer) is not None and is_call(op):
        t = op.called_graphs[0].outputs[op.outputs.index(t)]
        yield t


def has_effect(op: Op) -> bool:
    """Test whether an op or one of its callees has side effects."""
    return op.kind.effect or any(inner.kind.effect for g in op.called_graphs for r in reachable(g) for inner in r.ops)


def written_tensors(graph: Graph) -> set[Tensor]:
    """Base tensors of the storage that a run of the graph writes, calls included."""
    made_of = storages(graph.ops) if any(op.modified for op in graph.ops) else {}
    return {s for op in graph.ops for i in op.modified for s in made_of[op.inputs[i]]}


def written_inputs(graph: Graph) -> frozenset[int]:
    """Positions of the graph inputs whose storage a run of the graph writes."""
    written = written_tensors(graph)
    return frozenset(i for i, t in enumerate(graph.inputs) if t in written)


def changed_inputs(graph: Graph) -> frozenset[int]:
    """Positions of graph inputs changed by a run. Excludes by-reference inputs of unchanging callees, unlike
    `written_inputs`."""
    changed: dict[Graph, frozenset[int]] = {}
    for each in callees_first(graph):
        made_of = storages(each.ops) if any(op.modified for op in each.ops) else {}
        inside = {op: _changed_by_runs(op, changed) if op.called_graphs else op.modified for op in each.ops}
        written = {
            s for op, positions in inside.items() for i in op.modified & positions for s in made_of[op.inputs[i]]
        }
        changed[each] = frozenset(i for i, t in enumerate(each.inputs) if t in written)
    return changed[graph]


def _changed_by_runs(op: Op, changed: dict[Graph, frozenset[int]]) -> set[int]:
    """Positions of op inputs changed by called graphs."""
    return {i - len(run.op_inputs) + run.first for run in op.runs for i in changed[run.graph]}


def overwritten(op: Op) -> frozenset[int]:
    """Positions of the inputs that an op changes; excludes by-reference inputs of callees that only read them."""
    return (
        op.modified & _changed_by_runs(op, {g: changed_inputs(g) for g in op.called_graphs}) if op.runs else op.modified
    )


def by_reference(op: Op) -> frozenset[int]:
    """Positions of op inputs passed by reference, by declaration or per call."""
    bound = (
        (run.first + i, t) for run in op.runs for i, (t, _) in enumerate(zip(run.inputs, run.operands, strict=False))
    )
    return op.modified.union(i for i, t in bound if t.by_ref)


def shares_by_reference(op: Op) -> bool:
    """Test whether an op passes overlapping storage by reference to one graph."""
    by_ref = by_reference(op)
    parts = [_base_storages(op.inputs[i]) for i in by_ref] if len(by_ref) > 1 else []
    return sum(map(len, parts)) > len(set[Tensor]().union(*parts))


def _base_storages(t: Tensor) -> set[Tensor]:
    """The tensors that back a tensor's storage."""
    found: set[Tensor] = set()
    waiting = [t]
    while waiting:
        origin = waiting.pop().origin
        producer = origin.producer
        if producer is not None and producer.kind.view is not None:
            waiting += producer.inputs
        else:
            found.add(origin)
    return found
