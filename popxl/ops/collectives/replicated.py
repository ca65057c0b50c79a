"""Collectives between replicas: reductions, gathers, and slices that differ from replica to replica.

The ops themselves work on flat tensors that are cut into chunks, one for each member of a group; ordinary ops move axes
to the front and back. The mapping of groups to devices is in `runtime.lowering.collectives`; ops that only move values
are in `all_to_all`. A gather and a slice are each other's gradients. Gradients are not summed over replicas: a program
adds that reduction explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from popxl.base.arrays import Array
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor, Variable
from popxl.core.traits import REFUSED, BetweenReplicas
from popxl.errors import PopxlError
from popxl.ops.collectives.chunks import moved, normalized_axis, permutations
from popxl.ops.collectives.collectives import CollectiveOps, members, to_collective_op
from popxl.ops.collectives.exchanging import LANES
from popxl.ops.collectives.group import Group, chunk_size
from popxl.ops.convert import identity
from popxl.ops.shape import flatten, reshape, transpose
from popxl.replica_grouping import Groups
from popxl.values.shapes import integer, like_first
from popxl.values.sharding import shard_layout
from popxl.values.spec import TensorSpec, brief

OutputShape = Literal["new_axis", "concat", "meta_shape", "auto"]


# Reductions ---------------------------------------------------------------------------------------------------------


all_reduce_kind = OpKind(
    "ReplicatedAllReduce",
    lambda t, *, op, group: group.combined(t, op),
    shape=like_first,
    gradient=REFUSED,
    result="{t}_all_reduce",
    traits=[BetweenReplicas("same")],
)
all_reduce_inplace_kind = all_reduce_kind.inplace("ReplicatedAllReduceInplace", "{t}_all_reduce")
reduce_scatter_kind = OpKind(
    "ReplicatedReduceScatter",
    lambda t, *, op, sharded, group: group.combined_chunk(t, op),
    shape=lambda t, *, op, stride, group_size, sharded: TensorSpec(
        (chunk_size(math.prod(t.shape), group_size),), t.dtype, t.shape if sharded else ()
    ),
    gradient=REFUSED,
    result="{t}_reduce_scattered",
    traits=[BetweenReplicas("pieces")],
)


def replicated_all_reduce(t: Tensor, op: CollectiveOps = "add", group: Groups | None = None) -> Tensor:
    """Combine the values that `t` has on the replicas of a group, elementwise; every member gets the result.

    No gradient is defined: autodiff raises when one reaches this op. For tensor parallelism there are all-reduces with
    gradients in `popxl_addons.ops.replicated_all_reduce_TP`.

    Args:
        t: tensor of any shape.
        op: reduction: `"add"`, `"mean"`, `"mul"`, `"min"`, `"max"`, `"square_add"` (the sum of squares), or `"and"`,
            `"or"` of non-zero elements. Float16 is computed in float32 and rounded once; the mean of integers is
            rounded towards zero.
        group: the replicas that communicate: a grouping, or names of axes; all of them by default.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: for an unknown `op`, or if the replicas of the Ir cannot be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.

    See also: `jax.lax.psum`, `torch.distributed.all_reduce`.

    Example:
        >>> gradient = ops.collectives.replicated_all_reduce(gradient, "mean")
    """
    to_collective_op(op)
    return all_reduce_kind(t, op=op, **members("replicated_all_reduce", group))


def replicated_all_reduce_(t: Tensor, op: CollectiveOps = "add", group: Groups | None = None) -> Tensor:
    """`replicated_all_reduce`, written over `t` on every replica.

    Returns:
        An alias of `t`, which holds the new value from now on. Autodiff refuses graphs with this op.

    Example:
        >>> gradient = ops.collectives.replicated_all_reduce_(gradient, "mean")
    """
    to_collective_op(op)
    return all_reduce_inplace_kind(t, op=op, **members("replicated_all_reduce_", group))


def replicated_reduce_scatter(
    t: Tensor,
    op: CollectiveOps = "add",
    group: Groups | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """Reduce `t` elementwise over each replica group; every member receives one chunk.

    The result is flattened, padded with zeros, and cut into equal chunks, one for each member, in order. Autodiff
    raises when a gradient reaches this op.

    Args:
        t: tensor of any shape.
        op: reduction, as for `replicated_all_reduce`.
        group: the replicas that communicate: a grouping, or names of axes; all of them by default.
        configure_output_for_replicated_tensor_sharding: make the result a sharded tensor: its `meta_shape` is the
            shape of `t`, and `replicated_all_gather` puts it together again.

    Returns:
        A new tensor of rank 1, of the same dtype.

    Raises:
        ValueError: for an unknown `op`, or if the replicas of the Ir cannot be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.

    See also: `jax.lax.psum_scatter`, `torch.distributed.reduce_scatter_tensor`.

    Example:
        >>> shard = ops.collectives.replicated_reduce_scatter(gradient, "mean", None, True)
    """
    to_collective_op(op)
    sharded = bool(configure_output_for_replicated_tensor_sharding)
    return reduce_scatter_kind(t, op=op, sharded=sharded, **members("replicated_reduce_scatter", group))


# Gathers and slices -------------------------------------------------------------------------------------------------


def _all_gather(t: Array, *, shape: tuple[int, ...], group: Group) -> Array:
    """Concatenate member values, cropped to the result shape."""
    count, rows = math.prod(shape), _rows_of(shape, math.prod(t.shape))
    return moved(t, lambda t: group.members(t.reshape(rows)).reshape(-1)[:count].reshape(shape))


def _rows_of(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Shape in which to gather shards of `size` numbers each: rows of the whole, or wide parts of its rows.

    A TPU that receives one row from each member would rearrange the whole.
    """
    width = math.gcd(size, shape[-1]) if len(shape) > 1 else 0
    return (size // width, width) if width and (width == shape[-1] or width >= LANES // 2) else (size,)


def _gathered(t: Any, *, stride: int, group_size: int, shape: tuple[int, ...]) -> TensorSpec:
    there, wanted = group_size * math.prod(t.shape), math.prod(shape)
    if there < wanted:
        raise PopxlError(
            f"the {group_size} members of a group have {there} elements together, and the meta-shape {shape} takes "
            f"{wanted}. Gather over the group that the tensor is sharded over."
        )
    return TensorSpec(shape, t.dtype)


def _own_gradient_chunk(g: Tensor, t_spec: TensorSpec, stride: int, group_size: int) -> Tensor:
    """The gradient chunk for a replica's own contribution: all gradient copies are equal."""
    own: Tensor = slice_kind(g, stride=stride, group_size=group_size, chunk=math.prod(t_spec.shape))
    return own if own.shape == t_spec.shape else reshape(own, t_spec.shape)


all_gather_kind: OpKind = OpKind(
    "ReplicatedAllGather",
    _all_gather,
    shape=_gathered,
    gradient={"t": _own_gradient_chunk},
    result="{t}_all_gathered",
    traits=[BetweenReplicas("same")],
)


def _chunk(key: str, result: str, shape: Callable[..., TensorSpec]) -> OpKind:
    """Declare an op that keeps the replica's chunk of its local `t`."""
    return OpKind(
        "ReplicatedReduceScatter",
        lambda t, *, chunk, group: moved(t, lambda t: group.chunk(t, chunk)),
        shape=shape,
        gradient={
            "t": lambda g, t_spec, stride, group_size: all_gather_kind(
                g, stride=stride, group_size=group_size, shape=tuple(t_spec.shape)
            )
        },
        result=result,
        traits=[BetweenReplicas("pieces")],
        key=key,
    )


sharded_slice_kind = _chunk(
    "ReplicaShardedSlice",
    "{t}_sharded_slice",
    lambda t, *, stride, group_size, chunk: TensorSpec((chunk,), t.dtype, t.shape),
)
slice_kind = _chunk(
    "ReplicatedSlice",
    "{t}_replicated_slice",
    lambda t, *, stride, group_size, chunk: TensorSpec((chunk,), t.dtype),
)


def replicated_all_gather(
    t: Tensor, axis: int = 0, group: Groups | None = None, output_shape: OutputShape = "auto"
) -> Tensor:
    """Gather `t` from all members of each replica group, in replica order.

    The gradient of each replica is its own part of its own incoming gradient. Nothing is summed over replicas: later
    computations are assumed to be the same on all members. The gradient of a shard has no meta-shape: it is an ordinary
    tensor, which may be stored to the host.

    Args:
        t: tensor of any shape and dtype.
        axis: along which tensors are concatenated; negative ones count from the back. The other forms ignore it.
        group: the replicas that communicate: a grouping, or names of axes; all of them by default.
        output_shape: arrangement of the G tensors.
            - `"concat"`: concatenated along `axis`; scalars become a tensor of shape (G,).
            - `"new_axis"`: stacked along a new first dimension of size G.
            - `"meta_shape"`: shards of one tensor, joined; excess elements are dropped, and the result has the shape
              `t.meta_shape`. Without a meta-shape the result is flat.
            - `"auto"`: `"meta_shape"` if `t` has one, else `"concat"`.

    Returns:
        A new tensor of the same dtype, without a meta-shape.

    Raises:
        ValueError: for an unknown `output_shape`, an `axis` that is not an integer, or if the replicas of the Ir cannot
            be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.
        PopxlError: if there is no such axis, or the members have less than the meta-shape takes.

    See also: `jax.lax.all_gather`, `torch.distributed.all_gather`.

    Example:
        >>> shard = ops.collectives.replica_sharded_slice(w)
        >>> ops.collectives.replicated_all_gather(shard).shape
        (4, 3)
    """
    name = "replicated_all_gather"
    if not isinstance(axis, int | np.integer):
        raise ValueError(f"{name}: `axis` must be an integer; got {axis!r} ({type(axis).__name__}).")
    if output_shape not in get_args(OutputShape):
        choice = ", ".join(map(repr, get_args(OutputShape)))
        raise ValueError(f"{name}: `output_shape` is {output_shape!r}; expected one of {choice}.")
    groups = members(name, group)
    all_gather_kind.check(t, shape=(0,), **groups)  # the shape depends on `t`, which has to be a tensor
    size: int = groups["group_size"]

    def gathered(flat: Tensor) -> Tensor:
        return all_gather_kind(flat, shape=(size * flat.nelms,), **groups)

    if output_shape == "meta_shape" or (output_shape == "auto" and t.meta_shape):
        return all_gather_kind(t, shape=tuple(t.meta_shape), **groups) if t.meta_shape else gathered(t)
    if output_shape == "new_axis":
        return reshape(gathered(flatten(t)), (size, *t.shape))
    axis = normalized_axis(name, t, int(axis))
    front, back = permutations(axis, t.rank)
    first = transpose(t, front) if axis else t
    length, *others = first.shape or (1,)
    result = reshape(gathered(flatten(first)), (size * length, *others))
    return transpose(result, back) if axis else result


def replica_sharded_slice(t: Tensor, group: Groups | None = None) -> Tensor:
    """Split `t` into shards and keep each replica's own. Needs no communication: `t` is equal on all members.

    `replicated_all_gather` puts the shards together again. The gradient does: it is gathered from all members, in the
    shape of `t`.

    Args:
        t: tensor of any shape and dtype.
        group: the replicas that share out `t`: a grouping, or names of axes; all of them by default.

    Returns:
        A new sharded tensor of rank 1: `t` flattened and cut into as many equal chunks as there are members, with zeros
        where elements lack at the end. Its `meta_shape` is the shape of `t`; a scalar's says nothing, because all
        tensors that are no shards have it. Of a variable that is sharded over the group: a copy of its shard.

    Raises:
        ValueError: if the replicas of the Ir cannot be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.

    Example:
        >>> shard = ops.collectives.replica_sharded_slice(w)
        >>> w = ops.collectives.replicated_all_gather(shard)
    """
    groups = members("replica_sharded_slice", group)
    sharded_slice_kind.check(t, chunk=0, **groups)
    if isinstance(t, Variable) and t.piece is not None:
        layout = shard_layout(t)
        if (layout.grouping.const_rg.stride, layout.count) == (groups["stride"], groups["group_size"]):
            return identity(t.piece, f"{t.name}_sharded_slice")  # a copy: changes in place stay out of the variable
    return sharded_slice_kind(t, chunk=chunk_size(t.nelms, groups["group_size"]), **groups)


def replicated_slice(t: Tensor, axis: int = 0, group: Groups | None = None) -> Tensor:
    """Cut `t` into equal slices along an axis, one for each member of a group; each replica keeps its own.

    Nothing is communicated: `t` is the same on all members. The gradient is gathered from all members along `axis`.

    Args:
        t: tensor of any shape and dtype, rank 1 or more.
        axis: along which `t` is cut; negative ones count from the back. Its size is a multiple of that of the groups.
        group: the replicas that share out `t`: a grouping, or names of axes; all of them by default.

    Returns:
        A new tensor of the same dtype. Where slices have length 1 the axis is dropped.

    Raises:
        ValueError: if the size of the axis is not a multiple of that of the groups, or the replicas of the Ir cannot be
            grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.
        PopxlError: if there is no such axis.

    Example:
        >>> rows = ops.collectives.replicated_slice(x)
    """
    name = "replicated_slice"
    groups = members(name, group)
    size, axis = groups["group_size"], integer(axis, f"{name}: `axis`")
    if isinstance(t, Tensor):
        axis = normalized_axis(name, t, axis)
        if t.shape and t.shape[axis] % size:
            raise ValueError(
                f"{name}: axis {axis} of `t`, {brief(t)}, cannot be cut into {size} equal slices, one for each member "
                "of a group."
            )
    slice_kind.check(t, chunk=0, **groups)
    front, back = permutations(axis, t.rank)
    first = transpose(t, front) if axis else t
    own = slice_kind(flatten(first), chunk=t.nelms // size, **groups)
    length, *others = first.shape[0] // size, *first.shape[1:]
    if length == 1:  # the axis is dropped, the others are in order, so the permutation changes nothing
        result, back = reshape(own, others), tuple(range(len(others)))
    else:
        result = reshape(own, (length, *others))
    return transpose(result, back) if axis else result
