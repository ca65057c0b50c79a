"""Sibling graphs, which have the same ops but for an attribute or a constant: why calls of them form no loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from popxl.base.group_by import group_by
from popxl.core.recording import Op
from popxl.core.tensor import Constant
from popxl.graph import Graph
from runtime.plan.loop_rerolling.patterns import FEWEST

Function = Callable[[Op], tuple[Any, ...]]


def reasons_of_few(calls: Mapping[Graph, int], function: Function) -> Iterator[tuple[Graph, str | None]]:
    """Reasons why graphs that are called too seldom are in no loop; `None` for one call of a graph without siblings.

    Args:
        calls: number of equal calls of each graph.
        function: what an op computes, as `StructuralEncoder.function`.
    """
    for siblings in group_by(calls, lambda graph: tuple(op.kind for op in graph.ops)).values():
        could_repeat = sum(calls[graph] for graph in siblings) >= FEWEST
        for i, graph in enumerate(siblings):
            if calls[graph] >= FEWEST:
                continue
            difference = _difference(graph, siblings[i - 1], function) if could_repeat else ""
            few = f"{calls[graph]} call(s) of it look alike, and a loop has {FEWEST} turns or more"
            yield graph, difference or (few if could_repeat or calls[graph] > 1 else None)


def _difference(graph: Graph, sibling: Graph, function: Function) -> str:
    """First difference between two graphs with ops of the same kinds; "" if there is none."""
    for op, other in zip(graph.ops, sibling.ops, strict=False):
        for callees in zip(op.called_graphs, other.called_graphs, strict=False):
            if difference := _difference(*callees, function):
                return difference
        if what := _differing_part(op, other, function):
            return f"its `{op.op_type}` ({op.source}) has {what} than that of {sibling.name}"
    return ""


def _differing_part(op: Op, other: Op, function: Function) -> str:
    """Description of what differs between two ops of one kind: specs, a constant or an attribute; "" if nothing."""
    tensors, others = (each.inputs + each.outputs for each in (op, other))
    if [t.spec.to_tuple() for t in tensors] != [t.spec.to_tuple() for t in others]:
        return "other shapes or data types"
    for t, u in zip(tensors, others, strict=True):
        if isinstance(t, Constant) and isinstance(u, Constant) and not np.array_equal(t.data, u.data):
            return "another constant"
    (_, _, attributes), (_, _, other_attributes) = function(op), function(other)
    for (name, key), pair in zip(attributes, other_attributes, strict=False):
        if (name, key) != pair and name not in op.kind.graphs:
            return f"another `{name}`"
    return ""
