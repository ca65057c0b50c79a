"""Recomputation: gradient graphs that run the forward graph again, instead of having its activations kept for them."""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl import ops
from popxl.extend.arguments import check_type
from popxl.extend.graphs import reachable
from popxl.transforms import ExpectedConnectionType, GradGraphInfo
from popxl.transforms.autodiff import make_grad_graph_info
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.utils import suffix_graph_name

__all__ = ["add_recompute_inputs", "recompute_graph"]

_Inputs = dict[popxl.Tensor, tuple[popxl.Tensor, ExpectedConnectionType]]


def recompute_graph(grad_graph: GraphWithNamedArgs) -> GraphWithNamedArgs:
    """A gradient graph that calls the forward graph again, and then `grad_graph`.

    It is used as `grad_graph` is and returns the same, but of the forward pass it only needs the inputs:
    ``grad_graph_info.inputs_dict(info)`` binds no activation, so that none has to be kept.
    Only on CPUs, with the session option `calledGraphs` at ``"inlined"``, XLA keeps them all the same: it sees through
    calls there.

    Its inputs are the gradients and the forward inputs that `grad_graph` expects, in its order; the other forward
    inputs, sorted by name; and the further inputs of `grad_graph`, such as accumulators, sorted by name. `args` holds
    inputs under the same names as before.

    Raises:
        AttributeError: if `grad_graph` is no gradient graph.
        ValueError: if the forward graph uses host streams: to load again is to load something else.

    Example:
        >>> ir = popxl.Ir()
        >>> forward = ir.create_graph(lambda x: ops.exp(x * 2.0), popxl.TensorSpec((), popxl.float32))
        >>> grad = GraphWithNamedArgs(forward).autodiff()
        >>> [t.name for t in grad.graph.inputs], [t.name for t in recompute_graph(grad).graph.inputs]
        (['Gradient___exp_out', 'exp_out'], ['Gradient___exp_out', 'x'])
    """
    check_type(grad_graph, GraphWithNamedArgs, "recompute_graph: `grad_graph`", "a GraphWithNamedArgs of a gradient")
    info, grad = grad_graph.grad_graph_info, grad_graph.graph
    forward = info.forward_graph
    _refuse_streams(forward)
    graph = forward.ir.create_empty_graph(suffix_graph_name(grad.name, "recomp"))
    with graph:
        inputs = add_recompute_inputs(info)
        of = {connection: t for t, connection in inputs.items()}
        bound = {
            t: of[expected.fwd_tensor, expected.connection_type]
            for t, expected in zip(grad.inputs, info.expected_inputs, strict=False)
            if not expected.is_activation
        }
        further = sorted(grad.inputs[len(info.expected_inputs) :], key=lambda t: t.name)
        bound |= {t: popxl.gcg().add_input_like(t, t.by_ref) for t in further}
        site = ops.call_with_info(forward, inputs_dict={t: of[t, ExpectedConnectionType.Fwd] for t in forward.inputs})
        bound |= info.inputs_dict(site)
        for result in ops.call(grad, inputs_dict=bound):
            popxl.graph_output(result)
    recomputed = make_grad_graph_info(forward, graph, inputs.values(), info.outputs)
    # What a named input is bound to: an input of the new graph, unless it is an activation.
    named = {name: bound[t] for name, t in grad_graph.args.to_dict().items() if bound[t] in graph.inputs}
    return GraphWithNamedArgs.from_grad_graph(recomputed, type(grad_graph.args).from_dict(named))


def add_recompute_inputs(grad_info: GradGraphInfo) -> _Inputs:
    """Add inputs to the current graph: what a gradient graph needs if it runs the forward graph again.

    Args:
        grad_info: of the gradient graph that takes activations.

    Returns:
        For each new input, in order, the forward tensor that it stands for, and whether for the tensor or its gradient:
        what `popxl.transforms.autodiff.make_grad_graph_info` takes as `expected_inputs`.

    Example:
        >>> ir = popxl.Ir()
        >>> info = popxl.transforms.autodiff(ir.create_graph(lambda x: x * 2.0, popxl.TensorSpec((), popxl.float32)))
        >>> with ir.create_empty_graph():
        ...     [t.name for t in add_recompute_inputs(info)]
        ['Gradient___mul_out', 'x']
    """
    check_type(grad_info, GradGraphInfo, "add_recompute_inputs: `grad_info`", "what `grad_graph_info` of a graph says")
    forward = grad_info.forward_graph
    Fwd = ExpectedConnectionType.Fwd
    kept = [
        (t, expected.fwd_tensor, expected.connection_type)
        for t, expected in zip(grad_info.graph.inputs, grad_info.expected_inputs, strict=False)
        if not expected.is_activation or expected.fwd_tensor in forward.inputs
    ]
    missing: Iterable[popxl.Tensor] = {*forward.inputs} - {of for _, of, kind in kept if kind is Fwd}
    kept += [(t, t, Fwd) for t in sorted(missing, key=lambda t: t.name)]
    return {popxl.gcg().add_input_like(like): (of, kind) for like, of, kind in kept}


def _refuse_streams(forward: popxl.Graph) -> None:
    for graph in reachable(forward):
        for op in (part for each in graph.ops for part in each.parts):
            if op.kind.exchange == "stream":
                raise ValueError(
                    f"recompute_graph: {forward.title} runs {op!r} ({op.source}), which uses the stream "
                    f"`{op.attributes['stream'].tensor.name}`; run again, it would move on to the next element. Load "
                    "and store where the graph is called."
                )
