"""PyTorch models as explicit graphs: wrap a `torch.nn.Module`, and it is trained or run as one compiled program.

    model = poptorch.trainingModel(module, options, optimizer)
    output, loss = model(input, target)

The model is captured once (`poptorch.capture`), written as an Ir of popxl (`poptorch.lowering`, `poptorch.program`), and
run by a `popxl.Session`. `poptorch.executor` is where to begin reading.
"""

from popxl import __version__
from poptorch import enums, ops, optim, options, profiling
from poptorch._impl import createPoptorchError
from poptorch.ambient import isRunningOnIpu
from poptorch.arguments import ICustomArgParser, registerCustomArgParser
from poptorch.async_data import AsynchronousDataAccessor
from poptorch.blocks import (
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
from poptorch.capture.ids import getIpuTensorId
from poptorch.dataloader import DataLoader
from poptorch.devices import ipuHardwareIsAvailable, ipuHardwareVersion
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
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.executor import PoplarExecutor, inferenceModel, load, trainingModel
from poptorch.hooks import registerPostCompileHook, registerPreCompileHook
from poptorch.logging_ import setLogLevel
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
from poptorch.options import Options, TensorLocationSettings
from poptorch.strategies import (
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
