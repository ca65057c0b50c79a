"""Locations of tensors, and execution contexts of ops, as plain names.

They have no effect by themselves: functions that create variables choose the memory, the contexts `popxl.ipu` and
`popxl.io_tiles` the placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from popxl.errors import PopxlError

if TYPE_CHECKING:
    from popxl.remote_buffer import RemoteBuffer


class TensorStorage(Enum):
    """Memory that holds a tensor: the device's own, or the host's."""

    OnChip = "OnChip"
    OffChip = "OffChip"


class ReplicatedTensorSharding(Enum):
    """Whether replicas hold shards of a tensor."""

    On = "On"
    Off = "Off"


class TileSet(Enum):
    """Tile set of an op's placement on an IPU. `N` is a list terminator."""

    Compute = 0
    IO = 1
    Undefined = 2
    N = 3


class ExecutionContext(Enum):
    """Program fragment of an op.

    In PopXL they run in the order: from the host, normal, outer accumulation, to the host. Here they are separate for
    `popxl.in_sequence` and for the check of in-place ambiguity, and each run executes the ops of all of them, in
    creation order.
    """

    Normal = 0
    AccumulateOuterFragment = 1
    WeightsFromHostFragment = 2
    WeightsToHostFragment = 3
    OptimizerFromHostFragment = 4
    Subgraph = 5


@dataclass(frozen=True)
class TensorLocation:
    """Storage location and sharding of a tensor.

    Example:
        >>> popxl.TensorLocation(popxl.TensorStorage.OffChip, popxl.ReplicatedTensorSharding.On)
    """

    storage: TensorStorage = TensorStorage.OnChip
    replicated_tensor_sharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off


@dataclass(frozen=True)
class LocationInfo:
    """Location of tensor values: device memory, or a remote buffer slot.

    Attributes:
        buffer: the buffer; `None` on the device.
        entry: the number of the slot.
        sharded: whether each replica has only one shard of the value.
    """

    buffer: RemoteBuffer | None = None
    entry: int = 0
    sharded: bool = False

    def isRemote(self) -> bool:
        """Whether values are in a remote buffer."""
        return self.buffer is not None

    def isSharded(self) -> bool:
        """Whether each replica holds one shard."""
        return self.sharded

    def getRemoteBufferInfo(self) -> tuple[int, int]:
        """Buffer number and slot number. Raises `PopxlError` for tensors outside buffers."""
        if self.buffer is None:
            raise PopxlError("getRemoteBufferInfo: the tensor is in no remote buffer; ask `isRemote()` first.")
        return (self.buffer.remote_buffer_id, self.entry)


ON_DEVICE = LocationInfo()
