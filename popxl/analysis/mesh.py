"""`Mesh`: the axes that distinguish the replicas of a program, derived from its groupings.

A program names its axes, or groups replicas by strides. If all groups consist of the same dimensions, these are the
axes, and each group extends along some of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from popxl.replica_grouping import ReplicaGrouping

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.core.tensor import Variable
    from popxl.ir import Ir
    from popxl.values.axes import Axes


@dataclass(frozen=True)
class Mesh:
    """Axes of replicas, the first one the outermost. All have two replicas or more.

    Attributes:
        names: names of the axes, from the Ir if it has named axes.
        strides: distance between neighbours along each axis.
        sizes: number of replicas along each axis.
    """

    names: tuple[str, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    def along(self, stride: int, size: int) -> tuple[int, ...]:
        """Positions of the axes that a strided group extends along."""
        return _axes_along(self.strides, stride, size)

    def axes_of(self, op: Op) -> tuple[int, ...]:
        """Positions of the axes that an op between replicas extends along."""
        return _axes_along(self.strides, op.attributes["stride"], op.attributes["group_size"])

    def spanned_axes(self, grouping: ReplicaGrouping) -> tuple[int, ...] | None:
        """Positions of the axes that the groups of a grouping extend along; `None` for groups of another form."""
        if grouping.is_const:
            return self.along(grouping.stride, grouping.group_size)
        assignment = grouping.assignment
        first = {r for r, group in enumerate(assignment) if group == assignment[0]}
        axes = tuple(i for i, s in enumerate(self.strides) if s in first)
        remaining = [(s, n) for i, (s, n) in enumerate(zip(self.strides, self.sizes, strict=True)) if i not in axes]
        numbers: dict[tuple[int, ...], int] = {}
        expected = [
            numbers.setdefault(tuple(r // s % n for s, n in remaining), len(numbers)) for r in range(len(assignment))
        ]
        return axes if expected == assignment else None

    def count(self, axes: Iterable[int]) -> int:
        """The number of replicas along some axes."""
        return math.prod(self.sizes[i] for i in axes)

    def text(self, axes: Iterable[int]) -> str:
        """Names of axes as text: `` `data` and `tensor` ``."""
        return " and ".join(f"`{self.names[i]}`" for i in axes)


@lru_cache(256)
def _axes_along(strides: Sequence[int], stride: int, size: int) -> tuple[int, ...]:
    return tuple(i for i, s in enumerate(strides) if stride <= s < stride * size) if size > 1 else ()


def mesh_of(ir: Ir, collectives: Iterable[Op], variables: Iterable[Variable] = ()) -> Mesh | None:
    """Mesh of a program, from its ops between replicas and its variables; `None` if its groups do not consist of the
    same dimensions.

    Example:
        >>> mesh_of(popxl.Ir(axes={"data": 2, "tensor": 4}), []).strides
        (4, 1)
    """
    groups = {(op.attributes["stride"], op.attributes["group_size"]) for op in collectives}
    all_groupings = map(attrgetter("replica_grouping"), variables)
    groupings = {id(grouping): grouping for grouping in all_groupings}  # many variables have the same one
    groups.update((r.stride, r.group_size) for grouping in groupings.values() if (r := grouping.const_rg))
    return _mesh(ir.replication_factor, ir.named_axes, frozenset(groups))


@lru_cache(64)
def _mesh(count: int, named: Axes | None, groups: Set[tuple[int, int]]) -> Mesh | None:
    """Mesh of `count` replicas with groups, each given by stride and size."""
    axis_names = {} if named is None else named.by_stride
    dimensions = dimensions_of_groups(count, (*axis_names, *groups))
    if dimensions is None:
        return None
    return Mesh(
        tuple(_name(axis_names, dimension, dimensions) for dimension in dimensions),
        tuple(stride for stride, _ in dimensions),
        tuple(size for _, size in dimensions),
    )


def dimensions_of_groups(count: int, groups: Iterable[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Dimensions of `count` replicas of which all groups consist, the outermost first; `None` if there are none.

    Groups and dimensions are given by the stride and the number of their members.

    Example:
        >>> dimensions_of_groups(12, [(1, 3), (6, 2)])
        [(6, 2), (3, 2), (1, 3)]
    """
    ends = {1, count}
    for stride, size in groups:
        ends |= {stride, stride * size} if size > 1 else set()
    bounds = sorted(ends)
    if any(larger % smaller for smaller, larger in pairwise(bounds)):
        return None
    return [(smaller, larger // smaller) for smaller, larger in pairwise(bounds)][::-1]


def _name(
    axis_names: dict[tuple[int, int], str], dimension: tuple[int, int], dimensions: Sequence[tuple[int, int]]
) -> str:
    """Dimension name: an axis, part of an axis, or a description."""
    stride, size = dimension
    for (start, count), name in axis_names.items():
        if start <= stride < start * count:
            return name if (stride, size) == (start, count) else f"{name} / {stride // start}"
    if len(dimensions) == 1:
        return "replicas"
    return f"{size} replicas" if stride == 1 else f"{size} replicas, {stride} apart"
