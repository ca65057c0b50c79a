"""Differentiable all-reduces for tensor parallelism: layers whose weights are divided among replicas.

A column-parallel layer begins with `replicated_all_reduce_identical_inputs`, a row-parallel one ends with
`replicated_all_reduce_identical_grad_inputs`. In between each replica works on its own part, forward and backward.
"""

from __future__ import annotations

import popxl
from popxl.replica_grouping import Groups
from popxl_addons.ops._all_reduce import all_reduces

__all__ = [
    "replicated_all_reduce",
    "replicated_all_reduce_identical_grad_inputs",
    "replicated_all_reduce_identical_inputs",
]

_all_reduce = all_reduces("ReplicatedAllReduceTP", {"add": "add"})


def replicated_all_reduce(t: popxl.Tensor, op: str = "add", group: Groups | None = None) -> popxl.Tensor:
    """Sum `t` over each replica group, with equal results on all members; likewise in the gradient.

    Args:
        t: tensor of any shape.
        op: reduction: only ``"add"``.
        group: the replicas that communicate; all of them by default. Their stride may be any.

    Returns:
        A new tensor of the same shape and dtype. Float16 is summed in float32 and rounded once.

    Raises:
        ValueError: for an unknown `op`, or if the replicas of the Ir cannot be grouped like this.
        PopxlError: for an unsupported `op`.

    Example:
        >>> with popxl.Ir(replication=4).main_graph:
        ...     total = replicated_all_reduce(popxl.variable([1.0, 2.0], name="x"))
        >>> total.name, total.producer.op_type
        ('x_all_reduce', 'ReplicatedAllReduceTP')
    """
    return _all_reduce("replicated_all_reduce", t, op, group)


def replicated_all_reduce_identical_inputs(
    t: popxl.Tensor, op: str = "add", group: Groups | None = None
) -> popxl.Tensor:
    """Pass through `t`, promised equal on all group members; sum its gradients.

    Later ops use `t` on each replica for another part of a layer, so each has a part of the gradient.
    `popxl_addons.patterns.apply_pre_alias_patterns` makes the op an identity; without it, it is carried out as one.

    Args, results and errors are those of `replicated_all_reduce`.

    Example:
        A layer whose columns are divided among four replicas, and one whose rows are.

        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     each = ir.replica_grouping(group_size=1)
        ...     columns = popxl.variable(np.ones((4, 6, 2)), popxl.float32, "columns", replica_grouping=each)
        ...     rows = popxl.variable(np.ones((4, 2, 6)), popxl.float32, "rows", replica_grouping=each)
        ...     x = popxl.variable(np.ones((3, 6)), popxl.float32, "x")
        ...     h = popxl.ops.gelu(replicated_all_reduce_identical_inputs(x) @ columns)
        ...     y = replicated_all_reduce_identical_grad_inputs(h @ rows)
        >>> h.shape, y.shape
        ((3, 2), (3, 6))
    """
    return _all_reduce("replicated_all_reduce_identical_inputs", t, op, group, "inputs")


def replicated_all_reduce_identical_grad_inputs(
    t: popxl.Tensor, op: str = "add", group: Groups | None = None
) -> popxl.Tensor:
    """`replicated_all_reduce` with result gradients promised equal on all members.

    It passes unchanged. In a gradient graph made by `popxl.transforms.autodiff` that is an op which a session refuses
    until `popxl_addons.patterns.apply_pre_alias_patterns` has made it an identity; `popxl_addons.autodiff` does so.

    Args, results and errors are those of `replicated_all_reduce`; see `replicated_all_reduce_identical_inputs` for an
    example.
    """
    return _all_reduce("replicated_all_reduce_identical_grad_inputs", t, op, group, "gradients")
