"""Gradient graphs made by popxl's transform, with names. Hand-written ones are in `popxl_addons.build_grad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import popxl
from popxl.transforms.autodiff import GradGraphInfo, make_grad_graph_info
from popxl_addons.grad_info import as_grad_graph_info, as_graph
from popxl_addons.graph import GraphWithNamedArgs

if TYPE_CHECKING:
    from popxl_addons.graph_common import CalledGraphsGradInfoLike, GradGraphInfoLike, GraphLike


def autodiff(
    graph: GraphWithNamedArgs | popxl.Graph,
    grads_provided: Iterable[popxl.Tensor] | None = None,
    grads_required: Iterable[popxl.Tensor] | None = None,
    called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
) -> GraphWithNamedArgs:
    """The gradient graph of `graph`, made by the transform even if its module has a `build_grad`.

    Its first inputs are the gradients of `grads_provided` (default: all outputs), its outputs those of
    `grads_required` (default: all inputs), in these orders. The further inputs are forward values, found for a call
    of the forward graph with ``grad.grad_graph_info.inputs_dict(info)``; those that were neither inputs nor outputs
    of `graph` are now outputs of it, so take results as ``y, *_ = info.outputs``.

    `called_graphs_grad_info` says which gradient graphs to use for the graphs that `graph` calls; its entries win over
    those that `graph` brings along. Errors are those of `popxl.transforms.autodiff`.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x = popxl.variable([1.0, 2.0], name="x")
        ...     square = GraphWithNamedArgs(ir.create_graph(lambda x: x * x, x))
        ...     grad = autodiff(square)
        ...     info = square.call_with_info(x)
        ...     dy = popxl.constant([1.0, 1.0])
        ...     (dx,) = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
        >>> dx.shape
        (2,)
    """
    named = graph if isinstance(graph, GraphWithNamedArgs) else GraphWithNamedArgs(graph)
    return named.differentiate(grads_provided, grads_required, called_graphs_grad_info)


def remap_grad_info(grad_info: GradGraphInfoLike, forward_graph: GraphLike, backward_graph: GraphLike) -> GradGraphInfo:
    """The connections of `grad_info`, for another forward graph with its inputs and outputs at the same positions.

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
