"""The gather of fully sharded data parallelism: a weight is put together where it is read, its gradient shared out.

It differs from `popxl.ops.collectives.replicated_all_gather` in what it says of gradients. There, what follows is the
same on all members of a group; here each member has data of its own, so the gradient of a shard is the mean over the
members. See also: ZeRO, stage 3, https://arxiv.org/abs/1910.02054.

Rows of a table may be looked up in the shards: the members exchange indices and rows instead of the table.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp

import popxl
from popxl import OpKind
from popxl.extend.collectives import Group, all_gather_kind, members, shard_length
from popxl.extend.graphs import reachable
from popxl.extend.ops import REFUSED, Op
from popxl.op import BetweenReplicas, Prefetched
from popxl.replica_grouping import ReplicaGrouping


def _gathered(t: Any, *sent: Any, shape: tuple[int, ...], group: Group) -> Any:
    """All-gather of shards, or of their casts."""
    return all_gather_kind.lowering(*(sent or (t,)), shape=shape, group=group)


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


_gather = OpKind(
    "WeightAllGather",
    _gathered,
    shape=lambda t, *sent, shape, stride, group_size: popxl.TensorSpec(shape, (t, *sent)[-1].dtype),
    gradient={"t": lambda g, stride, group_size: _reduce_scatter(g, op="mean", stride=stride, group_size=group_size)},
    result="{t}_all_gathered",
    traits=[BetweenReplicas("same"), Prefetched()],
)


def gather_weight(shard: popxl.Tensor, dtype: popxl.dtype, group: ReplicaGrouping) -> popxl.Tensor:
    """Gather the shards of a weight, cast to `dtype`. The gradient of the shard is its part of the mean over `group`.

    The mean of halves is computed, and passed on, in float32.

    Args:
        shard: a replica's shard, with the shape of the weight as `meta_shape`. It is cast before it is sent: an op, so
            that the gradient may take the cast from the forward pass.
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
    among = members("gather_weight", group)
    casts = () if shard.dtype is dtype else (popxl.ops.cast(shard, dtype),)
    return _gather(shard, *casts, shape=tuple(shard.meta_shape), **among)


def _in_own_rows(indices: Any, count: int, group: Group) -> Any:
    """Indices of all members into the own `count` rows of a table; `count` for rows that other members have."""
    local = group.members(indices.astype(jnp.int32)) - group.rank * count
    return jnp.where((local >= 0) & (local < count), local, count)


def _looked_up(shard: Any, indices: Any, *, shape: tuple[int, ...], dtype: popxl.dtype, group: Group) -> Any:
    rows = shard.astype(dtype.as_numpy()).reshape(-1, *shape[1:])
    local = _in_own_rows(indices, len(rows), group)
    rows_found = jnp.take(rows, local, axis=0, mode="fill", fill_value=0)
    received = group.exchanged(rows_found.reshape(-1, *shape[1:]))
    # Of each row one member has the numbers, and the others have zeros: the sum rounds nothing.
    return jnp.sum(received.reshape(group.size, *indices.shape, *shape[1:]), 0)


def _mean_of_rows(g: Any, indices: Any, *, shape: tuple[int, ...], op: str, group: Group) -> Any:
    count = shape[0] // group.size
    gradients = group.members(g).astype(jnp.promote_types(g.dtype, jnp.float32))
    total = jnp.zeros((count, *shape[1:]), gradients.dtype)
    total = total.at[_in_own_rows(indices, count, group)].add(gradients, mode="drop", wrap_negative_indices=False)
    return total.reshape(-1) / group.size


_add_rows = OpKind(
    "WeightRowsAddedUp",
    _mean_of_rows,
    shape=lambda g, indices, *, shape, op, stride, group_size: popxl.TensorSpec(
        (prod(shape) // group_size,), popxl.float32 if g.dtype.is_half else g.dtype, shape
    ),
    gradient=REFUSED,
    result="{g}_reduce_scattered",
    traits=[BetweenReplicas("pieces")],
)

_look_up = OpKind(
    "WeightRowsLookedUp",
    _looked_up,
    shape=lambda shard, indices, *, shape, dtype, stride, group_size: popxl.TensorSpec(
        indices.shape + shape[1:], dtype
    ),
    gradient={
        "shard": lambda g, indices, shape, stride, group_size: _add_rows(
            g, indices, shape=shape, op="mean", stride=stride, group_size=group_size
        )
    },
    result="{shard}_rows",
    traits=[BetweenReplicas("own")],
)


def look_up_rows(
    shard: popxl.Tensor, indices: popxl.Tensor, dtype: popxl.dtype, group: ReplicaGrouping
) -> popxl.Tensor:
    """Rows of a table that replicas share out by rows, cast to `dtype`. The gradient is as of `gather_weight`.

    Each replica looks up what all members ask for among its own rows, and sends it to them. So it sends as many rows as
    the members ask for, rather than the table.

    Args:
        shard: a replica's rows, with the shape of the table as `meta_shape`: its first dimension is a multiple of the
            group's size.
        indices: the rows that a replica wants: integers of any shape. Those out of range give zeros.
        dtype: what the rows are wanted in.
        group: the replicas that hold the shards.

    Returns:
        A tensor of shape `indices.shape + shard.meta_shape[1:]`.

    Raises:
        NotImplementedError: for a grouping whose members are not always the same distance apart.

    Example:
        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     w, shard = popxl.replica_sharded_variable(np.ones((6, 3)), popxl.float32, "w")
        ...     rows = look_up_rows(shard, popxl.constant([5, 0]), popxl.bfloat16, ir.replica_grouping())
        >>> rows.shape, rows.dtype
        ((2, 3), popxl.dtypes.bfloat16)
    """
    among = members("look_up_rows", group)
    return _look_up(shard, indices, shape=tuple(shard.meta_shape), dtype=dtype, **among)


def is_looked_up_cheaper(table: tuple[int, ...], indices: popxl.Tensor, group: ReplicaGrouping) -> bool:
    """Whether replicas that share out a table of this shape send less for its rows than for the table."""
    return table[0] % group.group_size == 0 and indices.nelms * group.group_size < table[0]


def is_gather(op: Op) -> bool:
    """Whether an op gathers a weight."""
    return op.kind is _gather


def gathers_weights(op: Op) -> bool:
    """Whether an op calls a graph that gathers weights, or that calls one."""
    return any(is_gather(inner) for callee in op.called_graphs for graph in reachable(callee) for inner in graph.ops)


def shares_out_gradients(op: Op) -> bool:
    """Whether an op computes the gradient of a shard from that of the gathered weight."""
    return op.kind in (_reduce_scatter, _add_rows)


def gathered_weights_of(graph: popxl.Graph) -> set[popxl.Tensor]:
    """Tensors that a graph computes of gathered weights alone, such as the weights themselves and their transposes."""
    tensors: set[popxl.Tensor] = set()
    for op in graph.ops:
        if is_gather(op) or (op.inputs and tensors.issuperset(op.inputs)):
            tensors.update(op.outputs)
    return tensors
