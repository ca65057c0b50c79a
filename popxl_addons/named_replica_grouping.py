"""Trees of replica groupings, one for each named variable of a model; and restriction of groups to link domains.

Replicas communicate faster within an *instance*, the replicas of one process, and within an *ild*, the link domain of
devices with direct links. The functions here determine whether groups stay within one, and reduce them so that they do.
They work on the Ir of the current graph, and on constant groupings. With one process and one domain they return their
argument.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

from pydantic import BaseModel, PositiveInt

import popxl
from popxl.context import get_current_context
from popxl.replica_grouping import Groups, sharing_of
from popxl_addons.dot_tree import CLS, DotTree


class NamedReplicaGrouping(DotTree[popxl.ReplicaGrouping]):
    """A tree whose leaves are replica groupings.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> groups = NamedReplicaGrouping.from_dict({"fc.w": ir.replica_grouping(group_size=2)})
        >>> groups.fc.w.assignment
        [0, 0, 1, 1]
    """

    @classmethod
    def build_groups(cls: type[CLS], names: Iterable[str], value: popxl.ReplicaGrouping) -> CLS:
        """Map all `names` to one grouping.

        Example:
            >>> groups = NamedReplicaGrouping.build_groups(["w", "fc.b"], popxl.Ir(replication=2).replica_grouping())
            >>> groups.keys_flat()
            ['w', 'fc.b']
        """
        return cls.from_dict(dict.fromkeys(names, value))


def resolved(group: Groups | None, what: str) -> popxl.ReplicaGrouping:
    """Resolve a grouping argument: axis names of the current Ir, or `None` for all replicas.

    Args:
        group: argument to resolve. A grouping needs no current graph; if there is one, the grouping must be of its
            replicas.

    Raises:
        TypeError, ValueError: for any other type, axes that the Ir does not have, and a grouping of other replicas.

    Example:
        >>> ir = popxl.Ir(axes={"data": 2, "tensor": 3})
        >>> with ir.main_graph:
        ...     resolved("tensor", "here") == ir.replica_grouping(group_size=3)
        True
    """
    if isinstance(group, popxl.ReplicaGrouping) and not get_current_context().has_graph:
        return group
    return sharing_of(popxl.gcg().ir, group, what)


def fill_none_group(
    rg: popxl.ReplicaGrouping | None, none_value: popxl.ReplicaGrouping | None
) -> popxl.ReplicaGrouping | None:
    """`rg`, or `none_value` by default.

    Example:
        >>> fill_none_group(None, everyone := popxl.Ir(replication=2).replica_grouping()) is everyone
        True
    """
    return none_value if rg is None else rg


def get_instance_replica_grouping(replica_grouping: popxl.ReplicaGrouping | None = None) -> popxl.ReplicaGrouping:
    """The grouping, cut into smaller groups if need be, so that each group stays within one process.

    Args:
        replica_grouping: grouping to restrict; by default all replicas.

    Returns:
        The grouping itself if its groups stay within a process already; else one of the same stride.

    Raises:
        ValueError: if the distance of neighbours in a group exceeds the replicas of a process.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     get_instance_replica_grouping() == ir.replica_grouping()
        True
    """
    return _within(_instance_size(), "instance", replica_grouping)


def is_cross_instance(replica_grouping: popxl.ReplicaGrouping) -> bool:
    """Whether groups reach over several processes.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     is_cross_instance(ir.replica_grouping())
        False
    """
    return _crosses(_instance_size(), replica_grouping)


def get_ild_size_from_popdist() -> int:
    """Number of replicas per link domain.

    The number is the field `ipuLinkDomainSize` of the JSON object in the environment variable `POPLAR_TARGET_OPTIONS`,
    where a launcher of several processes may put it. Without it a domain is taken to have 64 replicas, or all if there
    are fewer; with several processes there is a warning about that.

    Raises:
        ValueError: if the variable holds something else.

    Example:
        >>> with popxl.Ir(replication=4).main_graph:
        ...     get_ild_size_from_popdist()
        4
    """
    stated = _TargetOptions.model_validate_json(os.environ.get("POPLAR_TARGET_OPTIONS") or "{}").ipuLinkDomainSize
    if stated is not None:
        return stated
    total = popxl.gcg().ir.replication_factor
    size = min(total, 64)
    if _instance_size() < total:
        warnings.warn(
            f"The size of a link domain is not known: {size} is assumed. Set POPLAR_TARGET_OPTIONS, for example to "
            f"'{{\"ipuLinkDomainSize\": {size}}}'.",
            stacklevel=1,  # this line, so that the warning appears once in a process
        )
    return size


def get_ild_replica_grouping(replica_grouping: popxl.ReplicaGrouping | None = None) -> popxl.ReplicaGrouping:
    """The grouping, cut into smaller groups if need be, so that each group stays within one link domain.

    Args:
        replica_grouping: grouping to restrict; by default all replicas.

    Returns:
        The grouping itself if its groups stay within a link domain already; else one of the same stride.

    Raises:
        ValueError: if the distance of neighbours in a group exceeds the replicas of a link domain.

    Example:
        >>> ir = popxl.Ir(replication=128)
        >>> with ir.main_graph:
        ...     get_ild_replica_grouping(ir.replica_grouping(stride=4)).group_size
        16
    """
    return _within(get_ild_size_from_popdist(), "link domain", replica_grouping)


def is_cross_ild(replica_grouping: popxl.ReplicaGrouping) -> bool:
    """Whether groups reach over several link domains.

    Example:
        >>> ir = popxl.Ir(replication=128)
        >>> with ir.main_graph:
        ...     is_cross_ild(ir.replica_grouping()), is_cross_ild(ir.replica_grouping(group_size=64))
        (True, False)
    """
    return _crosses(get_ild_size_from_popdist(), replica_grouping)


class _TargetOptions(BaseModel):
    ipuLinkDomainSize: PositiveInt | None = None


def _instance_size() -> int:
    return popxl.gcg().ir.instance_replication_factor


def _crosses(size: int, group: popxl.ReplicaGrouping) -> bool:
    # With one domain the grouping is not inspected, and need not be constant.
    return size < popxl.gcg().ir.replication_factor and group.group_size * group.stride > size


def _within(size: int, domain: str, replica_grouping: popxl.ReplicaGrouping | None) -> popxl.ReplicaGrouping:
    ir = popxl.gcg().ir
    group = ir.replica_grouping() if replica_grouping is None else replica_grouping
    if not _crosses(size, group):
        return group
    if group.stride > size:
        raise ValueError(
            f"Assignment pattern is different across {domain}s: neighbours in {group} are {group.stride} replicas "
            f"apart, and each {domain} has only {size} replicas. Choose a grouping with a stride of at most {size}."
        )
    return ir.replica_grouping(group.stride, size // group.stride)
