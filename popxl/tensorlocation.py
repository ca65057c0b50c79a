"""Where a tensor lives and what kind of work an op belongs to, as plain names.

Nothing here acts: memory is chosen by the functions that create variables, placement by the contexts `popxl.ipu` and
`popxl.io_tiles`.
"""

from dataclasses import dataclass
from enum import Enum


class TensorStorage(Enum):
    """Which memory holds a tensor: the device's own, or the host's."""

    OnChip = "OnChip"
    OffChip = "OffChip"


class ReplicatedTensorSharding(Enum):
    """Whether each replica holds only a piece of a tensor."""

    On = "On"
    Off = "Off"


class TileSet(Enum):
    """The part of an IPU that an op was placed on. `N` ends the list and places nothing."""

    Compute = 0
    IO = 1
    Undefined = 2
    N = 3


class ExecutionContext(Enum):
    """The fragment of the program that an op belongs to.

    They run in the order: from the host, normal, outer accumulation, to the host.
    """

    Normal = 0
    AccumulateOuterFragment = 1
    WeightsFromHostFragment = 2
    WeightsToHostFragment = 3
    OptimizerFromHostFragment = 4
    Subgraph = 5


@dataclass(frozen=True)
class TensorLocation:
    """A record of where a tensor is stored and whether it is sharded over replicas.

    Example:
        TensorLocation(TensorStorage.OffChip, ReplicatedTensorSharding.On)
    """

    storage: TensorStorage = TensorStorage.OnChip
    replicated_tensor_sharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off
