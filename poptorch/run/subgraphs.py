"""Subgraphs between graph breaks: their contents, and identifiers of values that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from poptorch.base.leaves import Structure
from poptorch.capture.graph_breaks import GraphBreak
from poptorch.capture.model import Captured
from poptorch.capture.trace import Node, Trace, Value, external_inputs
from poptorch.run.compiled import Compiled

ValueId = tuple[Any, ...]
"""Origin of a value: an argument, a parameter or buffer, an op by its number, a graph break."""


@dataclass(frozen=True)
class ExecutionPath:
    """A model capture along a single execution path, determined by host results at graph breaks.

    Attributes:
        captured: the model.
        structure: structure of the model's result.
        breaks: graph breaks of the path.
    """

    captured: Captured
    structure: Structure
    breaks: Sequence[GraphBreak]


class IdentifiedPath:
    """An execution path, with identifiers of its values. Paths share the identifiers of values that they share.

    Args:
        host_buffers: buffers that are inputs of programs, instead of their state.

    Attributes:
        captured, structure, breaks: those of the path.
        values: its values by identifier.
    """

    def __init__(self, path: ExecutionPath, host_buffers: Container[str] = ()) -> None:
        self.captured, self.structure, self.breaks = path.captured, path.structure, path.breaks
        self.values: dict[ValueId, Value] = {("input", i): value for i, value in enumerate(self.captured.inputs)}
        for name, value in self.captured.state.items():
            self.values["host buffer" if name in host_buffers else "state", name] = value
        for i, graph_break in enumerate(self.breaks):
            self.values |= {("graph break", i, j): value for j, value in enumerate(graph_break.results)}
        for i, node in enumerate(self.captured.trace.nodes):
            self.values |= {("op", i, j): value for j, value in enumerate(node.results)}
        self._ids: dict[int, ValueId] = {}
        for value_id, value in self.values.items():
            self._ids.setdefault(id(value), value_id)

    def id_of(self, value: Value) -> ValueId:
        """Identifier of a value."""
        return self._ids[id(value)]

    def ids_of(self, values: Iterable[Value]) -> list[ValueId]:
        """Identifiers of values."""
        return [self.id_of(value) for value in values]

    def values_of(self, ids: Iterable[ValueId]) -> list[Value]:
        """Values with given identifiers."""
        return [self.values[value_id] for value_id in ids]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Start and end op indices of each subgraph."""
        inner = [graph_break.position for graph_break in self.breaks]
        return list(zip([0, *inner], [*inner, len(self.captured.trace.nodes)], strict=True))

    @property
    def outputs(self) -> list[Value]:
        """Model outputs, and final values of overwritten arguments."""
        return [*self.captured.trace.outputs, *self.captured.written_inputs.values()]


@dataclass(frozen=True)
class Content:
    """Ops, inputs and outputs of a subgraph between two graph breaks.

    Attributes:
        nodes: ops of the subgraph.
        inputs, outputs: values from earlier subgraphs, and values for later ones.
    """

    nodes: list[Node]
    inputs: list[ValueId]
    outputs: list[ValueId]


@dataclass(eq=False)
class Subgraph:
    """A subgraph between two graph breaks.

    Attributes:
        content: contents of the program; `None` if unknown.
        ops: names of the ops of `forward` in it.
        make: function that makes the program; `None` if it is made, or there is nothing to do.
        compiled: the program.
        graph_break: host operation after it; `None` at the end.
        operands: operands of the host operation.
        branches: subgraphs that follow, by key.
        path: execution path that ends here, if one does.
        last_run: number of the run that last used it.
    """

    content: Content | None = None
    ops: list[str] = field(default_factory=list)
    make: Callable[[], Compiled] | None = None
    compiled: Compiled | None = None
    graph_break: GraphBreak | None = None
    operands: list[ValueId] = field(default_factory=list)
    branches: dict[tuple[Any, ...], Subgraph] = field(default_factory=dict)
    path: IdentifiedPath | None = None
    last_run: int = 0

    def program(self) -> Compiled | None:
        """The program, compiled on first use; `None` if there is nothing to do."""
        if self.make is not None:
            self.compiled = self.make()
            self.make = None
        return self.compiled

    def descendants(self) -> Iterator[Subgraph]:
        """Iterate over this node and its descendants. Chains may contain a thousand nodes."""
        waiting = [self]
        while waiting:
            subgraph = waiting.pop()
            yield subgraph
            waiting += reversed(subgraph.branches.values())


@dataclass(frozen=True)
class Call:
    """Model call in progress.

    Attributes:
        tensors, objects: arguments; see `Compiled.run`.
        values: values that are known so far, by identifier.
    """

    tensors: Sequence[torch.Tensor]
    objects: Sequence[Any]
    values: dict[ValueId, torch.Tensor]

    def select(self, ids: Iterable[ValueId]) -> list[torch.Tensor]:
        """Select known values, contiguous as programs require."""
        return [self.values[value_id].detach().contiguous() for value_id in ids]


def is_constant(node: Node) -> bool:
    """Whether an op is side-effect-free and produces identical results in every run."""
    return node.buffers == frozenset() and not node.has_effect


def partition(
    path: IdentifiedPath, before: Sequence[Content | None], needed: set[Value], with_effects: bool = True
) -> list[Content]:
    """Partition a path's ops into the contents of its first subgraphs, each computing only values not computed earlier.

    Each subgraph recomputes run-invariant values itself.

    Args:
        before: previous content of each subgraph, whose outputs remain.
        needed: values that are needed after the last of them.
        with_effects: whether to keep unused ops that have effects.
    """
    trace, bounds = path.captured.trace, path.bounds
    order = {value_id: i for i, value_id in enumerate(path.values)}
    constants = {id(node) for node in trace.nodes if is_constant(node)}
    contents: list[Content] = []
    for i in reversed(range(len(before))):
        if i < len(path.breaks):
            needed = needed | set(path.breaks[i].operands)
        begin, end = bounds[i]
        ops = [node for node in trace.nodes[:begin] if id(node) in constants] + trace.nodes[begin:end]
        here = {id(value) for node in ops for value in node.results}
        here |= {id(value) for value in needed if path.id_of(value)[0] == "state"}
        outputs = {path.id_of(value) for value in needed if id(value) in here}
        if (previous := before[i]) is not None:
            outputs |= set(previous.outputs)
        ordered = sorted(outputs, key=order.__getitem__)
        nodes = Trace(nodes=ops).without_unused(path.values_of(ordered), with_effects)
        inputs = [value for value in external_inputs(nodes) if path.id_of(value)[0] != "state"]
        needed = {value for value in needed if id(value) not in here} | set(inputs)
        contents.append(Content(nodes, path.ids_of(inputs), ordered))
    return contents[::-1]
