"""Routing: makes a tensor of a calling graph usable deep inside, by an input of every graph in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import popxl
from popxl import Op
from popxl.extend.arguments import check_type
from popxl.extend.graphs import EXTRA_INPUTS, call_kind, loop_kind, reachable

__all__ = ["is_subgraph", "route_tensor_into_graph"]

_OWN_INPUTS = {call_kind: 0, loop_kind: EXTRA_INPUTS}
"""Ops that route tensors, with the number of graph inputs that each binds itself."""

_routed: WeakKeyDictionary[popxl.Graph, dict[popxl.Tensor, popxl.Tensor]] = WeakKeyDictionary()
"""Inputs added to each graph, by the routed tensors."""


def route_tensor_into_graph(
    tensor: popxl.Tensor, graph: popxl.Graph | None = None, modified: bool | Iterable[Any] = False
) -> popxl.Tensor:
    """Tensor of an outer graph, routed into `graph` as an input.

    Every graph between the two gains one input, named like the tensor, and each call of these graphs binds it, for any
    number of calls and paths. A loop passes the tensor to each iteration unchanged. Routing the same tensor again
    returns the same input. A graph in between without callers gains the input too; its later calls have to bind it, as
    do later calls of the others.

    Args:
        tensor: a tensor of a graph that calls `graph`, directly or through others.
        graph: graph to use it in; by default the current graph.
        modified: whether in-place changes inside also change `tensor`. Instead of true, some regions of it may be
            given; all of it is meant.

    Returns:
        The input of `graph`; `tensor` itself if that is in `graph`.

    Raises:
        ValueError: if no graph that runs `graph` has the tensor, if the main graph, which cannot have inputs, would
            need one, or if a call cannot take it: because it comes before the tensor is made, lacks an input already,
            or (with `modified`) writes another input back to the same tensor.
        RuntimeError: if an op on the way is neither a call nor a loop.

    Example:
        >>> ir = popxl.Ir()
        >>> inner = ir.create_empty_graph("inner")
        >>> with ir.main_graph:
        ...     v = popxl.variable([1.0, 2.0], name="v")
        ...     _ = popxl.ops.call(inner), popxl.ops.call(inner)
        >>> with inner:
        ...     y = route_tensor_into_graph(v) * 2.0
        >>> inner.inputs
        (Tensor[inner_subgraph(0)/v popxl.dtypes.float32 (2,)],)
    """
    graph = popxl.gcg() if graph is None else graph
    check_type(tensor, popxl.Tensor, "route_tensor_into_graph: `tensor`", "a tensor")
    check_type(graph, popxl.Graph, "route_tensor_into_graph: `graph`", "a popxl.Graph")
    check_type(modified, bool | Iterable, "route_tensor_into_graph: `modified`", "a bool, or the reasons for it")
    changes = modified if isinstance(modified, bool) else any(True for _ in modified)
    if tensor.graph is graph:
        return tensor
    between = _callers_first(graph, tensor.graph)
    _check(tensor, graph, between, changes)
    local = {tensor.graph: tensor}
    for current in between:
        routed = _routed.setdefault(current, {})
        if tensor not in routed:
            routed[tensor] = current.add_input_like(tensor)
        local[current] = routed[tensor]
        local[current].by_ref |= changes
        for op in current.call_sites:
            position = current.inputs.index(local[current]) - _OWN_INPUTS[op.kind]
            if position == len(op.inputs):
                op.gain_input(local[op.graph])
            if changes:
                op.edit(modified=op.modified | {position})
    return local[graph]


def is_subgraph(parent: popxl.Graph, subgraph: popxl.Graph) -> bool:
    """Whether `parent` equals `subgraph` or calls it, directly or transitively.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     _ = popxl.ops.call(inner := ir.create_empty_graph())
        >>> is_subgraph(ir.main_graph, inner), is_subgraph(inner, ir.main_graph)
        (True, False)
    """
    for name, graph in (("parent", parent), ("subgraph", subgraph)):
        check_type(graph, popxl.Graph, f"is_subgraph: `{name}`", "a popxl.Graph")
    return subgraph in reachable(parent)


def _callers_first(graph: popxl.Graph, home: popxl.Graph) -> list[popxl.Graph]:
    """Direct and indirect callers of `graph`, callers first, `graph` last; excludes `home`."""
    ordered: dict[popxl.Graph, None] = {}
    waiting = [(graph, False)]
    while waiting:
        current, after_its_callers = waiting.pop()
        if after_its_callers:
            ordered[current] = None
        elif current not in ordered and current is not home:
            waiting.append((current, True))
            waiting += [(op.graph, False) for op in current.call_sites]
    return list(ordered)


def _check(tensor: popxl.Tensor, graph: popxl.Graph, between: list[popxl.Graph], changes: bool) -> None:
    """Raise errors of `route_tensor_into_graph` before any change."""
    home = tensor.graph
    sites = [(op, called) for called in between for op in called.call_sites]
    if not any(op.graph is home for op, _ in sites):
        raise ValueError(
            f"route_tensor_into_graph: {tensor!r} is not in the graph asked for, {graph.title}, and is not in a "
            f"known parent graph of it: {home.title} does not run {graph.title}. Call the graph first, or give it an "
            "input."
        )
    if graph.main_graph in between:
        raise ValueError(
            f"route_tensor_into_graph: {tensor!r} is in {home.title}, but the main graph runs {graph.title} without "
            "it, and cannot have an input for it. Route a tensor of the main graph instead."
        )
    for op, called in sites:
        site = f"{op!r} ({op.source}) in {op.graph.title}, which runs {called.title}"
        if op.kind not in _OWN_INPUTS:
            raise RuntimeError(
                f"route_tensor_into_graph: {tensor!r} cannot be routed through {site}. Only calls and loops can gain "
                "an input; pass the tensor as an input when the op is created."
            )
        if len(op.inputs) + _OWN_INPUTS[op.kind] < len(called.inputs):
            raise ValueError(f"route_tensor_into_graph: an input that the graph has already is not bound by {site}.")
        if op.graph is home:
            _check_site(tensor, op, site, _position(tensor, op, called), changes)


def _check_site(tensor: popxl.Tensor, op: Op, site: str, position: int | None, changes: bool) -> None:
    producer = tensor.producer
    if producer is not None and op.graph.ops.index(op) < op.graph.ops.index(producer):
        raise ValueError(f"route_tensor_into_graph: {tensor!r} is made after {site}.")
    if changes and any(op.inputs[i] is tensor for i in op.modified - {position}):
        raise ValueError(
            f"route_tensor_into_graph: {tensor!r} is written back by {site}, from another input. Use that input."
        )


def _position(tensor: popxl.Tensor, op: Op, graph: popxl.Graph) -> int | None:
    """Op input position for a routed tensor's graph input, if bound."""
    routed = _routed.get(graph, {}).get(tensor)
    return None if routed is None else graph.inputs.index(routed) - _OWN_INPUTS[op.kind]
