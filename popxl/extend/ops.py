"""Declare an op with its gradient: the declaration, its traits, shape rules, and helpers for gradient rules.

Example:
    >>> from popxl.extend.ops import OpKind, like_first
    >>> Cube = OpKind("Cube", lambda x: x**3, shape=like_first, gradient={"x": lambda g, x: g * 3 * x * x})
    >>> Cube(x).shape
    (2, 4)
"""

from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.traits import (
    REFUSED,
    VJP,
    BetweenReplicas,
    Colocated,
    Composite,
    Contracts,
    Draws,
    Drops,
    Effect,
    Exchange,
    OnIpus,
    Overwrites,
    Placed,
    RealOnly,
    RecomputedFrom,
    Requirement,
    Run,
    Runs,
    ShardingRule,
    Trait,
    View,
)
from popxl.ops.complex import NORM
from popxl.ops.convert import cast_if_needed, copied_to_ipu
from popxl.ops.families import ELEMENTWISE, REAL
from popxl.ops.host import print_tensor_kind
from popxl.ops.index import picks_rows
from popxl.ops.linear_cross_entropy import is_fused, logit_chunks
from popxl.ops.memory import available_after_all, recomputed_after, scheduled_after
from popxl.ops.nn import REDUCTION_TYPE, cross_entropy, cross_entropy_with_grad
from popxl.ops.var_updates.adam import adam_direction, minus_correction
from popxl.ops.var_updates.factors import factor, one_number
from popxl.transforms.op_gradient import Forward
from popxl.values.shapes import broadcast, broadcast_shapes, like_first, predicate

__all__ = [
    "BetweenReplicas",
    "Colocated",
    "Contracts",
    "Draws",
    "Drops",
    "ELEMENTWISE",
    "Effect",
    "Exchange",
    "Forward",
    "NORM",
    "OnIpus",
    "Op",
    "OpKind",
    "Overwrites",
    "Placed",
    "REAL",
    "REDUCTION_TYPE",
    "REFUSED",
    "RealOnly",
    "RecomputedFrom",
    "Requirement",
    "Run",
    "Runs",
    "ShardingRule",
    "Composite",
    "Trait",
    "adam_direction",
    "available_after_all",
    "minus_correction",
    "VJP",
    "View",
    "broadcast",
    "broadcast_shapes",
    "cast_if_needed",
    "copied_to_ipu",
    "cross_entropy",
    "cross_entropy_with_grad",
    "factor",
    "like_first",
    "is_fused",
    "logit_chunks",
    "one_number",
    "picks_rows",
    "predicate",
    "print_tensor_kind",
    "recomputed_after",
    "scheduled_after",
]
