"""Trees of replica groupings: which replicas share each of the named variables of a model."""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl_addons.dot_tree import DotTree


class NamedReplicaGrouping(DotTree[popxl.ReplicaGrouping]):
    """A tree whose leaves are replica groupings."""

    @classmethod
    def build_groups(cls, names: Iterable[str], value: popxl.ReplicaGrouping) -> NamedReplicaGrouping:
        """The same grouping under each of the `names`.

        Example:
            >>> groups = NamedReplicaGrouping.build_groups(["w", "fc.b"], popxl.Ir(replication=2).replica_grouping())
            >>> groups.keys_flat()
            ['w', 'fc.b']
        """
        return cls.from_dict(dict.fromkeys(names, value))


def fill_none_group(
    rg: popxl.ReplicaGrouping | None, none_value: popxl.ReplicaGrouping | None
) -> popxl.ReplicaGrouping | None:
    """`rg`, or `none_value` where no grouping was given.

    Example:
        >>> fill_none_group(None, everyone := popxl.Ir(replication=2).replica_grouping()) is everyone
        True
    """
    return none_value if rg is None else rg
