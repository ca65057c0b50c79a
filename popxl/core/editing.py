"""Edits of graphs: reordering, replacing, removing and moving ops. Each checks everything before it changes anything.

The public entry points `Graph.reorder`, `Graph.replace`, `Graph.remove` and `Graph.move` document them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from popxl.base.sequence import Sequencer, with_ids_replaced
from popxl.context import get_current_context
from popxl.core.dependencies import dependencies
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


def reorder(graph: Graph, ops: Iterable[Op]) -> None:
    """See `Graph.reorder`."""
    ops = list(ops)
    if len(ops) != len(graph.ops) or {*ops} != {*graph.ops}:
        raise PopxlError(f"reorder: the new order of {graph.title} has to name each of its ops once.")
    needs = dependencies(graph)
    placed: set[Op] = set()
    for op in ops:
        if late := needs[op].ops - placed:
            first = min(late, key=graph.ops.index)
            raise PopxlError(
                f"reorder: {op!r} ({op.source}) has to come after {first!r} ({first.source}) in {graph.title}."
            )
        placed.add(op)
    graph.ops = ops
    graph.ir.edits.record_edit()


def replace(graph: Graph, ops: Sequence[Op], build: Callable[..., Any]) -> None:
    """See `Graph.replace`."""
    start, inputs, outputs = _replaceable(graph, ops)
    first, old_ops, tensors = ops[0], graph.ops, graph._tensors
    count = len(old_ops)
    context = get_current_context()
    site_context = context.set(
        ipu_id=first.ipu,
        io_tile_set=first.io_tiles,
        execution_context=first.execution_context,
        scope_prefix=first.name.removesuffix(first.op_type),
        sequence=Sequencer(),
    )
    with context.defer_hooks():
        graph.ops, graph._tensors = [*old_ops], {**tensors}
        try:
            with graph, site_context:
                returned = build(*inputs)
            results = [returned] if isinstance(returned, Tensor) else list(returned or ())
            _check_replacement(graph, outputs, results, graph.ops[count:], {*graph.ops[start:count]})
        except BaseException:
            for op in graph.ops[count:]:
                for callee in op.called_graphs:
                    callee.call_sites.remove(op)
            graph.ops, graph._tensors = old_ops, tensors
            raise
        _splice(graph, start, ops, graph.ops[count:], dict(zip(results, outputs, strict=True)))


def _replaceable(graph: Graph, ops: Sequence[Op]) -> tuple[int, list[Tensor], list[Tensor]]:
    """Schedule position, inputs and outputs of ops for replacement."""
    start = graph.ops.index(ops[0]) if ops and ops[0] in graph.ops else -1
    if start < 0 or graph.ops[start : start + len(ops)] != list(ops):
        raise PopxlError(f"replace: {list(ops)} are not ops that follow each other in {graph.title}.")
    inputs, outputs = [t for op in ops for t in op.inputs], [t for op in ops for t in op.outputs]
    if not {*outputs}.isdisjoint(inputs) or any(op.kind.view is not None for op in ops):
        raise PopxlError(f"replace: of {list(ops)}, one is a view, or needs the result of another.")
    return start, inputs, outputs


def _check_replacement(
    graph: Graph, outputs: Sequence[Tensor], results: Sequence[Any], new: Sequence[Op], later: AbstractSet[Op]
) -> None:
    """Check replacement tensors for outputs; their ops may not depend on `later` ops."""
    new_tensors = [t for op in new if op.kind.view is None for t in op.outputs]
    if len(results) != len(outputs) or len({*results}) != len(results) or not {*new_tensors}.issuperset(results):
        raise PopxlError(
            f"replace: for the results {list(outputs)} the new ops have to make {len(outputs)} tensors, no views; "
            f"got {list(results)}."
        )
    for t, result in zip(outputs, results, strict=True):
        same_storage = t._origin is result._origin
        if t.spec != result.spec or not same_storage:
            difference = "another spec" if same_storage else "storage that is shared otherwise"
            raise PopxlError(f"replace: {result!r}, which is to take the place of {t!r}, has {difference}.")
    for op in new:
        for t in op.inputs:
            if t.producer in later:
                raise PopxlError(f"replace: {op!r} needs {t!r}, which is made later in {graph.title}.")


def _splice(graph: Graph, start: int, old: Sequence[Op], new: Sequence[Op], replaced: Mapping[Tensor, Tensor]) -> None:
    """Move new ops from the end of the schedule to the position of old ops, with `replaced` as their results."""
    for op in new:
        inputs, outputs = (tuple(replaced.get(t, t) for t in ts) for ts in (op.inputs, op.outputs))
        op.edit(inputs=inputs, outputs=outputs)
    for result, t in replaced.items():
        t._producer = result._producer
        graph.forget(result)
    for op in old:
        for callee in op.called_graphs:
            callee.call_sites.remove(op)
    old_ids = {op.id for op in old}
    predecessors = tuple(dict.fromkeys(id for op in old for id in op.after if id not in old_ids))
    new_ids = [op.id for op in new] or predecessors
    for op in new:
        op.after = predecessors + op.after
    graph.ops = [*graph.ops[:start], *new, *graph.ops[start + len(old) : len(graph.ops) - len(new)]]
    graph.ir.edits.record_edit()
    for op in graph.ops:
        if not old_ids.isdisjoint(op.after):
            op.after = with_ids_replaced(op.after, old_ids, new_ids)
    get_current_context().sequence.replace(old_ids, new_ids)


def remove(graph: Graph, ops: Iterable[Op]) -> None:
    """See `Graph.remove`."""
    gone = {*ops}
    if strangers := gone - {*graph.ops}:
        raise PopxlError(f"remove: {[*strangers]} are not ops of {graph.title}.")
    results = {t for op in gone for t in op.outputs}
    for op in graph.ops:
        if op not in gone and (needed := results.intersection(op.inputs)):
            raise PopxlError(f"remove: {op!r} ({op.source}) stays in {graph.title} and needs {[*needed]}.")
    if outputs := results & {*graph._outputs}:
        raise PopxlError(f"remove: {[*outputs]} are outputs of {graph.title}; they have to stay.")
    for op in [op for op in graph.ops if op in gone]:
        _splice(graph, graph.ops.index(op), [op], [], {})
    for t in results:
        graph.forget(t)


def move(graph: Graph, ops: Iterable[Op], into: Graph, bindings: Mapping[Tensor, Tensor]) -> None:
    """See `Graph.move`."""
    going = {*ops}
    moved = [op for op in graph.ops if op in going]
    results = {t for op in moved for t in op.outputs}
    _check_move(graph, going, results, into, bindings)
    moves = {op.id: op in going for op in graph.ops}
    nearest: dict[tuple[int, bool], tuple[int, ...]] = {}  # the ops directly before one, in either graph
    for op in graph.ops:
        for is_moved in (True, False):
            predecessors = (id for a in op.after for id in ((a,) if moves[a] is is_moved else nearest[a, is_moved]))
            nearest[op.id, is_moved] = tuple(dict.fromkeys(predecessors))
    sequence = get_current_context().sequence
    for op in graph.ops:
        op.after = nearest[op.id, moves[op.id]]
        if moves[op.id]:
            sequence.replace({op.id}, nearest[op.id, False])
    graph.ops = [op for op in graph.ops if op not in going]
    for op in moved:
        for callee in op.called_graphs:
            callee.call_sites.remove(op)
        for t in op.outputs:
            graph.forget(t)
            into._adopt(t, t.name)
        op.edit(inputs=tuple(t if t in results else bindings[t] for t in op.inputs), _graph=into.ref)
        into.take_in(op)


def _check_move(
    graph: Graph, going: AbstractSet[Op], results: AbstractSet[Tensor], into: Graph, bindings: Mapping[Tensor, Tensor]
) -> None:
    """Check that ops, with their results, can move to another graph."""
    if strangers := going - {*graph.ops}:
        raise PopxlError(f"move: {[*strangers]} are not ops of {graph.title}.")
    if into is graph or into.ir is not graph.ir or into.call_sites:
        raise PopxlError(f"move: {into!r} has to be another graph of the same Ir, and one that nothing calls.")
    for op in graph.ops:
        for t in op.inputs:
            twin = bindings.get(t)
            if op not in going and t in results:
                raise PopxlError(f"move: {op!r} ({op.source}) stays in {graph.title} and needs {t!r}, which goes.")
            if op not in going or t in results:
                continue
            if twin is None or twin.graph_ref is not into.ref or twin.spec.to_tuple() != t.spec.to_tuple():
                raise PopxlError(
                    f"move: {op!r} ({op.source}) reads {t!r}, which stays in {graph.title}; `given` has to say what "
                    f"it reads instead: a tensor of {into.title}, of the same spec. It says {twin!r}."
                )
    if outputs := results & {*graph._outputs}:
        raise PopxlError(f"move: {[*outputs]} are outputs of {graph.title}; they have to stay.")
