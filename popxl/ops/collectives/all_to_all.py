"""Collectives that exchange values between replicas: all-to-all, and the shift along a ring.

They compute nothing. An all-to-all is its own gradient, with exchanged axes, and the gradient of a shift is the reverse
shift.
"""

from __future__ import annotations

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import BetweenReplicas
from popxl.ops.collectives.chunks import moved, normalized_axis, permutations
from popxl.ops.collectives.collectives import members
from popxl.ops.shape import reshape, transpose
from popxl.replica_grouping import Groups
from popxl.values.shapes import integer, like_first
from popxl.values.spec import brief

all_to_all_kind: OpKind = OpKind(
    "ReplicatedAllToAll",
    lambda t, *, group: moved(t, group.exchanged),
    shape=like_first,
    gradient={"t": lambda g, attributes: all_to_all_kind(g, **attributes)},  # each part is sent back
    result="{t}_all_to_all",
    traits=[BetweenReplicas("own")],
)


def replicated_all_to_all(t: Tensor, split_axis: int = 0, concat_axis: int = 0, group: Groups | None = None) -> Tensor:
    """Give each member of a group its part of what every member has: part `i` of `t` goes to member `i`.

    It sends tokens to the replica that has their expert, and back; or it changes the axis along which a tensor is
    sharded. Exchanging the axes ``a, b`` reverses an exchange with ``b, a``, and so do gradients: the gradient of each
    part is that of the member that received it.

    Args:
        t: tensor of any dtype, rank 1 or more.
        split_axis: along which `t` is cut into equal parts, one for each member. Its size is a multiple of theirs.
        concat_axis: axis along which a member joins what it receives, in the order of the replicas. Negative axes count
            from the back.
        group: the replicas that communicate: a grouping, or names of axes; all of them by default.

    Returns:
        A new tensor of the same dtype, without a meta-shape. `split_axis` is smaller than that of `t` by the size of
        the groups, and `concat_axis` larger; where they are one axis, the shape is that of `t`.

    Raises:
        ValueError: if the size of `split_axis` is no multiple of that of the groups, or the replicas of the Ir cannot
            be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.
        PopxlError: if there is no such axis.

    See also: `jax.lax.all_to_all`, `torch.distributed.all_to_all_single`.

    Example:
        All tokens with some of the features become some of the tokens with all features.

        >>> with popxl.Ir(replication=4).main_graph:
        ...     x = popxl.variable(np.ones((8, 3)), popxl.float32)
        ...     print(ops.collectives.replicated_all_to_all(x, 0, 1).shape)
        (2, 12)
    """
    name = "replicated_all_to_all"
    groups = members(name, group)
    size = groups["group_size"]
    split, concat = integer(split_axis, f"{name}: `split_axis`"), integer(concat_axis, f"{name}: `concat_axis`")
    all_to_all_kind.check(t, **groups)
    split, concat = normalized_axis(name, t, split), normalized_axis(name, t, concat)
    if not t.shape or t.shape[split] % size:
        raise ValueError(
            f"{name}: axis {split} of `t`, {brief(t)}, cannot be cut into {size} equal parts, one for each member of a "
            "group."
        )
    shape = [*t.shape]
    shape[split] //= size
    parts = reshape(t, (*shape[:split], size, *shape[split:]))
    front, _ = permutations(split, parts.rank)
    got = all_to_all_kind(transpose(parts, front) if split else parts, **groups)
    _, back = permutations(concat, parts.rank)
    shape[concat] *= size
    return reshape(transpose(got, back) if concat else got, shape)


shift_kind: OpKind = OpKind(
    "ReplicatedShift",
    lambda t, *, distance, group: moved(t, lambda t: group.shifted(t, distance)) if distance % group.size else t,
    shape=like_first,
    gradient={"t": lambda g, attributes: shift_kind(g, **attributes | {"distance": -attributes["distance"]})},
    result="{t}_shifted",
    traits=[BetweenReplicas("own")],
)


def replicated_shift(t: Tensor, distance: int = 1, group: Groups | None = None) -> Tensor:
    """Send `t` to the member of the group at the given distance; the last members send theirs to the first.

    The members of a group form a ring, and each sends to one other only: to a neighbour, over a direct link, if the
    machine has one. After as many shifts by one as there are members, each has seen the values of all, without memory
    for more than two at once. The gradient is shifted back.

    Args:
        t: tensor of any shape and dtype.
        distance: number of members to move forward; negative numbers go back.
        group: the replicas that communicate: a grouping, or names of axes; all of them by default.

    Returns:
        A new tensor of the same shape and dtype: `t` of the member `distance` places before.

    Raises:
        TypeError: if `distance` is not an integer.
        ValueError: if the replicas of the Ir cannot be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.

    See also: `jax.lax.ppermute`, `torch.distributed.batch_isend_irecv`.

    Example:
        The sum over a ring, which every member computes in an order of its own.

        >>> with popxl.Ir(replication=4).main_graph:
        ...     t = total = popxl.variable([1.0, 2.0], popxl.float32)
        ...     for _ in range(3):
        ...         t = ops.collectives.replicated_shift(t)
        ...         total = total + t
        >>> total.shape
        (2,)
    """
    name = "replicated_shift"
    return shift_kind(t, distance=integer(distance, f"{name}: `distance`"), **members(name, group))
