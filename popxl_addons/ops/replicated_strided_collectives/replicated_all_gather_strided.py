"""An all-gather that concatenates the values of all members to one flat tensor, or joins the shards of one."""

from __future__ import annotations

import math

import popxl
from popxl import OpKind
from popxl.extend.collectives import all_gather_kind, members
from popxl.op import BetweenReplicas
from popxl.replica_grouping import Groups

__all__ = ["replicated_all_gather_strided"]

_all_gather = OpKind(
    "ReplicatedAllGatherStrided",
    all_gather_kind.lowering,
    shape=all_gather_kind.shape,
    gradient=all_gather_kind.gradient,
    result="{t}_all_gathered",
    traits=[BetweenReplicas("same")],
)


def replicated_all_gather_strided(t: popxl.Tensor, group: Groups | None = None) -> popxl.Tensor:
    """Concatenate `t` from all members of each replica group, in replica order.

    The gradient of each replica is its own part of its own incoming gradient: later computations are assumed to be the
    same on all members.

    Args:
        t: tensor of any shape and dtype.
        group: the replicas that communicate; all of them by default. Their stride may be any.

    Returns:
        A new tensor of the same dtype. If `t` is a shard, with a `meta_shape`, it has that shape; else it is flat, of
        shape ``(group_size * t.nelms,)``.

    Raises:
        ValueError: if the replicas of the Ir cannot be grouped like this.
        PopxlError: if the members have less than the meta-shape takes.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     x = popxl.variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        ...     replicated_all_gather_strided(x, ir.replica_grouping(stride=2, group_size=2)).shape
        (12,)
    """
    groups = members("replicated_all_gather_strided", group)
    _all_gather.check(t, shape=(), **groups)
    shape = tuple(t.meta_shape) or (groups["group_size"] * math.prod(t.shape),)
    return _all_gather(t, shape=shape, **groups)
