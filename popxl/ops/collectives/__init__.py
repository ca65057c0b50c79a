"""Ops that combine the values of replicas, and of the IPUs inside of one."""

from popxl.ops.collectives.all_reduce import (
    all_reduce,
    all_reduce_identical_grad_inputs,
    all_reduce_identical_inputs,
)
from popxl.ops.collectives.all_to_all import replicated_all_to_all, replicated_shift
from popxl.ops.collectives.asserting import assert_replicated
from popxl.ops.collectives.collectives import CommGroup, CommGroupType
from popxl.ops.collectives.group import Group as Group
from popxl.ops.collectives.replicated import (
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_all_reduce_,
    replicated_reduce_scatter,
    replicated_slice,
)

__all__ = [
    "CommGroup",
    "CommGroupType",
    "all_reduce",
    "all_reduce_identical_grad_inputs",
    "all_reduce_identical_inputs",
    "assert_replicated",
    "replica_sharded_slice",
    "replicated_all_gather",
    "replicated_all_reduce",
    "replicated_all_reduce_",
    "replicated_all_to_all",
    "replicated_reduce_scatter",
    "replicated_shift",
    "replicated_slice",
]
