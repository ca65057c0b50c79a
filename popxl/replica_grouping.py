"""Groups of replicas: `ReplicaGrouping`, made by `ir.replica_grouping` and its siblings.

A grouping is only a description. For variables it defines the replicas that share a value, for collectives those that
communicate.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from popxl.base.group_by import group_by
from popxl.values.shapes import integer, integers

if TYPE_CHECKING:
    from popxl.ir import Ir


class ReplicaGrouping:
    """A partition of all replicas into groups of equal size, numbered in the order of their first replicas.

    In a *constant* grouping, neighbours within a group are always `stride` replicas apart. Collectives accept only
    these; variables accept any. Make one with `ir.replica_grouping` or `ir.replica_grouping_from_assignments`.

    Groupings are equal if they group the replicas of the same `Ir` in the same way. They cannot be hashed, and
    comparing one with anything else raises `TypeError`. A grouping does not keep its `Ir` alive.

    Example:
        >>> rg = popxl.Ir(replication=6).replica_grouping(stride=3, group_size=2)
        >>> rg.assignment
        [0, 1, 2, 0, 1, 2]
    """

    _ir_ref: "Callable[[], Ir | None]"
    _assignment: list[int]
    _stride: int | None  # None where the grouping is not constant
    _group_size: int

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError(
            "ReplicaGrouping() cannot be called: a grouping belongs to an Ir. "
            "Use ir.replica_grouping(stride, group_size) or ir.replica_grouping_from_assignments(assignment)."
        )

    @property
    def stride(self) -> int:
        """Distance between neighbours within a group, in replicas; 1 where groups have one member.

        Raises:
            NotImplementedError: if the grouping is not constant.
        """
        if self._stride is None:
            raise NotImplementedError(
                f"stride: {self} is not constant, so it has no single stride. Check `is_const` first, "
                "or use `const_rg`, a constant grouping that refines it."
            )
        return self._stride

    @property
    def group_size(self) -> int:
        """Number of replicas per group."""
        return self._group_size

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self._assignment) // self._group_size

    @property
    def assignment(self) -> list[int]:
        """The group of each replica."""
        return list(self._assignment)

    @property
    def is_const(self) -> bool:
        """Whether neighbours within a group are always the same distance apart."""
        return self._stride is not None

    @property
    def const_rg(self) -> "ReplicaGrouping":
        """The grouping itself if it is constant, else a constant one that cuts its groups into smaller ones.

        The groups are cut where the distance of neighbours exceeds the smallest one, and then into the largest size
        that fits all parts.
        """
        if self.is_const:
            return self
        smallest_gap = min(_gaps(self._groups()))
        pieces: list[int] = []
        for group in self._groups():
            pieces.append(1)
            for gap in _gaps([group]):
                if gap == smallest_gap:
                    pieces[-1] += 1
                else:
                    pieces.append(1)
        return _constant(self._ir_ref, len(self._assignment), smallest_gap, math.gcd(*pieces))

    @property
    def to_device_map(self) -> list[int] | None:
        """Map each group of `const_rg` to its enclosing group in this grouping; `None` if constant."""
        if self.is_const:
            return None
        return [self._assignment[first] for first, *_ in self.const_rg._groups()]

    @property
    def to_host_map(self) -> list[int] | None:
        """Map each group to the first contained group of `const_rg`; `None` if constant."""
        if self.is_const:
            return None
        refined = self.const_rg._assignment
        return [refined[first] for first, *_ in self._groups()]

    def transpose(self) -> "ReplicaGrouping":
        """The transposed grouping: group `i` consists of every `i`-th member.

        The transpose of a constant grouping may be non-constant, and the other way round. Variables whose values
        differ within the groups of a collective use the transpose of its grouping.

        Example:
            >>> popxl.Ir(replication=6).replica_grouping(group_size=2).transpose().assignment
            [0, 1, 0, 1, 0, 1]
        """
        num_replicas = len(self._assignment)
        if self._stride == 1:
            return _constant(self._ir_ref, num_replicas, self._group_size, self.num_groups)
        if self._stride is not None and self._stride * self._group_size == num_replicas:
            return _constant(self._ir_ref, num_replicas, 1, self.num_groups)
        members = {replica: i for group in self._groups() for i, replica in enumerate(group)}
        return _from_assignment(self._ir_ref, [members[replica] for replica in range(num_replicas)])

    @property
    def _ir(self) -> "Ir":
        """The Ir of the replicas."""
        ir = self._ir_ref()
        if ir is None:
            raise RuntimeError(f"{self} outlived its Ir. Keep a reference to the Ir, or to one of its graphs.")
        return ir

    def _groups(self) -> list[list[int]]:
        """The replicas of each group."""
        return _groups_of(self._assignment)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReplicaGrouping):
            raise TypeError(
                f"A ReplicaGrouping can be compared with another one only; this is a {type(other).__name__}. "
                "To ask whether a grouping was given, write `is None`."
            )
        return self._ir_ref == other._ir_ref and self._assignment == other._assignment

    def __repr__(self) -> str:
        if self._stride is None:
            return f"ReplicaGrouping(assignment={self._assignment})"
        return (
            f"ReplicaGrouping(num_replicas={len(self._assignment)}, stride={self._stride}, "
            f"group_size={self._group_size}, num_groups={self.num_groups})"
        )


def constant_grouping(ir: "Ir", stride: int = 1, group_size: int | None = None) -> ReplicaGrouping:
    """Group the replicas of `ir` so that neighbours within a group are `stride` apart; see `Ir.replica_grouping`.

    Args:
        ir: Ir of the replicas; held weakly.
        stride: a divisor of the number of replicas. It becomes 1 where groups have one member.
        group_size: number of replicas in a group; the largest possible if `None`. `stride * group_size` must divide the
            number of replicas.

    Raises:
        TypeError: if one of them is not an integer.
        ValueError: if the replicas cannot be grouped like this.
        ZeroDivisionError: if `stride` is 0 and `group_size` is `None`.
    """
    num_replicas = ir.replication_factor
    stride = integer(stride, "replica_grouping: `stride`")
    group_size = num_replicas // stride if group_size is None else integer(group_size, "replica_grouping: `group_size`")
    if not 0 < stride <= num_replicas:
        raise ValueError(
            f"replica_grouping: `stride` is {stride}. Expected 1 to {num_replicas}, the replication factor of the Ir."
        )
    if num_replicas % stride:
        raise ValueError(
            f"replica_grouping: `stride` is {stride}, which does not divide {num_replicas}, the replication factor of "
            "the Ir. Choose a divisor, or set `ir.replication_factor` before making groupings."
        )
    if not 0 < group_size <= num_replicas:
        raise ValueError(
            f"replica_grouping: `group_size` is {group_size}. Expected 1 to {num_replicas}, the replication factor of "
            "the Ir."
        )
    if group_size > 1 and num_replicas % (stride * group_size):
        raise ValueError(
            f"replica_grouping: `stride` {stride} times `group_size` {group_size} is {stride * group_size}, which does "
            f"not divide {num_replicas}, the replication factor of the Ir: some group would lack members. "
            "Choose another stride or group size."
        )
    return _constant(weakref.ref(ir), num_replicas, stride, group_size)


def grouping_along(ir: "Ir", names: Sequence[str], what: str = "grouping") -> ReplicaGrouping:
    """The replicas of `ir` that differ along these axes only are together; see `Ir.grouping`.

    Args:
        ir: Ir of the replicas; held weakly.
        names: some of its axes.

    Raises:
        ValueError: if the Ir has no such axes, an axis is named twice or none is, or the number of replicas has been
            changed since.
    """
    axes = ir.checked_axes(what)
    if axes is None:
        raise ValueError(
            f"{what}: the axes {tuple(names)!r} are named, and {ir!r} has none. Make it with "
            "`popxl.Ir(axes={'data': 2, 'tensor': 4})`, or use `ir.replica_grouping(stride, group_size)`."
        )
    axes.check(names, what)
    strided = axes.strided(names)
    if strided is None:
        return _from_assignment(weakref.ref(ir), axes.assignment(names))
    return _constant(weakref.ref(ir), axes.count, *strided)


def grouping_of(ir: "Ir", group: "Groups | None", what: str) -> ReplicaGrouping:
    """Resolve a grouping argument: a grouping of `ir`, axis names, or `None` for all replicas.

    Raises:
        TypeError: for anything else.
        ValueError: if the Ir has no such axes.

    Example:
        >>> ir = popxl.Ir(axes={"data": 2, "tensor": 3})
        >>> grouping_of(ir, "tensor", "here") == ir.replica_grouping(group_size=3)
        True
    """
    if group is None:
        return constant_grouping(ir)
    if means_groups(group):
        if isinstance(group, ReplicaGrouping):
            return group
        return grouping_along(ir, (group,) if isinstance(group, str) else group, what)
    raise TypeError(
        f"{what} must be a ReplicaGrouping, the name of an axis or several names, or None for all replicas; got "
        f"{group!r} ({type(group).__name__}). Make one with `ir.replica_grouping(stride, group_size)`."
    )


def sharing_of(ir: "Ir", group: "Groups | None", what: str) -> ReplicaGrouping:
    """Resolve a grouping of `ir` for shared values; otherwise like `grouping_of`. Raises `ValueError` for replicas of
    another Ir.

    Example:
        >>> sharing_of(popxl.Ir(replication=2), popxl.Ir(replication=4).replica_grouping(), "here")
        Traceback (most recent call last):
            ...
        ValueError: here groups 4 replicas, and the Ir has 2. Make groupings of the Ir after its replicas are set.
    """
    grouping = grouping_of(ir, group, what)
    if len(grouping._assignment) != ir.replication_factor:
        raise ValueError(
            f"{what} groups {len(grouping._assignment)} replicas, and the Ir has {ir.replication_factor}. Make "
            "groupings of the Ir after its replicas are set."
        )
    return grouping


def with_later_replicas(grouping: ReplicaGrouping) -> ReplicaGrouping:
    """A grouping; or, if it has one group, and the number of replicas of the Ir was set later, one group of all."""
    ir = grouping._ir_ref()
    if ir is None or grouping.num_groups > 1 or grouping.group_size == ir.replication_factor:
        return grouping
    return ir.replica_grouping()


def plain_grouping(num_replicas: int, stride: int, group_size: int) -> ReplicaGrouping:
    """A constant grouping without an Ir."""
    return _constant(_of_no_ir, num_replicas, stride, group_size)


def _of_no_ir() -> None:
    """Placeholder for the Ir reference."""


def grouping_from_assignments(ir: "Ir", assignment: list[int]) -> ReplicaGrouping:
    """Group the replicas of `ir` as listed; see `Ir.replica_grouping_from_assignments`.

    Args:
        ir: Ir of the replicas; held weakly.
        assignment: the group of each replica, numbered from 0 in the order in which the groups appear.

    Returns:
        A constant grouping if the distance between neighbours is constant, else a non-constant one.

    Raises:
        TypeError: if it is not a list of integers.
        ValueError: if groups differ in size, are misnumbered, have one member each, or do not cover all replicas.
    """
    assignment = [*integers(assignment, "replica_grouping_from_assignments: `assignment`")]
    start = f"replica_grouping_from_assignments: `assignment` is {assignment}"
    sizes = Counter(assignment)
    appearing = list(sizes)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} in group {group}" for group, size in sizes.items())
        raise ValueError(f"{start}. Expected groups of equal size; there are {listed}.")
    if sorted(appearing) != list(range(len(appearing))):
        raise ValueError(f"{start}. Expected groups numbered 0 to {len(appearing) - 1}; there are {sorted(appearing)}.")
    if appearing != sorted(appearing):
        raise ValueError(f"{start}. Expected groups numbered in order of appearance; they appear as {appearing}.")
    if len(assignment) != ir.replication_factor:
        raise ValueError(
            f"{start}, of length {len(assignment)}. "
            f"Expected one entry for each of the {ir.replication_factor} replicas of the Ir."
        )
    if len(sizes) == len(assignment):
        raise ValueError(f"{start}. For groups of one member use `ir.replica_grouping(group_size=1)`.")
    return _from_assignment(weakref.ref(ir), assignment)


Groups: TypeAlias = ReplicaGrouping | str | Sequence[str]
"""Types of grouping arguments: a grouping, the name of an axis, or several names."""


def means_groups(value: object) -> TypeGuard[Groups]:
    """Whether a value is a valid grouping argument."""
    if isinstance(value, tuple | list):
        return all(isinstance(name, str) for name in value)
    return isinstance(value, ReplicaGrouping | str)


def _constant(ir_ref: "Callable[[], Ir | None]", num_replicas: int, stride: int, group_size: int) -> ReplicaGrouping:
    if group_size == 1:
        stride = 1
    block = stride * group_size
    return _make(ir_ref, [r % stride + stride * (r // block) for r in range(num_replicas)], stride, group_size)


def _from_assignment(ir_ref: "Callable[[], Ir | None]", assignment: list[int]) -> ReplicaGrouping:
    groups = _groups_of(assignment)
    gaps = set(_gaps(groups))
    return _make(ir_ref, assignment, gaps.pop() if len(gaps) == 1 else None, len(groups[0]))


def _make(
    ir_ref: "Callable[[], Ir | None]", assignment: list[int], stride: int | None, group_size: int
) -> ReplicaGrouping:
    grouping: ReplicaGrouping = object.__new__(ReplicaGrouping)
    grouping._ir_ref, grouping._assignment = ir_ref, assignment
    grouping._stride, grouping._group_size = stride, group_size
    return grouping


def _groups_of(assignment: list[int]) -> list[list[int]]:
    return list(group_by(range(len(assignment)), assignment.__getitem__).values())


def _gaps(groups: list[list[int]]) -> list[int]:
    """The distances between neighbours within groups."""
    return [right - left for group in groups for left, right in pairwise(group)]
