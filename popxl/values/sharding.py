"""Distribution of a variable's value over replicas: host values into shards, and shards into values.

A value that is not sharded is complete on every replica of its group. A sharded value is flattened and cut into shards
of equal length, one after the other, the last one padded with zeros; member `i` of a group holds shard `i % count`.
This file handles host arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from popxl.base.group_by import group_by

if TYPE_CHECKING:
    from popxl.core.tensor import Variable
    from popxl.replica_grouping import ReplicaGrouping


def shard_length(shape: Sequence[int], count: int) -> int:
    """Elements per shard of a value with `count` shards."""
    return -(-math.prod(shape) // count)


def shard_count(nelms: int, length: int, members: int) -> int:
    """Number of shards of given length: enough to cover the value, dividing the group size.

    Gathering accepts no other lengths.
    """
    needed = max(1, -(-nelms // max(1, length)))
    return next((n for n in range(needed, members) if members % n == 0), members)


@dataclass(frozen=True)
class ShardLayout:
    """The parts of a variable's values that the replicas hold, as rows of `length` elements.

    Attributes:
        length: capacity of a replica, in elements. Excess elements of a value are left out.
        count: number of shards of a value; `None` if it is not sharded.
    """

    grouping: ReplicaGrouping
    size: int
    length: int
    count: int | None = None

    def shards_of(self, values: np.ndarray) -> np.ndarray:
        """Shards per replica of host values: one value, or one row per group."""
        groups, count = self.grouping.num_groups, self.count or 1
        stored = values.reshape(groups, self.size)[:, : count * self.length]
        rows = np.zeros((groups, count * self.length), values.dtype)
        rows[:, : stored.shape[1]] = stored
        shards = rows.reshape(groups, count, self.length)
        assignment = self.grouping.assignment
        return shards[assignment, [self._positions[replica] % count for replica in range(len(assignment))]]

    def row(self, elements: Callable[[int, int], np.ndarray], replica: int) -> np.ndarray:
        """One replica's shard of lazily computed values.

        Args:
            elements: function that returns a range of the elements of all values on the host, in order, given two
                positions.
            replica: number of the replica.
        """
        position = self._positions[replica] % (self.count or 1)
        value = self.grouping.assignment[replica] * self.size
        start = min(position * self.length, self.size)
        owned = elements(value + start, value + min(start + self.length, self.size))
        return np.pad(owned, (0, self.length - len(owned)))

    def values(self, shards: np.ndarray, all_replicas: bool = False) -> np.ndarray:
        """Values from `shards`: one per group or per replica.

        For a value that exceeds the replicas' capacity, only the elements that they hold: the first ones.
        """
        assignment = self.grouping.assignment
        replicas = range(len(assignment)) if all_replicas else map(assignment.index, range(self.grouping.num_groups))
        holders = np.asarray([self._holders[replica][: self.count or 1] for replica in replicas])
        return shards[holders].reshape(len(holders), -1)[:, : self.size]

    @cached_property
    def first_holders(self) -> dict[int, tuple[int, int]]:
        """First replica to hold each element range of the concatenated host values, so that every stored element
        appears once."""
        ranges = {}
        for group in range(self.grouping.num_groups):
            holders = self._holders[self.grouping.assignment.index(group)]
            for position, replica in enumerate(holders[: self.count or 1]):
                start, stop = (group * self.size + min(k * self.length, self.size) for k in (position, position + 1))
                ranges[replica] = (start, stop)
        return ranges

    @property
    def unstored_ranges(self) -> list[tuple[int, int]]:
        """Elements of concatenated host values without storage on any replica."""
        stored = (self.count or 1) * self.length
        starts = (group * self.size for group in range(self.grouping.num_groups if stored < self.size else 0))
        return [(start + stored, start + self.size) for start in starts]

    @cached_property
    def _values(self) -> list[list[int]]:
        """Replicas that hold the shards of a value, in order, for each value on the replicas."""
        if self.count is None:
            return [[replica] for replica in range(len(self.grouping.assignment))]
        groups = self.grouping.const_rg.assignment
        return [*group_by(range(len(groups)), groups.__getitem__).values()]

    @cached_property
    def _holders(self) -> dict[int, list[int]]:
        """Replicas that hold the shards of the same value, for each replica."""
        return {replica: holders for holders in self._values for replica in holders}

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Position of each replica among the holders of its value."""
        return {replica: i for holders in self._values for i, replica in enumerate(holders)}


def shard_layout(v: Variable) -> ShardLayout:
    """Element range of a variable's value on each replica."""
    buffer, grouping = v.location_info.buffer, v.replica_grouping
    if buffer is None:
        return ShardLayout(grouping, v.nelms, v.nelms)
    length = buffer.slot_nelms
    if not v.location_info.sharded:
        return ShardLayout(grouping, v.nelms, length)
    count, members = buffer.shard_over, grouping.const_rg.group_size
    return ShardLayout(grouping, v.nelms, length, shard_count(v.nelms, length, members) if count is None else count)
