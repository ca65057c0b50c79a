"""The gradient rules of one op as a graph, by which `popxl.to_jax` differentiates.

Autodiff applies rules while it walks a graph backwards (`popxl.transforms.op_gradient`). Here they form a small graph
of their own, in an Ir of its own, from operands, results and incoming gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from popxl.context import get_current_context
from popxl.core.recording import Op
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.transforms.op_gradient import Forward, gradients, passes


@dataclass(frozen=True)
class RuleGraph:
    """Gradient rules of one op.

    Attributes:
        graph: graph from the operands, the results, and the gradients of the results in `gradient_outputs`, to the
            gradients of the operands in `wanted`, before they are summed over broadcast dimensions.
        wanted: positions of the operands that have a gradient.
        gradient_outputs: positions of the results with a gradient.
    """

    graph: Graph
    wanted: tuple[int, ...]
    gradient_outputs: tuple[int, ...]


def rule_graph(op: Op) -> RuleGraph:
    """Gradient rule graph of an op with one rule per operand; cached for equivalent ops.

    Example:
        >>> print(rule_graph((x * y).producer).graph)
    """
    places = tuple(map(op.inputs.index, op.inputs))  # one tensor may be two operands
    return op.remembered("rules", lambda: _build_rule_graph(op), places)


def _build_rule_graph(op: Op) -> RuleGraph:
    """See `rule_graph`."""
    ir = Ir()
    graph = ir.create_empty_graph(f"{op.op_type}_bwd")
    given = tuple(k for k, t in enumerate(op.outputs) if t.dtype.is_inexact)
    with get_current_context().isolated(), graph:
        copies = {t: graph.add_input(t.spec, "t") for t in dict.fromkeys((*op.inputs, *op.outputs))}
        arrived = {k: graph.add_input(op.outputs[k].spec, "g") for k in given}
        follows = {t for i, t in enumerate(op.inputs) if passes(op, i) and t.dtype.is_inexact}
        forward = Forward(op, follows, copies.__getitem__, lambda callee: None, copies.__getitem__)
        found = gradients(forward, tuple(arrived.get(k) for k in range(len(op.outputs))))
        for gradient in found.values():
            graph.add_output(gradient)
    return RuleGraph(graph, tuple(found), given)
