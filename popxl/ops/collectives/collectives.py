"""Common parts of collectives: the names of reductions, and the groups of replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.context import get_current_context
from popxl.ops.precision import widen
from popxl.replica_grouping import Groups, ReplicaGrouping, grouping_of, plain_grouping

__all__ = ["OP_MAP", "CollectiveOps", "CommGroup", "CommGroupType", "members", "to_collective_op"]

CollectiveOps = Literal["add", "mean", "mul", "min", "max", "and", "or", "square_add"]

# Reductions ---------------------------------------------------------------------------------------------------------


def widen_for_sum(t: Array) -> Array:
    """The array as it takes part in sums: halves as float32, bools and narrow integers with 32 bits."""
    if jnp.issubdtype(t.dtype, jnp.floating):
        return widen(t)
    return t.astype(jnp.promote_types(t.dtype, jnp.uint32 if t.dtype.kind == "u" else jnp.int32))


def share(total: Array, count: int) -> Array:
    """A sum divided by the number of its terms; integers are rounded towards zero."""
    return (
        total / count if jnp.issubdtype(total.dtype, jnp.floating) else lax.div(total, jnp.asarray(count, total.dtype))
    )


def _fold_in_order(combine: Callable[[Array, Array], Array], prepare: Callable[[Array], Array]) -> Callable[..., Array]:
    """Combine values sequentially in member order, which fixes floating-point rounding."""
    return lambda values: functools.reduce(combine, map(prepare, values))


_sum = _fold_in_order(jnp.add, widen_for_sum)

OP_MAP: Mapping[str, Callable[[Sequence[Array]], Array]] = {
    "add": _sum,
    "mean": lambda values: share(_sum(values), len(values)),
    "mul": _fold_in_order(jnp.multiply, widen_for_sum),
    "min": _fold_in_order(jnp.minimum, widen_for_sum),
    "max": _fold_in_order(jnp.maximum, widen_for_sum),
    "and": _fold_in_order(jnp.logical_and, lambda t: t != 0),
    "or": _fold_in_order(jnp.logical_or, lambda t: t != 0),
    "square_add": _fold_in_order(jnp.add, lambda t: jnp.square(widen_for_sum(t))),
}
"""Functions of `CollectiveOps` names: JAX functions of the values of all members, in order.

The result may be wider than the values; an op rounds it once, to its own dtype.
"""


def to_collective_op(op: str) -> Callable[[Sequence[Array]], Array]:
    """The function that a name stands for; see `OP_MAP`.

    Raises:
        ValueError: for a name that is not one of `CollectiveOps`.

    Example:
        >>> to_collective_op("max")([jnp.float32(1), jnp.float32(3)])
        Array(3., dtype=float32)
    """
    if not isinstance(op, str) or op not in OP_MAP:
        raise ValueError(
            f"collectives: `op` is {op!r}; expected one of {', '.join(map(repr, get_args(CollectiveOps)))}."
        )
    return OP_MAP[op]


# Groups -------------------------------------------------------------------------------------------------------------


def members(name: str, group: Groups | None) -> dict[str, Any]:
    """Convert a group argument to op attributes: group size and stride.

    Args:
        name: the function that was called, for errors.
        group: the replicas that communicate: a grouping, or the names of axes; `None` for all of them.

    Returns:
        The attributes `stride` and `group_size`; ops declared with `between_replicas` form their group from these.

    Raises:
        TypeError: if `group` is not a grouping, and names no axes.
        ValueError: if the replicas of the Ir cannot be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     members("sum", ir.replica_grouping(stride=2, group_size=2))
        {'stride': 2, 'group_size': 2}
    """
    ir = get_current_context().ir
    count = ir.replication_factor
    if group is None:
        return {"stride": 1, "group_size": count}
    named, group = group, grouping_of(ir, group, f"{name}: `group`")
    if not group.is_const and named is not group:
        raise NotImplementedError(
            f"{name}: `group` is {named!r}, axes with others in between: replicas of such groups cannot talk to each "
            f"other. Put them next to each other in `popxl.Ir(axes={ir.axes})`."
        )
    if not group.is_const:
        hint = f" Put axes with common sums next to each other in `popxl.Ir(axes={ir.axes})`." if ir.axes else ""
        raise NotImplementedError(
            f"{name}: `group` is {group}, whose members are not always the same distance apart; replicas of such "
            f"groups cannot talk to each other. Use a grouping of `ir.replica_grouping(stride, group_size)`.{hint}"
        )
    if count % (group.stride * group.group_size):
        raise ValueError(
            f"{name}: `group` is {group}, and the Ir has {count} replicas, which is no multiple of stride times group "
            "size. Make groupings after `ir.replication_factor` has been set."
        )
    return {"stride": group.stride, "group_size": group.group_size}


class CommGroupType(Enum):
    """Layouts of `CommGroup` groups."""

    All = 0
    """All replicas are one group."""
    Consecutive = 1
    """The members of a group follow each other."""
    Orthogonal = 2
    """The members of a group are as far apart as possible."""
    Ungrouped = 3
    """Each replica is a group."""


class CommGroup:
    """The older way to say which replicas form groups. Collectives take a `ReplicaGrouping`: see `toReplicaGrouping`.

    Args:
        type: arrangement of the groups; or a grouping to describe.
        replicaGroupSize: number of members of a group. `All` and `Ungrouped` ignore it.

    Raises:
        ValueError: for a grouping that no type describes.

    Example:
        >>> CommGroup(CommGroupType.Orthogonal, 2).toReplicaGrouping(8)
        ReplicaGrouping(num_replicas=8, stride=4, group_size=2, num_groups=4)
    """

    def __init__(self, type: CommGroupType | ReplicaGrouping = CommGroupType.All, replicaGroupSize: int = 0) -> None:
        self.type = _type_of(type) if isinstance(type, ReplicaGrouping) else CommGroupType(type)
        self.replicaGroupSize = type.group_size if isinstance(type, ReplicaGrouping) else replicaGroupSize

    def toReplicaGrouping(self, numReplicas: int) -> ReplicaGrouping:
        """The grouping for this number of replicas, for collectives; variables need groupings of their own Ir.

        Raises:
            ValueError: if the groups cannot be of that size.
        """
        size = {CommGroupType.All: numReplicas, CommGroupType.Ungrouped: 1}.get(self.type, self.replicaGroupSize)
        if not 0 < size <= numReplicas or numReplicas % size:
            raise ValueError(f"{self!r}: {numReplicas} replicas cannot form groups of {size}.")
        stride = numReplicas // size if self.type is CommGroupType.Orthogonal else 1
        return plain_grouping(numReplicas, stride, size)

    def __repr__(self) -> str:
        return f"CommGroup({self.type}, {self.replicaGroupSize})"


def _type_of(grouping: ReplicaGrouping) -> CommGroupType:
    if grouping.is_const:
        if grouping.num_groups == 1:
            return CommGroupType.All
        if grouping.group_size == 1:
            return CommGroupType.Ungrouped
        if grouping.stride == 1:
            return CommGroupType.Consecutive
        if grouping.stride == grouping.num_groups:
            return CommGroupType.Orthogonal
    raise ValueError(f"CommGroup: {grouping} is neither consecutive nor orthogonal; use the grouping itself.")
