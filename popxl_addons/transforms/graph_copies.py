"""Copies of graphs, in which tensors may be fetched right before their first use, and offloaded once made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import popxl
from popxl.context import get_current_context
from popxl.extend.ops import Op
from popxl.tensor import Constant


@dataclass(frozen=True)
class Transfers:
    """Transfers between memories that a graph copy adds.

    Attributes:
        fetched: inputs that the copy lacks, each with a function that adds the ops to fetch it. These come right before
            the first op that reads the input, and get the tensor that was computed last, for which they may wait;
            `None` if there is none.
        fetch_group: function that returns the inputs to fetch when an op reads one that is absent, from the op and this
            input.
        period: ops of different periods share no fetched tensor: each period fetches its own.
        offloaded: tensors to offload, each with a function that adds the ops to offload it. These come right after the
            op that makes the tensor, and return the tensor that the copy returns in its place.
    """

    fetched: Mapping[popxl.Tensor, Callable[[popxl.Tensor | None], popxl.Tensor]] = field(default_factory=dict)
    fetch_group: Callable[[Op, popxl.Tensor], Iterable[popxl.Tensor]] = lambda op, t: (t,)
    period: Callable[[Op], Hashable] = lambda op: None
    offloaded: Mapping[popxl.Tensor, Callable[[popxl.Tensor], popxl.Tensor]] = field(default_factory=dict)


def copy_graph(
    graph: popxl.Graph,
    transfers: Transfers | None = None,
    into: popxl.Graph | None = None,
    given: Mapping[popxl.Tensor, popxl.Tensor] = MappingProxyType({}),
    callees: Mapping[Op, popxl.Graph] = MappingProxyType({}),
    instead: Mapping[Op, Callable[[Mapping[popxl.Tensor, popxl.Tensor]], popxl.Tensor]] = MappingProxyType({}),
) -> tuple[popxl.Graph, dict[popxl.Tensor, popxl.Tensor]]:
    """Copy of a graph: equal ops, devices, names and source lines.

    It calls the graphs that `graph` calls, unless `callees` has others.

    Args:
        transfers: transfers to add; by default none.
        into: a graph without ops that becomes the copy; by default a new one.
        given: inputs of `into`, by the inputs of `graph` that they stand for. The others are added.
        callees: other graphs for calls, with inputs and outputs in the same places.
        instead: for ops of one result that the copy lacks, functions that make it: from the copy's tensors by those of
            `graph`. They fetch nothing.

    Returns:
        The copy, and its tensors by those of `graph`: for an offloaded tensor, the one that is returned in its place.
    """
    transfers = transfers or Transfers()
    copy = into or graph.ir.create_empty_graph(graph.name.partition("_subgraph")[0])
    context = get_current_context()
    of: dict[popxl.Tensor, popxl.Tensor] = {}
    with copy, popxl.in_sequence(False), context.set(scope_prefix=""):
        of.update(given)
        missing = [t for t in graph.inputs if t not in transfers.fetched and t not in given]
        of.update((t, copy.add_input_like(t, t.by_ref)) for t in missing)
        of.update((t, popxl.constant(t.data, t.dtype, t.name)) for t in graph.tensors if isinstance(t, Constant))
        ids: dict[int, int] = {}
        given_up = {t: transfers.offloaded[t](of[t]) for t in graph.inputs if t in of and t in transfers.offloaded}
        latest = None
        period: Hashable = None
        for op in graph.ops:
            with context.set(ipu_id=op.ipu, io_tile_set=op.io_tiles, debug_record=op.debug_record):
                if transfers.period(op) != period:
                    period = transfers.period(op)
                    for t in transfers.fetched:
                        of.pop(t, None)
                used = [t for t in op.inputs if t in transfers.fetched and t not in of and op not in instead]
                for t in dict.fromkeys(each for needed in used for each in transfers.fetch_group(op, needed)):
                    if t not in of:
                        of[t] = transfers.fetched[t](latest)
                twin = _twin(op, of, callees.get(op), instead.get(op))
                of.update(zip(op.outputs, twin.outputs, strict=True))
                given_up.update((t, transfers.offloaded[t](of[t])) for t in op.outputs if t in transfers.offloaded)
            latest = next((t for t in twin.outputs if t.dtype.is_floating_point), latest)
            twin.edit(modified=op.modified, name=op.name, after=tuple(ids[id] for id in op.after if id in ids))
            ids[op.id] = twin.id
        copy.show_as({twin: t.path for t, twin in of.items()})
        of |= given_up
        for t in graph.outputs:
            popxl.graph_output(of[t])
    return copy, of


def _twin(
    op: Op,
    of: Mapping[popxl.Tensor, popxl.Tensor],
    callee: popxl.Graph | None,
    instead: Callable[[Mapping[popxl.Tensor, popxl.Tensor]], popxl.Tensor] | None,
) -> Op:
    """Copy of an op in the current graph."""
    if instead is not None:
        made = instead(of).producer
        assert made is not None
        return made
    inputs = [of[t] for t in op.inputs]
    return op.clone(inputs) if callee is None else call_in_place_of(op, inputs, callee)


def call_in_place_of(call: Op, inputs: Sequence[popxl.Tensor], graph: popxl.Graph) -> Op:
    """Clone a call in the current graph, with other inputs and another graph: its outputs are as many."""
    operands, attributes = call.kind.arguments(call, inputs)
    name = next(iter(call.kind.graphs))
    return call.kind.record(*operands, results=[t.name for t in call.outputs], **{**attributes, name: graph})
