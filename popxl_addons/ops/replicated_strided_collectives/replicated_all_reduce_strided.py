"""Differentiable all-reduces of sums and means; and one graph that reduces all tensors of a tree."""

from __future__ import annotations

import popxl
from popxl.replica_grouping import Groups
from popxl_addons import _io_tiles
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops._all_reduce import all_reduces
from popxl_addons.rts import graph_over

__all__ = [
    "replicated_all_reduce_strided",
    "replicated_all_reduce_strided_graph",
    "replicated_all_reduce_strided_identical_grad_inputs",
    "replicated_all_reduce_strided_identical_inputs",
]

SUMS_AND_MEANS = {"add": "add", "mean": "mean", "mul": "mean"}
"""Reductions of the strided collectives. `"mul"` is a mean, by tradition."""

_all_reduce = all_reduces("ReplicatedAllReduceStrided", SUMS_AND_MEANS)


def replicated_all_reduce_strided(t: popxl.Tensor, op: str = "add", group: Groups | None = None) -> popxl.Tensor:
    """Sum or average `t` over each replica group, with equal results on all members.

    The gradient is reduced in the same way.

    Args:
        t: tensor of any shape.
        op: ``"add"`` or ``"mean"``. ``"mul"`` is a mean too, not a product.
        group: the replicas that communicate; all of them by default. Their stride may be any.

    Returns:
        A new tensor of the same shape and dtype. Float16 is summed in float32 and rounded once; the mean of integers is
        rounded towards zero.

    Raises:
        ValueError: for an unknown `op`, or if the replicas of the Ir cannot be grouped like this.
        PopxlError: for an unsupported `op`.

    Example:
        Replica `r` of four holds ``[r, 10 * r]``; replicas 0 and 2 get ``[2, 20]``, 1 and 3 ``[4, 40]``.

        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     each = ir.replica_grouping(group_size=1)
        ...     x = popxl.variable([[0, 0], [1, 10], [2, 20], [3, 30]], popxl.float32, "x", replica_grouping=each)
        ...     y = replicated_all_reduce_strided(x, group=ir.replica_grouping(stride=2, group_size=2))
        >>> y.shape
        (2,)
    """
    return _all_reduce("replicated_all_reduce_strided", t, op, group)


def replicated_all_reduce_strided_identical_inputs(
    t: popxl.Tensor, op: str = "add", group: Groups | None = None
) -> popxl.Tensor:
    """Pass through `t`, promised equal on all group members; reduce its gradients.

    As `popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_identical_inputs`, for sums and means. Args,
    results and errors are those of `replicated_all_reduce_strided`.
    """
    return _all_reduce("replicated_all_reduce_strided_identical_inputs", t, op, group, "inputs")


def replicated_all_reduce_strided_identical_grad_inputs(
    t: popxl.Tensor, op: str = "add", group: Groups | None = None
) -> popxl.Tensor:
    """`replicated_all_reduce_strided` with result gradients equal on all members, passed through.

    As `popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_identical_grad_inputs`, for sums and means; a
    gradient made by `popxl.transforms.autodiff` needs `popxl_addons.patterns.apply_pre_alias_patterns` here too. Args,
    results and errors are those of `replicated_all_reduce_strided`.
    """
    return _all_reduce("replicated_all_reduce_strided_identical_grad_inputs", t, op, group, "gradients")


def replicated_all_reduce_strided_graph(
    tensors: NamedTensors,
    op: str = "add",
    group: Groups | None = None,
    use_io_tiles: bool = False,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Build a graph that applies `replicated_all_reduce_strided` to several named tensors.

    Args:
        tensors: tensors to reduce.
        op, group: reduction, and groups of replicas.
        use_io_tiles: whether the reduction runs on I/O tiles; the numbers do not depend on it.

    Returns:
        The graph, with an input of the same name for each tensor, and the names in the order of its outputs: sorted.

    Example:
        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     grads = NamedTensors(w=popxl.variable([1.0, 2.0]), b=popxl.variable(3.0))
        ...     graph, names = replicated_all_reduce_strided_graph(grads, "mean")
        ...     means = NamedTensors.pack(names, graph.bind(grads).call())
        >>> names, means.w.shape
        (['b', 'w'], (2,))
    """

    def reduced(name: str, t: popxl.Tensor) -> popxl.Tensor:
        return _io_tiles.loaded(use_io_tiles, replicated_all_reduce_strided, t, op, group)

    return graph_over("replicated_all_reduce_strided", tensors, reduced)
