"""Gradient information as plain data: the forward tensor of each input and output of a gradient graph.

Gradient graphs are made elsewhere: by the transform in `transforms.autodiff`, by hand in `build_grad`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import popxl
from popxl.extend.arguments import check_type
from popxl.extend.source import SourceLocation, user_frame
from popxl.transforms import ExpectedConnectionType, GradGraphInfo
from popxl.transforms.autodiff import make_grad_graph_info

if TYPE_CHECKING:
    from popxl_addons.graph_common import (
        CalledGraphsGradInfoLike,
        GradGraphInfoLike,
        GraphLike,
    )


def as_graph(graph: GraphLike) -> popxl.Graph:
    """Unwrap a `popxl.Graph`. Raises `TypeError` for other objects."""
    found = graph if isinstance(graph, popxl.Graph) else getattr(graph, "graph", None)
    if not isinstance(found, popxl.Graph):
        raise TypeError(
            f"Expected a graph, such as `Module.create_graph` returns second, or a popxl.Graph; got {graph!r:.200} "
            f"({type(graph).__name__})."
        )
    return found


def as_grad_graph_info(info: GradGraphInfoLike) -> GradGraphInfo:
    """Unwrap a `GradGraphInfo` or its gradient graph. `TypeError` for other objects."""
    found = info if isinstance(info, GradGraphInfo) else getattr(info, "grad_graph_info", None)
    if not isinstance(found, GradGraphInfo):
        raise TypeError(
            f"Expected a gradient graph, such as `graph.autodiff()` returns, or its `grad_graph_info`; got "
            f"{info!r:.200} ({type(info).__name__})."
        )
    return found


def activation_inputs(info: GradGraphInfo) -> dict[popxl.Tensor, popxl.Tensor]:
    """Inputs of a gradient graph that take activations, with the forward tensors whose values these are."""
    return _inputs_for(info, ExpectedConnectionType.Fwd)


def gradient_inputs(info: GradGraphInfo) -> dict[popxl.Tensor, popxl.Tensor]:
    """Inputs of a gradient graph that take gradients, with the forward tensors whose gradients these are."""
    return _inputs_for(info, ExpectedConnectionType.FwdGrad)


def _inputs_for(info: GradGraphInfo, kind: ExpectedConnectionType) -> dict[popxl.Tensor, popxl.Tensor]:
    connections = zip(info.graph.inputs, info.expected_inputs, strict=False)  # further inputs come last
    return {t: connection.fwd_tensor for t, connection in connections if connection.connection_type is kind}


def merge_called_graphs(*infos: CalledGraphsGradInfoLike | None) -> dict[popxl.Graph, GradGraphInfo]:
    """One mapping of several, in popxl's own types. Later entries win."""
    given = [info for info in infos if info is not None]
    for info in given:
        check_type(info, Mapping, "`called_graphs_grad_info`", "a mapping from graphs to gradient graphs")
    return {as_graph(graph): as_grad_graph_info(grad) for info in given for graph, grad in info.items()}


def remap_grad_info(grad_info: GradGraphInfoLike, forward_graph: GraphLike, backward_graph: GraphLike) -> GradGraphInfo:
    """Connections of `grad_info` for another forward graph with equal input and output positions.

    `KeyError` if a connection has no counterpart in `forward_graph`.

    Example:
        >>> ir = popxl.Ir()
        >>> f, g = (ir.create_graph(lambda x: x + x, popxl.TensorSpec((), popxl.float32)) for _ in range(2))
        >>> info = popxl.transforms.autodiff(f)
        >>> remap_grad_info(info, g, info.graph).outputs == g.inputs
        True
    """
    info, forward = as_grad_graph_info(grad_info), as_graph(forward_graph)
    old = info.forward_graph
    counterpart = dict(zip(old.outputs, forward.outputs, strict=False))
    counterpart.update(zip(old.inputs, forward.inputs, strict=False))
    if missing := [tensor.name for tensor in (*info.inputs, *info.outputs) if tensor not in counterpart]:
        raise KeyError(
            f"remap_grad_info: `{forward.name}` has no input or output in the place of {missing} of `{old.name}`."
        )
    return make_grad_graph_info(
        forward,
        as_graph(backward_graph),
        [(counterpart[expected.fwd_tensor], expected.connection_type) for expected in info.expected_inputs],
        [counterpart[expected.fwd_tensor] for expected in info.expected_outputs],
    )


class CalledGraphs:
    """The gradient graphs known for the graphs that a module calls, with those that its submodules know (a live link).

    A transform needs them where a called graph cannot be, or should not be, differentiated on the way.
    """

    def __init__(self) -> None:
        self._by_graph: dict[popxl.Graph, GradGraphInfo] = {}
        self._submaps: list[CalledGraphs | CalledGraphsGradInfoLike] = []

    def add(self, fwd_graph: GraphLike, grad_graph: GradGraphInfoLike) -> None:
        """Use `grad_graph` as gradient of `fwd_graph`. Unused gradients raise an `UnusedGradientWarning`."""
        graph = as_graph(fwd_graph)
        self._by_graph[graph] = as_grad_graph_info(grad_graph)
        graph.gradient_given_at = SourceLocation.of(user_frame())

    def add_submap(self, mapping: CalledGraphs | CalledGraphsGradInfoLike) -> None:
        """Include what `mapping` holds whenever `consolidate` is called."""
        self._submaps.append(mapping)

    def consolidate(self) -> dict[popxl.Graph, GradGraphInfo]:
        """Everything known, as one dictionary. Own entries win over those of submodules."""
        submaps = (sub.consolidate() if isinstance(sub, CalledGraphs) else sub for sub in self._submaps)
        return merge_called_graphs(*submaps, self._by_graph)


def create_grad_graph_info(
    ir: popxl.Ir,
    fwd_graph: GraphLike,
    grad_graph: GraphLike,
    grad_input_to_fwd_output: Mapping[popxl.Tensor, popxl.Tensor],
    grad_output_to_fwd_input: Mapping[popxl.Tensor, popxl.Tensor],
    fwd_tensors: Collection[popxl.Tensor],
) -> GradGraphInfo:
    """Declare `grad_graph` as gradient graph of `fwd_graph`, with mappings in list order.

    A grad graph input that stands for one of the `fwd_tensors` takes that tensor's value, any other input the
    gradient of its forward tensor.

    Example:
        >>> ir = popxl.Ir()
        >>> double = ir.create_graph(lambda x: x * 2.0, popxl.TensorSpec((3,), popxl.float32))
        >>> back = ir.create_graph(lambda dy: dy * 2.0, popxl.TensorSpec((3,), popxl.float32))
        >>> dy, dx, x, y = *back.inputs, *back.outputs, *double.inputs, *double.outputs
        >>> create_grad_graph_info(ir, double, back, {dy: y}, {dx: x}, []).expected_outputs[0].fwd_tensor == x
        True
    """
    fwd, grad = as_graph(fwd_graph), as_graph(grad_graph)
    if fwd.ir != ir or grad.ir != ir:
        raise ValueError(f"create_grad_graph_info: `{fwd.name}` and `{grad.name}` must both be graphs of `ir`, {ir}.")
    Fwd, FwdGrad = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
    return make_grad_graph_info(
        fwd,
        grad,
        [(tensor, Fwd if tensor in fwd_tensors else FwdGrad) for tensor in grad_input_to_fwd_output.values()],
        list(grad_output_to_fwd_input.values()),
    )
