"""Settings of IPUs without effect: XLA itself decides on layouts, memory and products.

Old programs import these functions from `popxl_addons.transforms.available_memory_proportion`,
`popxl_addons.transforms.use_fc_pass` and `popxl_addons.ops.linear_layout`.
"""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl import Op
from popxl.extend.arguments import integer
from popxl.extend.graphs import reachable
from popxl.extend.ops import like_first

__all__ = [
    "disable_fc_pass",
    "enable_fc_pass",
    "linear_layout",
    "set_available_memory_proportion_by_ipu",
    "set_graph_available_memory_proportion_by_ipu",
]


def set_available_memory_proportion_by_ipu(ir: popxl.Ir, proportions: Iterable[float]) -> None:
    """Set memory proportions per IPU, without effect on numbers or memory.

    Ops that were made with an `available_memory_proportion` have the new one in its place, and printed graphs show it.

    Args:
        ir: the program.
        proportions: proportions for IPU 0, 1, and so on. Ops on further ones have the first.

    Raises:
        KeyError: if there are no proportions.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x = popxl.variable([[1.0]])
        ...     y = popxl.ops.matmul(x, x, available_memory_proportion=0.6)
        >>> set_available_memory_proportion_by_ipu(ir, [0.3])
        >>> y.producer.attributes["available_memory_proportion"]
        0.3
    """
    _set(ir.graphs, proportions)


def set_graph_available_memory_proportion_by_ipu(graph: popxl.Graph, proportions: Iterable[float]) -> None:
    """Set memory proportions for one graph and its callees. See `set_available_memory_proportion_by_ipu`.

    Example:
        >>> ir = popxl.Ir()
        >>> set_graph_available_memory_proportion_by_ipu(ir.main_graph, [0.3, 0.5])
    """
    _set(reachable(graph), proportions)


def _set(graphs: Iterable[popxl.Graph], proportions: Iterable[float]) -> None:
    by_ipu = dict(enumerate(proportions))
    if not by_ipu:
        raise KeyError("set_available_memory_proportion_by_ipu: `proportions` is empty; at least one is needed.")
    for graph in graphs:
        for op in graph.ops:
            _set_op(op, by_ipu.get(op.ipu or 0, by_ipu[0]))


def _set_op(op: Op, proportion: float) -> None:
    if "available_memory_proportion" in op.attributes:
        op.edit(attributes={**op.attributes, "available_memory_proportion": proportion})
    if several := op.attributes.get("available_memory_proportions"):
        op.edit(attributes={**op.attributes, "available_memory_proportions": (proportion,) * len(several)})


def disable_fc_pass(ir: popxl.Ir) -> None:
    """Plan matrix products separately. Without effect: numbers, memory and printed graphs stay the same.

    Example:
        >>> disable_fc_pass(popxl.Ir())
    """


def enable_fc_pass(ir: popxl.Ir) -> None:
    """Plan matrix products together with those of their gradients: the default. Without effect, as `disable_fc_pass`.

    Example:
        >>> enable_fc_pass(popxl.Ir())
    """


_LinearLayout = popxl.OpKind("LinearLayout", lambda t, *, bs: t, shape=like_first, gradient={"t": lambda g: g})


def linear_layout(t: popxl.Tensor, bs: int = 1) -> popxl.Tensor:
    """Copy `t`, for programs requesting layout in pieces of `bs` elements; XLA chooses layouts itself.

    Args:
        t: any tensor.
        bs: a positive integer, without effect.

    Returns:
        A new tensor with the values, shape and dtype of `t`. Gradients pass unchanged.

    Raises:
        TypeError: if `bs` is not an integer.
        ValueError: if it is not positive.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     y = linear_layout(popxl.constant([1.0, 2.0]), bs=2)
        >>> y.shape
        (2,)
    """
    grain = integer(bs, "linear_layout: `bs`")
    if grain < 1:
        raise ValueError(f"linear_layout: `bs` is {grain}; expected the number of elements in a piece, 1 or more.")
    return _LinearLayout(t, bs=grain)
