"""PyTorch models as explicit graphs: wrapped `torch.nn.Module`s train or run as single compiled programs.

    model = poptorch.trainingModel(module, options, optimizer)
    output, loss = model(input, target)

The model is captured once (`poptorch.capture`), written as an Ir of popxl (`poptorch.lowering`, `poptorch.program`),
and run by a `popxl.Session` (`poptorch.run`). Start reading with `poptorch.run.executor`.
"""

from poptorch import _poplar_executor as _poplar_executor  # used by packages built on PopTorch
from poptorch import enums, ops, optim, options, poptorch_core, profiling, testing
from poptorch._impl import createPoptorchError
from poptorch.base.custom_types import ICustomArgParser, registerCustomArgParser
from poptorch.base.logging_ import logger, setLogLevel
from poptorch.capture.ids import getIpuTensorId
from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader
from poptorch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    PartialBatch,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.lowering.control import registerCustomOp
from poptorch.ops import (
    CPU,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    nearest,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.options import ConfigFileError, Options, TensorLocationSettings
from poptorch.placement.blocks import (
    Attribute,
    BeginBlock,
    Block,
    BlockFunction,
    MultiConv,
    NameScope,
    module_repr,
    print,
    removeBlocks,
)
from poptorch.placement.capture_context import isRunningOnIpu
from poptorch.placement.strategies import (
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch.run.devices import ipuHardwareIsAvailable, ipuHardwareVersion
from poptorch.run.executor import PoplarExecutor
from poptorch.run.hooks import registerPostCompileHook, registerPreCompileHook
from poptorch.run.wrapping import inferenceModel, load, sessionOf, trainingModel
from popxl import __version__

__all__ = [
    "__version__",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockId",
    "CPU",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "PartialBatch",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "cond",
    "createPoptorchError",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerCustomOp",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "sessionOf",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
]
