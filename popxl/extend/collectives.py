"""Ops that exchange values between replicas: the communication group of a lowering, and lengths of shards.

An op with the trait `BetweenReplicas` is lowered with a `Group`, whose methods gather, reduce and shift arrays.

Example:
    >>> from popxl.extend.collectives import shard_length
    >>> shard_length((5,), 2)  # elements of each of 2 shards
    3
"""

from popxl.analysis.communication import exchanges_of
from popxl.ops.collectives.collectives import OP_MAP, members, to_collective_op
from popxl.ops.collectives.group import Group
from popxl.ops.collectives.replicated import all_gather_kind, reduce_scatter_kind
from popxl.values.sharding import shard_count, shard_length

__all__ = [
    "Group",
    "OP_MAP",
    "all_gather_kind",
    "exchanges_of",
    "members",
    "shard_count",
    "shard_length",
    "reduce_scatter_kind",
    "to_collective_op",
]
