"""Proportion of memory for intermediate results of ops: a setting of IPUs, which is only recorded here."""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl import Op
from popxl.extend.graphs import reachable

__all__ = ["set_available_memory_proportion_by_ipu", "set_graph_available_memory_proportion_by_ipu"]


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
