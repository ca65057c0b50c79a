"""The gather of fully sharded data parallelism: a weight is put together where it is read, its gradient shared out.

It differs from `popxl.ops.collectives.replicated_all_gather` in what it says of gradients. There, what follows is the
same on all members of a group; here each member has data of its own, so the gradient of a shard is the mean over the
members. See also: ZeRO, stage 3, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from typing import Any

import popxl
from popxl import OpKind
from popxl.extend.collectives import Group, all_gather_kind, members, shard_length
from popxl.extend.graphs import reachable
from popxl.extend.ops import REFUSED, Op
from popxl.op import BetweenReplicas
from popxl.replica_grouping import ReplicaGrouping

__all__ = ["gather_weight", "gathered_weights_of", "gathers_weights", "is_gather", "shares_out_gradients"]


def _gathered(t: Any, *, shape: tuple[int, ...], dtype: popxl.dtype, group: Group) -> Any:
    return all_gather_kind.lowering(t.astype(dtype.as_numpy()), shape=shape, group=group)


def _mean_of_shard(g: popxl.Tensor, *, op: str, stride: int, group_size: int) -> popxl.TensorSpec:
    dtype = popxl.float32 if g.dtype.is_half else g.dtype
    return popxl.TensorSpec((shard_length(g.shape, group_size),), dtype, g.shape)


_reduce_scatter = OpKind(
    "WeightReduceScatter",
    lambda g, *, op, group: group.combined_chunk(g, op),  # of halves: they are sent as they are, and summed in float32
    shape=_mean_of_shard,
    gradient=REFUSED,
    result="{g}_reduce_scattered",
    traits=[BetweenReplicas("pieces")],
)


def _own_shard_of_mean(g: popxl.Tensor, dtype: popxl.dtype, stride: int, group_size: int) -> popxl.Tensor:
    own: popxl.Tensor = _reduce_scatter(g, op="mean", stride=stride, group_size=group_size)
    return own


_gather = OpKind(
    "WeightAllGather",
    _gathered,
    shape=lambda t, *, shape, dtype, stride, group_size: popxl.TensorSpec(shape, dtype),
    gradient={"t": _own_shard_of_mean},
    result="{t}_all_gathered",
    traits=[BetweenReplicas("same")],
)


def gather_weight(shard: popxl.Tensor, dtype: popxl.dtype, group: ReplicaGrouping) -> popxl.Tensor:
    """Gather the shards of a weight, cast to `dtype`. The gradient of the shard is its part of the mean over `group`.

    The mean of halves is computed, and passed on, in float32.

    Args:
        shard: a replica's shard, with the shape of the weight as `meta_shape`. It is cast before it is sent.
        dtype: what the weight is read in.
        group: the replicas that hold the shards.

    Returns:
        A tensor of shape `shard.meta_shape`.

    Raises:
        NotImplementedError: for a grouping whose members are not always the same distance apart.

    Example:
        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     w, shard = popxl.replica_sharded_variable(np.ones((2, 3)), popxl.float32, "w")
        ...     whole = gather_weight(shard, popxl.bfloat16, ir.replica_grouping())
        >>> shard.shape, whole.shape, whole.dtype
        ((3,), (2, 3), popxl.dtypes.bfloat16)
    """
    whole: popxl.Tensor = _gather(shard, shape=tuple(shard.meta_shape), dtype=dtype, **members("gather_weight", group))
    return whole


def is_gather(op: Op) -> bool:
    """Whether an op gathers a weight."""
    return op.kind is _gather


def gathers_weights(op: Op) -> bool:
    """Whether an op calls a graph that gathers weights, or that calls one."""
    return any(is_gather(inner) for each in op.called_graphs for graph in reachable(each) for inner in graph.ops)


def shares_out_gradients(op: Op) -> bool:
    """Whether an op computes the gradient of a shard from that of the gathered weight."""
    return op.kind is _reduce_scatter


def gathered_weights_of(graph: popxl.Graph) -> set[popxl.Tensor]:
    """Tensors that a graph computes of gathered weights alone, such as the weights themselves and their transposes."""
    found: set[popxl.Tensor] = set()
    for op in graph.ops:
        if is_gather(op) or (op.inputs and found.issuperset(op.inputs)):
            found.update(op.outputs)
    return found
