"""The enumerations for options, operations and loaders. Their values are part of the interface."""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "PartialBatch",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


class OutputMode(IntEnum):
    """Selection of a call's results from its micro-batches.

    * `Final`: results of the last micro-batch.
    * `EveryN`: results of every Nth iteration.
    * `All`: results of every micro-batch, in the order of the inputs.
    * `Sum`: the sum over all micro-batches.
    * `Default`: `Final` in training, `All` in inference.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class PartialBatch(IntEnum):
    """Treatment of batches with fewer rows than compiled ones, such as a data set's last.

    * `Compile`: separate programs, compiled for such batches, run it. In training, a step takes the mean over its rows.
    * `Refuse`: it is an error.
    * `Pad`: in inference, its last row is repeated to make a whole batch, and results have the rows that were given. So
      nothing is compiled. It is for models whose results have a row, or several, for each row. Where some have none (a
      mean), where buffers are written, and in training, it is as `Compile`.
    """

    Compile = 0
    Refuse = 1
    Pad = 2


class MeanReductionStrategy(IntEnum):
    """Division strategy for mean gradients over micro-batches and replicas, which affects rounding.

    * `Running`: the accumulator is always the mean of the gradients so far, so it cannot overflow.
    * `Post`: once, after everything has been summed.
    * `PostAndLoss`: by the replicas before the backward pass, by the micro-batches after their sum (deprecated).
    """

    Running = 0
    Post = 1
    PostAndLoss = 2


class ReductionType(IntEnum):
    """Reduction of several values: `Sum`, `Mean` or `NoReduction`."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class DataLoaderMode(IntEnum):
    """Loading mode of a `DataLoader`.

    * `Sync`: when a batch is requested.
    * `Async`: in advance, by a process of its own.
    * `AsyncRebatched`: the same, and workers load single elements which that process puts together, so that no
      worker drops an incomplete batch.
    """

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """Transport of a data set to its reader process: `SharedMemory`, `FileSystem` (a file), `Fork`, `ForkServer`."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(IntEnum):
    """Time of attaching a model to a device: `Always` (at the start), `OnDemand` (once compiled), or `Never`."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(IntEnum):
    """Synchronisation pattern of a replica's IPUs; numerically without effect."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class Liveness(IntEnum):
    """Residence of a phase's tensors on the device, in phased execution."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class AutoStage(IntEnum):
    """Assignment of blocks to stages, unless listed by the user.

    * `SameAsIpu`: the number of the stage is that of the block's unit.
    * `AutoIncrement`: each new block is the next stage.
    """

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(IntEnum):
    """Execution of a `MultiConv`'s convolutions: `Parallel` or `Serial`."""

    Parallel = 0
    Serial = 1


class CommGroupType(IntEnum):
    """Grouping of replicas that share a value; `k` is the group size, `m` the number of groups.

    * `All`: one group.
    * `Consecutive`: `{0, ..., k-1}, {k, ..., 2k-1}, ...`
    * `Orthogonal`: `{0, m, 2m, ...}, {1, m+1, ...}, ...`
    * `NoGrouping`: each replica separately.
    """

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Values of a grouped parameter on the host: each group's first (`OnePerGroup`), or `AllReplicas`'."""

    OnePerGroup = 0
    AllReplicas = 2


class HalfFloatCastingBehavior(IntEnum):
    """Casts of mixed float16 and float32 operands. Deprecated: PyTorch's rules hold."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class MatMulSerializationMode(Enum):
    """Serialised dimension of `serializedMatMul`; `Disabled` does not split."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class OverlapMode(Enum):
    """Overlap of a tensor's transfer with computation, by loop."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"
