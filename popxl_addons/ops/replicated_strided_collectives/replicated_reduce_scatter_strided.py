"""A reduce-scatter: each member of a group gets its chunk of the sum, or the mean, of all values."""

from __future__ import annotations

import popxl
from popxl import OpKind
from popxl.extend.collectives import members, reduce_scatter_kind
from popxl.op import REFUSED, BetweenReplicas
from popxl.replica_grouping import Groups
from popxl_addons.ops._all_reduce import known_reduction
from popxl_addons.ops.replicated_strided_collectives.replicated_all_reduce_strided import SUMS_AND_MEANS

__all__ = ["replicated_reduce_scatter_strided"]

_reduce_scatter = OpKind(
    "ReplicatedReduceScatterStrided",
    reduce_scatter_kind.lowering,
    shape=reduce_scatter_kind.shape,
    gradient=REFUSED,
    result="{t}_reduce_scattered",
    traits=[BetweenReplicas("pieces")],
)


def replicated_reduce_scatter_strided(
    t: popxl.Tensor,
    op: str = "add",
    group: Groups | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> popxl.Tensor:
    """Reduce `t` over each replica group; each member receives one chunk.

    The result is flattened and cut into as many equal chunks as there are members, in the order of the replicas,
    with zeros at the end where it has too few elements. Autodiff raises when a gradient reaches this op.

    Args:
        t: tensor of any shape.
        op: ``"add"`` or ``"mean"``. ``"mul"`` is a mean too, not a product.
        group: the replicas that communicate; all of them by default. Their stride may be any.
        configure_output_for_replicated_tensor_sharding: whether to make the result a shard: its `meta_shape` is the
            shape of `t`, and `replicated_all_gather_strided` assembles it again.

    Returns:
        A new tensor of the same dtype and of shape ``(ceil(t.nelms / group_size),)``.

    Raises:
        ValueError: for an unknown `op`, or if the replicas of the Ir cannot be grouped like this.
        PopxlError: for an unsupported `op`.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     x = popxl.variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        ...     shard = replicated_reduce_scatter_strided(x, "mean", None, True)
        >>> shard.shape, shard.meta_shape
        ((2,), (2, 3))
    """
    name = "replicated_reduce_scatter_strided"
    reduction = known_reduction(name, op, SUMS_AND_MEANS)
    sharded = bool(configure_output_for_replicated_tensor_sharding)
    return _reduce_scatter(t, op=reduction, sharded=sharded, **members(name, group))
