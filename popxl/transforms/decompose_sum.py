"""`decompose_sum`: sums of many tensors as additions of two, which need not hold all of them at once."""

from __future__ import annotations

from functools import partial, reduce

from popxl.base.arguments import check_type
from popxl.core.tensor import Tensor
from popxl.graph import Graph
from popxl.ops.elementwise import add, is_sum
from popxl.ops.host import init
from popxl.values.spec import TensorSpec

__all__ = ["decompose_sum"]


def decompose_sum(graph: Graph) -> Graph:
    """Rewrite sums of three or more tensors (`ops.add_n`) as zeros plus one addition per tensor.

    Gradient graphs have such sums, for tensors that are read three times or more. The results stay the same tensors;
    their values may be rounded differently. Graphs that the graph calls stay as they are.

    Returns:
        The same graph, changed.

    Raises:
        TypeError: if `graph` is not a graph.

    Example:
        >>> info = popxl.transforms.autodiff(graph)
        >>> popxl.transforms.decompose_sum(info.graph)
    """
    check_type(graph, Graph, "decompose_sum: `graph`", "a Graph")
    for op in graph.ops:
        if is_sum(op) and len({*op.inputs}) > 2:
            graph.replace([op], partial(_chained_adds, op.outputs[0].spec))
    return graph


def _chained_adds(spec: TensorSpec, *ts: Tensor) -> Tensor:
    return reduce(add, ts, init(**spec, name="sum_init"))
