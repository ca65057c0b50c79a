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


Replacement = Callable[[Mapping[popxl.Tensor, popxl.Tensor]], popxl.Tensor]
"""Function that makes the result of an op in a copy, from the copy's tensors by those of the original."""


def copy_graph(
    graph: popxl.Graph,
    transfers: Transfers | None = None,
    into: popxl.Graph | None = None,
    given: Mapping[popxl.Tensor, popxl.Tensor] = MappingProxyType({}),
    callees: Mapping[Op, popxl.Graph] = MappingProxyType({}),
    instead: Mapping[Op, Replacement] = MappingProxyType({}),
) -> tuple[popxl.Graph, dict[popxl.Tensor, popxl.Tensor]]:
    """Copy of a graph: equal ops, devices, names and source lines.

    It calls the graphs that `graph` calls, unless `callees` has others.

    Args:
        transfers: transfers to add; by default none.
        into: a graph without ops that becomes the copy; by default a new one.
        given: inputs of `into`, by the inputs of `graph` that they stand for. The others are added.
        callees: other graphs for calls, with inputs and outputs in the same places.
        instead: for ops of one result that the copy lacks, functions that make it. They fetch nothing.

    Returns:
        The copy, and its tensors by those of `graph`: for an offloaded tensor, the one that is returned in its place.
    """
    transfers = transfers or Transfers()
    copy = into or graph.ir.create_empty_graph(graph.name.partition("_subgraph")[0])
    context = get_current_context()
    with copy, popxl.in_sequence(False), context.set(scope_prefix=""):
        twins = _Twins(graph, copy, transfers, given)
        for op in graph.ops:
            with context.set(ipu_id=op.ipu, io_tile_set=op.io_tiles, debug_record=op.debug_record):
                twins.add(op, callees.get(op), instead.get(op))
        copy.show_as({twin: t.path for t, twin in twins.of.items()})
        of = twins.of | twins.offloaded
        for t in graph.outputs:
            popxl.graph_output(of[t])
    return copy, of


class _Twins:
    """Tensors of a copy, the current graph, by those of its original.

    Attributes:
        of: tensors of the copy; fetched ones of the current period.
        offloaded: tensors that the copy returns in place of offloaded ones.
    """

    def __init__(
        self, graph: popxl.Graph, copy: popxl.Graph, transfers: Transfers, given: Mapping[popxl.Tensor, popxl.Tensor]
    ) -> None:
        self._transfers = transfers
        self.of = dict(given)
        missing = [t for t in graph.inputs if t not in transfers.fetched and t not in given]
        self.of.update((t, copy.add_input_like(t, t.by_ref)) for t in missing)
        self.of.update((t, popxl.constant(t.data, t.dtype, t.name)) for t in graph.tensors if isinstance(t, Constant))
        self.offloaded: dict[popxl.Tensor, popxl.Tensor] = {}
        self._offload(t for t in graph.inputs if t in self.of)
        self._ids: dict[int, int] = {}
        self._latest: popxl.Tensor | None = None  # the last tensor of floats that an op has made
        self._period: Hashable = None

    def add(self, op: Op, callee: popxl.Graph | None, instead: Replacement | None) -> None:
        """Add the copy of an op: of a call, with another graph if `callee` is given; or what `instead` makes."""
        self._begin(self._transfers.period(op))
        if instead is None:
            self._fetch(op)
            inputs = [self.of[t] for t in op.inputs]
            twin = op.clone(inputs) if callee is None else call_in_place_of(op, inputs, callee)
        else:
            twin = instead(self.of).producer  # type: ignore[assignment]
        self.of.update(zip(op.outputs, twin.outputs, strict=True))
        self._offload(op.outputs)
        self._latest = next((t for t in twin.outputs if t.dtype.is_floating_point), self._latest)
        after = tuple(self._ids[id] for id in op.after if id in self._ids)
        twin.edit(modified=op.modified, name=op.name, after=after)
        self._ids[op.id] = twin.id

    def _begin(self, period: Hashable) -> None:
        """Forget the fetched tensors of another period."""
        if period != self._period:
            self._period = period
            for t in self._transfers.fetched:
                self.of.pop(t, None)

    def _fetch(self, op: Op) -> None:
        """Fetch the inputs that an op reads and that are absent, with those of their groups."""
        fetched = self._transfers.fetched
        absent = [t for t in op.inputs if t in fetched and t not in self.of]
        for t in dict.fromkeys(each for needed in absent for each in self._transfers.fetch_group(op, needed)):
            if t not in self.of:
                self.of[t] = fetched[t](self._latest)

    def _offload(self, made: Iterable[popxl.Tensor]) -> None:
        """Offload tensors that are to be offloaded."""
        offload = self._transfers.offloaded
        self.offloaded.update((t, offload[t](self.of[t])) for t in made if t in offload)


def call_in_place_of(call: Op, inputs: Sequence[popxl.Tensor], graph: popxl.Graph) -> Op:
    """Clone a call in the current graph, with other inputs and another graph: its outputs are as many."""
    operands, attributes = call.kind.arguments(call, inputs)
    name = next(iter(call.kind.graphs))
    return call.kind.record(*operands, results=[t.name for t in call.outputs], **{**attributes, name: graph})
