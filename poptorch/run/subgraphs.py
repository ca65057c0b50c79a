"""Subgraphs between graph breaks: their contents, and identifiers of values that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from poptorch.base.leaves import Structure
from poptorch.capture.graph_breaks import GraphBreak
from poptorch.capture.model import Captured
from poptorch.capture.trace import Node, Value
from poptorch.run.compiled import Compiled

ValueId = tuple[Any, ...]
"""Where a value comes from: an argument, a parameter or buffer, an op by its number, what was made at a graph break."""


@dataclass(frozen=True)
class ExecutionPath:
    """A model capture along a single execution path, determined by host results at graph breaks.

    Attributes:
        captured: the model.
        answer: structure of the model's result.
        breaks: graph breaks of the path.
    """

    captured: Captured
    answer: Structure
    breaks: Sequence[GraphBreak]


@dataclass(frozen=True)
class Content:
    """Ops, inputs and outputs of a subgraph between two graph breaks.

    Attributes:
        nodes: ops of the subgraph.
        given, wanted: values from earlier subgraphs, and values for later ones.
    """

    nodes: list[Node]
    given: list[ValueId]
    wanted: list[ValueId]

    def select_inputs(self, known: Mapping[ValueId, torch.Tensor]) -> list[torch.Tensor]:
        """Select subgraph inputs from known values, contiguous as programs require."""
        return [known[place].detach().contiguous() for place in self.given]


@dataclass(eq=False)
class Subgraph:
    """A subgraph between two graph breaks.

    Attributes:
        content: contents of the program; `None` if unknown.
        ops: names of the ops of `forward` in it.
        make: function that makes the program; `None` if it is made, or there is nothing to do.
        compiled: the program.
        graph_break: host operation after it, with its operands; `None` at the end.
        after: subgraphs that follow, by key.
        path: execution path that ends here, if one does.
        used: number of the run that last used it.
    """

    content: Content | None = None
    ops: list[str] = field(default_factory=list)
    make: Callable[[], Compiled] | None = None
    compiled: Compiled | None = None
    graph_break: GraphBreak | None = None
    asked: list[ValueId] = field(default_factory=list)
    after: dict[tuple[Any, ...], Subgraph] = field(default_factory=dict)
    path: ExecutionPath | None = None
    used: int = 0

    def descendants(self) -> Iterator[Subgraph]:
        """Iterate over this node and its descendants. Chains may contain a thousand nodes."""
        waiting = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting += reversed(part.after.values())


class ValueIds:
    """Maps values of an execution path to stable identifiers.

    Args:
        held: buffers that are inputs of programs, instead of their state.
    """

    def __init__(self, path: ExecutionPath, held: Container[str] = ()) -> None:
        captured = path.captured
        self.value: dict[ValueId, Value] = {("input", i): value for i, value in enumerate(captured.inputs)}
        self.value |= {("held", name): value for name, value in captured.state.items() if name in held}
        self.state = {("state", name): value for name, value in captured.state.items() if name not in held}
        self.value |= self.state
        for i, graph_break in enumerate(path.breaks):
            self.value |= {("graph_break", i, j): value for j, value in enumerate(graph_break.made)}
        for i, node in enumerate(captured.trace.nodes):
            self.value |= {("op", i, j): value for j, value in enumerate(node.results)}
        self._of: dict[int, ValueId] = {}
        for place, value in self.value.items():
            self._of.setdefault(id(value), place)

    def __getitem__(self, value: Value) -> ValueId:
        return self._of[id(value)]


def is_constant(node: Node) -> bool:
    """Whether an op is side-effect-free and produces identical results in every run."""
    return node.made_of == frozenset() and not node.has_effect


def segment_bounds(path: ExecutionPath) -> tuple[list[int], list[int]]:
    """Start and end op indices of each subgraph."""
    inner = [graph_break.at for graph_break in path.breaks]
    return [0, *inner], [*inner, len(path.captured.trace.nodes)]


def segment_ops(path: ExecutionPath) -> list[list[str]]:
    names = [node.op for node in path.captured.trace.nodes]
    return [names[begin:end] for begin, end in zip(*segment_bounds(path), strict=True)]


def outputs_of(path: ExecutionPath) -> list[Value]:
    """Model outputs, and final values of overwritten arguments."""
    return [*path.captured.trace.outputs, *path.captured.written_inputs.values()]
