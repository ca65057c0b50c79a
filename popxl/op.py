"""Op declarations, records and traits, under the names that programs import.

No other module imports this one. Read on in `popxl.core.declaration`, `popxl.core.recording` and `popxl.core.traits`.
"""

from popxl.base.source import SourceLocation
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
    Prefetched,
    RealOnly,
    RecomputedFrom,
    Requirement,
    Run,
    Runs,
    ShardingRule,
    Trait,
    View,
)

__all__ = [
    "REFUSED",
    "VJP",
    "BetweenReplicas",
    "Colocated",
    "Contracts",
    "Draws",
    "Drops",
    "Effect",
    "Exchange",
    "OnIpus",
    "Op",
    "OpKind",
    "Overwrites",
    "Placed",
    "Prefetched",
    "RealOnly",
    "RecomputedFrom",
    "Requirement",
    "Run",
    "Runs",
    "ShardingRule",
    "SourceLocation",
    "Composite",
    "StandsFor",
    "Trait",
    "View",
]

StandsFor = Composite
"""The earlier name of `Composite`."""
