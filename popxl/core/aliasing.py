"""Analyses of graphs across ops: reachable graphs, readers of tensors, aliased storage, and written tensors."""

from __future__ import annotations

from collections import Counter
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
    bases_of: dict[Tensor, tuple[Tensor, ...]] = {}
    for op in ops:
        for member in op.parts:
            for t in member.inputs:
                bases_of.setdefault(t, (t,))
            add_alias(member, bases_of)
    return bases_of


def add_alias(op: Op, bases_of: dict[Tensor, tuple[Tensor, ...]]) -> None:
    """Map an op's first result to its base tensors, if it has any; `bases_of` has those of earlier aliases."""
    if bases := op.bases:
        bases_of[op.outputs[0]] = tuple(dict.fromkeys(s for base in bases for s in bases_of.get(base, (base,))))


def view_of(t: Tensor) -> Op | None:
    """The view op that produces a tensor, if any."""
    op = t.producer
    return op if op is not None and op.kind.view is not None else None


def bases_first(
    t: Tensor, visited: Container[Tensor], bases_of: Callable[[Tensor], Sequence[Tensor]]
) -> Iterator[Tensor]:
    """Yield all bases of a view, each after its own bases, then the view itself.

    Args:
        visited: tensors to leave out; the caller adds each yielded tensor.
        bases_of: function that returns the bases of a view; none for other tensors.
    """
    waiting = [t]
    while waiting:
        t = waiting[-1]
        missing = () if t in visited else [base for base in bases_of(t) if base not in visited]
        if missing:
            waiting += reversed(missing)
        else:
            waiting.pop()
            if t not in visited:
                yield t


def used_storages(graph: Graph) -> set[Tensor]:
    """Base tensors of all storage that the ops of a graph use."""
    return {s for bases in storages(graph.ops).values() for s in bases}


def reachable(graph: Graph) -> tuple[Graph, ...]:
    """A graph and all transitively called graphs, each once, in order of first mention."""
    return _reached([graph])


def called_by(ops: Iterable[Op]) -> tuple[Graph, ...]:
    """The graphs that ops call, and all transitively called graphs, each once, in order of first mention."""
    return _reached([graph for op in ops for graph in op.called_graphs])


def call_counts(ops: Sequence[Op]) -> Counter[Graph]:
    """The number of call sites of each graph, among ops and in graphs that these call."""
    callers = (ops, *(graph.ops for graph in called_by(ops)))
    return Counter(callee for each in callers for op in each for callee in op.called_graphs)


def _reached(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    reached: dict[Graph, None] = {}
    waiting = [*reversed(graphs)]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached[current] = None
            waiting += reversed(current.called_graphs)
    return tuple(reached)


def lowered_ops(ops: Sequence[Op]) -> Iterator[Op]:
    """All executed ops among `ops` and in graphs that these call: each graph once, composite ops expanded."""
    return (part for each in (ops, *(graph.ops for graph in called_by(ops))) for op in each for part in op.parts)


def readers(graph: Graph) -> dict[Tensor, list[Op]]:
    """Ops of a graph that read each tensor, in order, each once."""
    readers_of: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for t in dict.fromkeys(op.inputs):
            readers_of.setdefault(t, []).append(op)
    return readers_of


def callees_first(graph: Graph, without: Container[Graph] = ()) -> tuple[Graph, ...]:
    """Transitively called graphs, each once, callees before callers; the graph itself last.

    Graphs in `without` are excluded, with graphs that only these call.
    """
    ordered: dict[Graph, None] = {}
    waiting = [(graph, False)]
    while waiting:
        current, visited = waiting.pop()
        if visited:
            ordered[current] = None
        elif current not in ordered:
            waiting.append((current, True))
            waiting += [(callee, False) for callee in current.called_graphs if callee not in without]
    return tuple(ordered)


def through_calls(t: Tensor) -> Iterator[Tensor]:
    """Source of a tensor through calls: the corresponding output of the called graph, recursively."""
    yield t
    while (op := t.producer) is not None and is_call(op):
        t = op.called_graphs[0].outputs[op.outputs.index(t)]
        yield t


def has_effect(op: Op) -> bool:
    """Test whether an op or one of its callees has side effects."""
    return op.kind.effect or any(inner.kind.effect for graph in called_by([op]) for inner in graph.ops)


def written_tensors(graph: Graph) -> set[Tensor]:
    """Base tensors of the storage that a run of the graph writes, calls included."""
    bases_of = storages(graph.ops) if any(op.modified for op in graph.ops) else {}
    return {s for op in graph.ops for i in op.modified for s in bases_of[op.inputs[i]]}


def written_inputs(graph: Graph) -> frozenset[int]:
    """Positions of the graph inputs whose storage a run of the graph writes."""
    tensors = written_tensors(graph)
    return frozenset(i for i, t in enumerate(graph.inputs) if t in tensors)


def changed_inputs(graph: Graph) -> frozenset[int]:
    """Positions of graph inputs changed by a run. Excludes by-reference inputs of unchanging callees, unlike
    `written_inputs`."""
    changed: dict[Graph, frozenset[int]] = {}
    for callee in callees_first(graph):
        bases_of = storages(callee.ops) if any(op.modified for op in callee.ops) else {}
        changed_positions = {
            op: _changed_by_runs(op, changed) if op.called_graphs else op.modified for op in callee.ops
        }
        written_bases = {
            s
            for op, positions in changed_positions.items()
            for i in op.modified & positions
            for s in bases_of[op.inputs[i]]
        }
        changed[callee] = frozenset(i for i, t in enumerate(callee.inputs) if t in written_bases)
    return changed[graph]


def _changed_by_runs(op: Op, changed: dict[Graph, frozenset[int]]) -> set[int]:
    """Positions of op inputs changed by called graphs."""
    return {i - len(run.op_inputs) + run.first for run in op.runs for i in changed[run.graph]}


def overwritten(op: Op) -> frozenset[int]:
    """Positions of the inputs that an op changes; excludes by-reference inputs of callees that only read them."""
    if not op.runs:
        return op.modified
    return op.modified & _changed_by_runs(op, {graph: changed_inputs(graph) for graph in op.called_graphs})


def by_reference(op: Op) -> frozenset[int]:
    """Positions of op inputs passed by reference, by declaration or per call."""
    bound = ((run.first + i, t) for run in op.runs for i, (t, _) in enumerate(run.bindings))
    return op.modified.union(i for i, t in bound if t.by_ref)


def shares_by_reference(op: Op) -> bool:
    """Test whether an op passes overlapping storage by reference to one graph."""
    by_ref = by_reference(op)
    storage_sets = [_base_storages(op.inputs[i]) for i in by_ref] if len(by_ref) > 1 else []
    return sum(map(len, storage_sets)) > len(set[Tensor]().union(*storage_sets))


def _base_storages(t: Tensor) -> set[Tensor]:
    """The tensors that back a tensor's storage."""
    bases: set[Tensor] = set()
    waiting = [t]
    while waiting:
        origin = waiting.pop().origin
        producer = origin.producer
        if producer is not None and producer.kind.view is not None:
            waiting += producer.inputs
        else:
            bases.add(origin)
    return bases
