"""`Options`: everything that can be said about how a model is compiled and run.

Each group declares its settings in its class body, with what they accept and what they do here; its methods store
them. `python -m poptorch options` prints a page of all of them. What settings are made of is in `poptorch.settings`,
how files and JSON are read in `poptorch.option_files`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import ValidationError

import popxl
from poptorch import enums, strategies
from poptorch.enums import (
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from poptorch.errors import Error
from poptorch.logging_ import logger
from poptorch.option_files import ConfigFileError, run_calls, run_lines
from poptorch.replica_groups import ReplicaGroups
from poptorch.settings import NO_EFFECT, Group, OptionsDict, group, setting, table
from poptorch.strategies import PipelinedExecution, _IExecutionStrategy
from popxl.options import SessionOptions

_Group = TypeVar("_Group", bound=OptionsDict)

__all__ = ["Anchor", "ConfigFileError", "Options", "TensorLocationSettings", "options_page"]


def _positive(value: int) -> bool:
    return value > 0


def _strings(value: Iterable[object]) -> bool:
    return all(isinstance(each, str) for each in value)


def _fraction(value: float) -> bool:
    return 0 <= value <= 1


class TensorLocationSettings(OptionsDict):
    """Where tensors of one kind are stored.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> location = poptorch.TensorLocationSettings().useOnChipStorage(False)
        >>> _ = options.TensorLocations.setActivationLocation(location)
    """

    min_elements_for_off_chip: int | None = setting(
        None, NO_EFFECT, "minElementsForOffChip", kind=int | None, shown="unset"
    )
    min_elements_for_replicated_tensor_sharding: int | None = setting(
        None, NO_EFFECT, "minElementsForReplicatedTensorSharding", kind=int | None, shown="unset"
    )
    use_on_chip_storage: bool | None = setting(None, NO_EFFECT, "useOnChipStorage", kind=bool | None, shown="unset")
    use_replicated_tensor_sharding: bool | None = setting(
        None, NO_EFFECT, "useReplicatedTensorSharding", kind=bool | None, shown="unset"
    )
    use_io_tiles_to_load: bool | None = setting(None, NO_EFFECT, "useIOTilesToLoad", kind=bool | None, shown="unset")
    use_io_tiles_to_store: bool | None = setting(None, NO_EFFECT, "useIOTilesToStore", kind=bool | None, shown="unset")

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep tensors of fewer elements on the device."""
        return self._set(min_elements_for_off_chip=min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not split tensors of fewer elements over replicas."""
        return self._set(min_elements_for_replicated_tensor_sharding=min_elements)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Store the tensors in the device's memory (True), in the host's (False), or where it suits (None)."""
        return self._set(use_on_chip_storage=use)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Split the tensors over the replicas, each of which stores a part."""
        return self._set(use_replicated_tensor_sharding=use)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load the tensors through IO tiles."""
        return self._set(use_io_tiles_to_load=use)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store the tensors through IO tiles."""
        return self._set(use_io_tiles_to_store=use)


class _TensorLocationOptions(OptionsDict):
    """Where tensors are stored; `options.TensorLocations`. It never changes a number.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        >>> _ = options.TensorLocations.numIOTiles(32).setOptimizerLocation(location)
    """

    num_io_tiles: int | None = setting(
        None,
        "no effect here, but overlapped IO needs some",
        "numIOTiles",
        kind=int | None,
        valid=lambda count: count is None or (32 <= count <= 192 and count % 2 == 0),
        expects="an even number from 32 to 192",
        words="numIOTiles must be an even number between 32 and 192.",
        shown="none",
    )
    activation_location: TensorLocationSettings = setting(
        TensorLocationSettings(), NO_EFFECT, "setActivationLocation", shown="unset"
    )
    weight_location: TensorLocationSettings = setting(
        TensorLocationSettings(), NO_EFFECT, "setWeightLocation", shown="unset"
    )
    optimizer_location: TensorLocationSettings = setting(
        TensorLocationSettings(), NO_EFFECT, "setOptimizerLocation", shown="unset"
    )
    accumulator_location: TensorLocationSettings = setting(
        TensorLocationSettings(), NO_EFFECT, "setAccumulatorLocation", shown="unset"
    )

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Set tiles aside for transfers.

        Args:
            num_tiles: an even number from 32 to 192.
        """
        return self._set(num_io_tiles=num_tiles)

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where activations are stored."""
        return self._set(activation_location=location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where weights are stored."""
        return self._set(weight_location=location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where the state of the optimiser is stored."""
        return self._set(optimizer_location=location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where accumulated gradients are stored."""
        return self._set(accumulator_location=location)


class _TrainingOptions(OptionsDict):
    """What concerns training only; `options.Training`.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> _ = options.Training.gradientAccumulation(4)
        >>> options.Training.gradient_accumulation
        4
    """

    gradient_accumulation: int = setting(
        1,
        "gradients of this many micro-batches are accumulated before each optimiser step",
        "gradientAccumulation",
        valid=_positive,
        expects="a positive integer",
    )
    accumulation_and_replication_reduction_type: ReductionType = setting(
        ReductionType.Mean,
        "the step uses the mean, or the sum, of the gradients of all micro-batches and replicas",
        "accumulationAndReplicationReductionType",
        valid=lambda reduction: reduction in (ReductionType.Sum, ReductionType.Mean),
        expects="ReductionType.Sum or ReductionType.Mean",
        error=ValueError,
        shown="Mean",
    )
    mean_accumulation_and_replication_reduction_strategy: MeanReductionStrategy = setting(
        MeanReductionStrategy.Post,
        "when a mean is divided, which decides its rounding and whether float16 gradients overflow",
        "setMeanAccumulationAndReplicationReductionStrategy",
        shown="Post; Running if the optimiser accumulates in float16",
    )
    automatic_loss_scaling: bool = setting(
        False, "the loss scale is state of the program, adjusted to the gradients in float16", "setAutomaticLossScaling"
    )
    convolution_dithering: bool | None = setting(
        None, NO_EFFECT, "setConvolutionDithering", kind=bool | None, shown="unset"
    )

    @property
    def meanAccumulationAndReplicationReductionStrategy(self) -> MeanReductionStrategy:
        """When a mean is divided."""
        return self.mean_accumulation_and_replication_reduction_strategy

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Accumulate the gradients of so many micro-batches before each step of the optimiser.

        A call then takes so many times the rows, and layers that look at the batch still see one micro-batch.

        Args:
            gradient_accumulation: the number of micro-batches.

        Raises:
            AssertionError: if it is no positive integer.
        """
        return self._set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> _TrainingOptions:
        """Step by the mean, or by the sum, of the gradients of all micro-batches and replicas.

        It is independent of the reduction in the loss itself.

        Args:
            reduction_type: `Mean` or `Sum`.

        Raises:
            ValueError: if it is anything else.
        """
        return self._set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> _TrainingOptions:
        """When to divide, where the step is by a mean.

        Args:
            mean_reduction_strategy: `Running` cannot overflow; `Post` is faster; `PostAndLoss` is deprecated.
        """
        return self._set(mean_accumulation_and_replication_reduction_strategy=mean_reduction_strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Adjust the loss scale during training, so that gradients in float16 neither overflow nor vanish.

        After each step it is halved if a gradient in float16 was greater than an eighth of the largest number of
        float16, or was none, in any micro-batch; else it is doubled, up to 2¹⁵. Where all gradients are in float32 it
        stays. `optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]` is what `loss_scaling` is multiplied by in
        the next run, and a tensor that is anchored under `"finalLossScale"` is the product.
        """
        return self._set(automatic_loss_scaling=enabled)

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Lay convolutions out from different tiles."""
        return self._set(convolution_dithering=enabled)


class _PrecisionOptions(OptionsDict):
    """How numbers are rounded and checked; `options.Precision`.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> _ = options.Precision.enableFloatingPointExceptions(True)
    """

    floating_point_exceptions: bool = setting(
        False,
        "an operation that makes NaN or an infinity of other numbers (0/0, x/0, 0*inf, an overflow, the root of a "
        "negative number), and a comparison of NaN, raises an Error; the program runs op by op for that, which is slow",
        "enableFloatingPointExceptions",
    )
    stochastic_rounding: bool = setting(False, NO_EFFECT, "enableStochasticRounding")
    partials_type: torch.dtype = setting(
        torch.float,
        NO_EFFECT,
        "setPartialsType",
        valid=lambda dtype: dtype in (torch.float, torch.half),
        expects="torch.float or torch.half",
        error=ValueError,
    )
    half_float_casting: HalfFloatCastingBehavior = setting(
        HalfFloatCastingBehavior.Default, f"{NO_EFFECT}; deprecated", "halfFloatCasting", shown="Default"
    )
    running_statistics_always_float: bool = setting(True, f"{NO_EFFECT}; deprecated", "runningStatisticsAlwaysFloat")

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Raise an `Error` where a running program divides by zero, overflows, makes NaN or compares it. It is slow."""
        return self._set(floating_point_exceptions=enabled)

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round results in float16 up or down at random, so that they are right on average."""
        return self._set(stochastic_rounding=enabled)

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """The type in which matrix products and convolutions accumulate.

        Args:
            dtype: `torch.float` or `torch.half`.

        Raises:
            ValueError: if it is another.
        """
        return self._set(partials_type=dtype)

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> _PrecisionOptions:
        """Deprecated, and without effect: operands of mixed types follow PyTorch's rules."""
        return _deprecated(self._set(half_float_casting=half_float_casting), "Precision.halfFloatCasting")

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Deprecated, and without effect: running statistics have the type of their buffers."""
        return _deprecated(self._set(running_statistics_always_float=value), "Precision.runningStatisticsAlwaysFloat")


class _JitOptions(OptionsDict):
    """What concerned PyTorch's JIT compiler; `options.Jit`. Nothing is left of it."""

    trace_model: bool = setting(
        False,
        f"{NO_EFFECT}; deprecated",
        "traceModel",
        valid=lambda trace_model: not trace_model,
        expects="False: models are no longer traced by PyTorch's JIT compiler",
        error=ValueError,
    )

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Deprecated, and without effect.

        Raises:
            ValueError: if it is True: models are no longer traced by PyTorch's JIT compiler.
        """
        return _deprecated(self._set(trace_model=trace_model), "Jit.traceModel")


def _deprecated(group: _Group, method: str) -> _Group:
    logger.warning("Options.%s is deprecated and has no effect; leave it out.", method)
    return group


_OMPI_NAMES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


def _environment_integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ValueError(f"The environment variable {name} is {text!r}; expected an integer.") from None


class _DistributedOptions(OptionsDict):
    """Which of several processes this is; `options.Distributed`.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> options.Distributed.configureProcessId(0, 2).numProcesses
        2
    """

    process_id: int = setting(
        0,
        "which part of the data set this process reads",
        "configureProcessId",
        make=lambda: _environment_integer(_OMPI_NAMES[1], 0),
        shown="the environment variable OMPI_COMM_WORLD_RANK, or 0",
    )
    num_processes: int = setting(
        1,
        "how many parts the data set is in",
        "configureProcessId",
        valid=_positive,
        expects="a positive integer",
        make=lambda: _environment_integer(_OMPI_NAMES[0], 1),
        shown="the environment variable OMPI_COMM_WORLD_SIZE, or 1",
    )

    @property
    def processId(self) -> int:
        """The number of this process, from 0."""
        return self.process_id

    @property
    def numProcesses(self) -> int:
        """The number of processes."""
        return self.num_processes

    distributed_process_id, num_distributed_processes = processId, numProcesses

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Say which process this is.

        Args:
            process_id: its number, from 0.
            num_processes: how many there are.

        Raises:
            AssertionError: if there is no such process.
        """
        if isinstance(process_id, int) and isinstance(num_processes, int) and not 0 <= process_id < num_processes:
            raise AssertionError(
                f"Distributed.configureProcessId: `process_id` is {process_id} of {num_processes} processes; expected "
                "a number from 0 to one less than their number."
            )
        return self._set(process_id=process_id, num_processes=num_processes)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read from the environment which process this is; done at first with the names that OpenMPI uses.

        Args:
            var_num_processes: the variable with the number of processes; they are 1 if it is not set.
            var_process_id: the variable with the number of this process; it is 0 if it is not set.

        Raises:
            ValueError: if one is no integer.
            AssertionError: if there is no such process.
        """
        return self.configureProcessId(
            _environment_integer(var_process_id, 0), _environment_integer(var_num_processes, 1)
        )

    def disable(self) -> _DistributedOptions:
        """Be the only process, whatever the environment says."""
        return self.configureProcessId(0, 1)


_SESSION_OPTIONS = frozenset(SessionOptions.model_fields) | frozenset(
    """accumulateOuterFragmentSettings accumulationAndReplicationReductionType accumulationFactor
    accumulatorTensorLocationSettings activationTensorLocationSettings autodiffSettings
    automaticLossScalingSettings autoRecomputation batchSerializationSettings bufferingDepthMap
    compilationProgressLogger compilationProgressTotal compileEngine convolutionOptions
    createHostTransferableTensorWithOffset createImplicitPipeliningFwdOnlyProgram customCodeletCompileFlags
    customCodelets defaultBufferingDepth defaultPrefetchBufferingDepth delayVarUpdates developerSettings
    disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams dotOpNames
    enableConstantFoldingOfMultipleConsumers enableExplicitIR enableFloatingPointChecks
    enableFullyConnectedPass enableGradientAccumulation enableLoadAndOffloadRNGState enableMergeExchange
    enableNonStableSoftmax enableOutlining enableOutliningCopyCostPruning enablePipelining
    enablePrefetchDatastreams enableRngStateManagement enableSerializedMatmuls enableStableNorm
    enableSupportedDataTypeCasting ensureFp32LossScaleTensor executionPhaseSettings experimentalSettings
    exportPoplarComputationGraph exportPoplarVertexGraph finalDotOp firstDotOp gclOptions groupHostSync
    groupNormStridedChannelGrouping hardwareInstrumentations implicitPipeliningEnabled
    instrumentWithHardwareCycleCounter kahnTieBreaker looseThresholdAtPeak lstmOptions matmulOptions
    meanAccumulationAndReplicationReductionStrategy mergeVarUpdate mergeVarUpdateMemThreshold
    optimizerStateTensorLocationSettings opxAliasChecking opxModifyChecking outlineSequenceBreakCost
    outlineThreshold prefetchBufferingDepthMap rearrangeAnchorsOnHost rearrangeStreamsOnHost
    replicatedCollectivesSettings reportOptions saveInitializersToFile
    scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs serializedPoprithmsShiftGraphsDir
    stashAllTensorsInferencePipeline strictOpVersions subgraphCopyingStrategy swapLimitScheduler
    syntheticDataMode tensorLocationSettingsOverride timeLimitScheduler transitiveClosureOptimizationThreshold
    updatableNamedBuffers useLoopCandidateCreator weightTensorLocationSettings""".split()
)


class _PopartOptions(OptionsDict):
    """Session options by their own names, for programs that reach below poptorch; `options._Popart`."""

    options: dict[str, Any] = setting(
        {},
        "those that `popxl.Ir.options` has (`placement`, `calledGraphs`, `remoteBuffers`) have their effect there, and "
        "others none; a name that no session option has raises an Error",
        "set",
    )
    patterns: dict[str, bool] = setting({}, NO_EFFECT, "setPatterns")
    patterns_level: int = setting(2, NO_EFFECT, "setPatterns")
    engine_options: dict[str, str] = setting(
        {},
        NO_EFFECT,
        "setEngineOptions",
        valid=lambda options: _strings([*options, *options.values()]),
        expects="a dict of strings",
    )

    def set(self, key: str, value: Any) -> _PopartOptions:
        """Set one session option.

        Args:
            key: its name, `"decomposeGradSum"`; or that of a part of it, `"batchSerializationSettings.factor"`.
            value: its value; `check` looks at its type.

        Raises:
            Error: if there is no such option.
        """
        if key.split(".")[0] not in _SESSION_OPTIONS:
            raise Error(
                f"Unknown session option {key!r}: `options._Popart.set` takes the names of PopART's session options."
            )
        return self._set(options={**self.options, key: value})

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> _PopartOptions:
        """Switch rewriting patterns on or off.

        Args:
            patterns: whether to use each.
            level: which others to use, from 0 (none) to 3 (all).
        """
        return self._set(patterns=dict(patterns), patterns_level=level)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> _PopartOptions:
        """Set options of the engine, replacing those set before."""
        return self._set(engine_options=dict(engine_options))

    def check(self) -> None:
        """To be called when a model is compiled: whether all values are of types that session options have.

        Raises:
            Error: if one is not a bool, a number, a string, an enum, or a list or dictionary of these.
        """
        for key, value in self.options.items():
            if not _is_session_value(value):
                raise Error(
                    f"Session option {key!r} is {value!r}, a {type(value).__name__}; expected a bool, a number, a "
                    "string, an enum, or a list or dictionary of these."
                )

    def apply(self, to: SessionOptions) -> None:
        """Set the options of an Ir that were set here, but for the number of replicas, which it knows.

        Raises:
            Error: if one does not take its value.
        """
        for key, value in self.options.items():
            if key in SessionOptions.model_fields and "replica" not in key.lower():
                try:
                    setattr(to, key, value)
                except ValidationError as problem:
                    raise Error(f"Session option {key!r} is {value!r}: {problem.errors()[0]['msg']}.") from None


def _is_session_value(value: object) -> bool:
    if isinstance(value, Mapping):
        return _strings(value) and all(map(_is_session_value, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_session_value, value))
    return isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class Anchor:
    """A tensor within a model that is kept at each run.

    Args:
        long_name: its name in the program.
        output_mode: which of its values are kept; None: as those of results.
        output_return_period: every how many iterations, with `OutputMode.EveryN`.
    """

    long_name: str
    output_mode: OutputMode | None = None
    output_return_period: int = 1


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false")


def _json_variable(name: str) -> dict[str, Any]:
    """What an environment variable says that holds a JSON object."""
    text = os.environ.get(name) or "{}"
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(f"The environment variable {name} is {text!r}; expected a JSON object.") from None


def _profile_dir_of_environment() -> str | None:
    """The folder for reports that the environment names."""
    engine, tracing = _json_variable("POPLAR_ENGINE_OPTIONS"), _json_variable("PVTI_OPTIONS")
    return engine.get("autoReport.directory") or tracing.get("directory")


def _profile_dir_asked_for() -> str | None:
    """The folder for reports, where the environment asks for some."""
    asked = _json_variable("POPLAR_ENGINE_OPTIONS").get("autoReport.all") or _json_variable("PVTI_OPTIONS").get(
        "enable"
    )
    return (_profile_dir_of_environment() or ".") if asked == "true" else None


def _library_folders() -> list[str]:
    return [f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__, popxl.__file__)]


class Options(OptionsDict):
    """Everything that can be said about how a model is compiled and run.

    Methods set, and return the options, so that calls chain; attributes of the same names in lower case read:
    `deviceIterations(2)`, `device_iterations`. What uses options freezes them: change a `clone()`.

    The environment is asked once, when options are made: `POPTORCH_DEFAULT_OPTIONS` (as for `from_json`),
    `POPTORCH_CACHE_DIR`, `POPTORCH_IPU_MODEL`, `POPTORCH_SMALL_IPU_MODEL`, `POPLAR_ENGINE_OPTIONS`,
    `PVTI_OPTIONS`, `OMPI_COMM_WORLD_SIZE` and `OMPI_COMM_WORLD_RANK`.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options().deviceIterations(10).outputMode(poptorch.OutputMode.EveryN, 5)
        >>> _ = options.Training.gradientAccumulation(4)
        >>> options.device_iterations, options.output_return_period
        (10, 5)
    """

    device_iterations: int = setting(
        1,
        "optimiser steps (forward passes, in inference) of one call, which takes so many times the rows",
        "deviceIterations",
        valid=_positive,
        expects="a positive integer",
    )
    replication_factor: int = setting(
        1,
        "copies of the model that work at the same time, each on its part of the rows",
        "replicationFactor",
        valid=_positive,
        expects="a positive integer",
    )
    input_group_size: int = setting(1, "so many replicas receive the same rows", "inputReplicaGrouping")
    input_group_type: CommGroupType = setting(
        CommGroupType.Consecutive, "which replicas receive the same rows", "inputReplicaGrouping", shown="Consecutive"
    )
    output_mode: OutputMode = setting(
        OutputMode.Default,
        "which results of a call come back",
        "outputMode",
        shown="Default: Final in training, All in inference",
    )
    output_return_period: int = setting(1, "every how many iterations, with `OutputMode.EveryN`", "outputMode")
    broadcast_buffers: bool = setting(
        True,
        "models that write a buffer are refused where there are several replicas; if False, each has its own copy",
        "broadcastBuffers",
    )
    random_seed: int | None = setting(
        None,
        "random numbers of models, and the order of shuffled data, are the same in every run of the program",
        "randomSeed",
        kind=int | None,
        shown="unset",
    )
    anchored_tensors: dict[str, Anchor] = setting(
        {}, "tensors within the model that `getAnchoredTensor` gives", "anchorTensor", shown="none"
    )
    model_name: str | None = setting(
        None, "the name of the model in reports", "modelName", kind=str | None, shown="training or inference"
    )
    executable_cache: str | None = setting(
        None,
        "the folder in which compiled programs are kept, so that they are not compiled again",
        "enableExecutableCaching",
        kind=str | None,
        make=lambda: os.environ.get("POPTORCH_CACHE_DIR") or None,
        shown="the environment variable POPTORCH_CACHE_DIR, or none",
        of_the_run=True,
    )
    profile_dir: str | None = setting(
        None,
        "the folder to which reports about the model are written",
        "enableProfiling",
        kind=str | None,
        make=_profile_dir_asked_for,
        shown="none, unless POPLAR_ENGINE_OPTIONS or PVTI_OPTIONS asks for reports",
        of_the_run=True,
    )
    log_dir: str = setting(".", f"{NO_EFFECT}: messages go to Python's logging", "logDir", of_the_run=True)
    max_repeat_logs: int | None = setting(4, NO_EFFECT, "maxRepeatLogs", kind=int | None)
    show_compilation_progress_bar: bool = setting(
        True,
        "a progress bar is shown while a model is compiled, and the time that took is kept",
        "showCompilationProgressBar",
    )
    relax_optimizer_attributes_checks: bool = setting(
        False,
        "unknown attributes of optimisers are a debug message rather than a warning",
        "relaxOptimizerAttributesChecks",
    )
    module_namescope_enabled: bool = setting(
        True, "operations are named after the modules that they are in", "disableModuleNamescope"
    )
    source_location_excludes: list[str] = setting(
        [],
        "frames whose file contains one of these are skipped, where it is said who made an operation",
        "sourceLocationExcludes",
        valid=_strings,
        expects="a list of strings",
        make=_library_folders,
        shown="the folders of torch and of this library",
    )
    updatable_named_buffers: list[str] = setting(
        [],
        "the buffers that `copyNamedBuffersToDevice` writes",
        "updatableNamedBuffers",
        valid=_strings,
        expects="a list of strings",
        shown="none",
    )
    connection_type: ConnectionType = setting(
        ConnectionType.Always,
        "when a model is attached to its device; `Never` only compiles",
        "connectionType",
        shown="Always",
    )
    execution_strategy: _IExecutionStrategy = setting(
        PipelinedExecution(),
        "which units and stages blocks belong to; the rules that make a program valid are checked",
        "setExecutionStrategy",
        kind=_IExecutionStrategy,
        expects="an execution strategy, such as poptorch.ShardedExecution()",
    )
    auto_round_num_ipus: bool = setting(
        False, "a number of units that is no power of two is accepted rather than an Error", "autoRoundNumIPUs"
    )
    synthetic_data: bool = setting(
        False,
        "inputs are noise that the device makes; nothing is transferred, and results mean nothing",
        "enableSyntheticData",
    )
    stable_norm: bool = setting(
        False, "variances of normalisations are computed in two passes in any case", "enableStableNorm"
    )
    ipu_model: bool = setting(
        False,
        "models run on the CPU",
        "useIpuModel",
        make=lambda: _flag("POPTORCH_IPU_MODEL") or _flag("POPTORCH_SMALL_IPU_MODEL"),
        shown="False, unless POPTORCH_IPU_MODEL or POPTORCH_SMALL_IPU_MODEL is set",
    )
    ipu_id: int | None = setting(
        None, "the number of the device that models run on", "useIpuId", kind=int | None, shown="any"
    )
    ipu_version: int | None = setting(
        None,
        "models are only compiled, for no device of this machine; the version itself has no effect here",
        "useOfflineIpuTarget",
        kind=int | None,
        valid=lambda version: version in (None, 1, 2, 21),
        expects="1, 2 or 21",
        shown="unset",
    )
    available_memory_proportion: dict[str, float] = setting(
        {},
        NO_EFFECT,
        "setAvailableMemoryProportion",
        valid=lambda proportions: all(
            isinstance(unit, str)
            and unit.startswith("IPU")
            and isinstance(proportion, (int, float))
            and _fraction(proportion)
            for unit, proportion in proportions.items()
        ),
        expects="a dict from units, 'IPU0', to numbers from 0 to 1",
    )
    sync_pattern: SyncPattern = setting(SyncPattern.Full, NO_EFFECT, "syncPattern", shown="Full")
    log_cycle_count: bool = setting(False, "`cycleCount` may be asked", "logCycleCount")

    Training: _TrainingOptions = group(_TrainingOptions, "What concerns training only.")
    Precision: _PrecisionOptions = group(_PrecisionOptions, "How numbers are rounded and checked.")
    Distributed: _DistributedOptions = group(_DistributedOptions, "Which of several processes this is.")
    TensorLocations: _TensorLocationOptions = group(_TensorLocationOptions, "Where tensors are stored.")
    Jit: _JitOptions = group(_JitOptions, "What concerned PyTorch's JIT compiler; nothing is left of it.")
    _Popart: _PopartOptions = group(_PopartOptions, "Session options by their own names.")

    def __init__(self) -> None:
        super().__init__()
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            try:
                self.from_json(defaults)
            except Exception as error:
                error.add_note("This is what the environment variable POPTORCH_DEFAULT_OPTIONS says.")
                raise

    @property
    def replication(self) -> int | Literal["popdist"]:
        """The number of replicas, as `popxl.Ir` takes it."""
        return self.replication_factor

    # Batches

    def deviceIterations(self, device_iterations: int) -> Self:
        """Let one call do so many optimiser steps, or forward passes in inference, and take so many times the rows.

        Raises:
            AssertionError: if it is no positive integer.
        """
        return self._set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Let so many copies of the model work at the same time, each on its part of the rows.

        Raises:
            AssertionError: if it is no positive integer.
        """
        return self._set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Give the same rows to all replicas of a group. Call it after `replicationFactor`.

        Args:
            input_group_size: the number of replicas in a group; it divides the replication factor.
            input_group_type: `Consecutive`; `Orthogonal`; or `NoGrouping`: each replica has rows of its own.

        Raises:
            ValueError: if the replicas cannot be grouped so, or the type is `All`.
        """
        if input_group_type == CommGroupType.All:
            raise ValueError(
                "inputReplicaGrouping: `input_group_type` is CommGroupType.All; expected Consecutive, Orthogonal or "
                "NoGrouping. One group of all replicas is `Consecutive`, with the replication factor as its size."
            )
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        self._check(input_group_size=input_group_size, input_group_type=input_group_type)
        ReplicaGroups.of(input_group_type, input_group_size, self.replication_factor)
        return self._set(input_group_size=input_group_size, input_group_type=input_group_type)

    @property
    def input_groups(self) -> ReplicaGroups:
        """The groups of replicas that receive the same rows.

        Raises:
            ValueError: if the replication factor has changed so that the size of a group no longer divides it.
        """
        return ReplicaGroups.of(self.input_group_type, self.input_group_size, self.replication_factor)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which results of a call come back.

        Args:
            output_mode: `All`, `Sum`, `Final`, `EveryN`, or `Default`: `Final` in training, `All` in inference.
            output_return_period: the N of `EveryN`; ignored with other modes.

        Raises:
            AssertionError: if `EveryN` comes without a positive N.

        Example:
            >>> import poptorch
            >>> _ = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 10)
        """
        if output_mode == OutputMode.EveryN:
            period = _checked_period("outputMode", output_return_period)
        else:
            period = 1
            if output_return_period is not None:
                logger.warning("outputMode: `output_return_period` is ignored, as the mode is not EveryN.")
        return self._set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether the output mode still is `Default`, which a wrapper replaces."""
        return self.output_mode == OutputMode.Default

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Keep buffers equal on all replicas, which refuses models that write some; if False, each has its own copy."""
        return self._set(broadcast_buffers=broadcast_buffers)

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Replace inputs by normal noise made on the device, to see how fast a model is without transfers."""
        return self._set(synthetic_data=enabled)

    # Models

    def randomSeed(self, random_seed: int) -> Self:
        """Seed the random numbers of models and of shuffled data; and PyTorch's, by `torch.manual_seed`."""
        self._set(random_seed=random_seed)
        torch.manual_seed(random_seed)
        return self

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> Self:
        """Keep a tensor within the model, for `getAnchoredTensor`.

        Args:
            short_name: the name to ask for it by.
            long_name: its name in the program; `getTensorNames` lists them.
            output_mode: which of its values to keep; as of the results, if None.
            output_return_period: the N of `EveryN`.

        Raises:
            AssertionError: if `EveryN` comes without a positive N.
        """
        period = _checked_period("anchorTensor", output_return_period) if output_mode == OutputMode.EveryN else 1
        return self._set(anchored_tensors={**self.anchored_tensors, short_name: Anchor(long_name, output_mode, period)})

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Name the buffers that `copyNamedBuffersToDevice` writes."""
        return self._set(updatable_named_buffers=buffers)

    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute the variances of normalisations in two passes, which is more accurate. Here it is always so."""
        return self._set(stable_norm=enabled)

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Say at the level of debugging, rather than warn, if an optimiser has attributes that nothing uses."""
        return self._set(relax_optimizer_attributes_checks=relax)

    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """How blocks run on several units.

        Args:
            strategy: a `PipelinedExecution` (the default), `ShardedExecution`, `ParallelPhasedExecution` or
                `SerialPhasedExecution`.
        """
        return self._set(execution_strategy=strategy)

    # Devices

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Attach to a device `Always` (from the start), `OnDemand` (once compiled), or `Never` (only compile)."""
        return self._set(connection_type=connection_type)

    def useIpuModel(self, use_model: bool) -> Self:
        """Run on the CPU (True) or on an accelerator if there is one (False), whatever `POPTORCH_IPU_MODEL` says."""
        return self._set(ipu_model=use_model)

    def useIpuId(self, ipu_id: int) -> Self:
        """Run on the device with this number."""
        return self._set(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Only compile, for no device of this machine; sets `ConnectionType.Never`.

        Args:
            ipu_version: 1, 2 or 21.
        """
        return self._set(ipu_version=ipu_version, connection_type=ConnectionType.Never)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Accept a number of units that is no power of two, by rounding it up, where else it is an error."""
        return self._set(auto_round_num_ipus=auto_round_num_ipus)

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """How much of the memory of each unit temporary values may take, `{"IPU0": 0.5}`."""
        return self._set(available_memory_proportion=available_memory_proportion)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Which units wait for which others."""
        return self._set(sync_pattern=sync_pattern)

    # Compiling, reports, logs

    def enableExecutableCaching(self, path: str | None) -> Self:
        """Keep compiled programs in the folder `path`, so that the same program is not compiled again; None: do not."""
        return self._set(executable_cache=path)

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write reports to the folder `profile_dir`, or to the current one.

        The folder that `POPLAR_ENGINE_OPTIONS` or `PVTI_OPTIONS` name in the environment goes before, with a warning.
        """
        asked, folder = profile_dir or ".", _profile_dir_of_environment()
        if folder not in (None, asked):
            logger.warning(
                "enableProfiling: reports are written to %r rather than %r, as the environment says.", folder, asked
            )
        return self._set(profile_dir=folder or asked)

    def modelName(self, name: str) -> Self:
        """Name the model in reports, which are in a folder of this name."""
        return self._set(model_name=name)

    def logDir(self, log_dir: str) -> Self:
        """Write logs to the folder `log_dir`."""
        return self._set(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """Show the same message at most so many times; None: always."""
        return self._set(max_repeat_logs=max_lines)

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Count the cycles of each run."""
        return self._set(log_cycle_count=log_cycle_count)

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar while a model is compiled."""
        return self._set(show_compilation_progress_bar=show)

    def disableModuleNamescope(self) -> Self:
        """Do not name operations after the modules that they are in."""
        return self._set(module_namescope_enabled=False)

    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Skip frames whose file contains one of `excludes`, where it is said who made an operation."""
        return self._set(source_location_excludes=excludes)

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Skip these frames, too; see `sourceLocationExcludes`."""
        return self._set(source_location_excludes=[*self.source_location_excludes, *excludes])

    # All of them

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Set what a file says: a call in each line, without `options.` before it.

        Blank lines and comments are skipped. Arguments are numbers, strings, lists, and what `poptorch` offers for
        options: enums, `TensorLocationSettings`, stages, phases and strategies. Nothing else is evaluated, so a file
        sets options and does nothing more. If a line is wrong, no option is changed.

        Args:
            filepath: the file, such as

                deviceIterations(4)
                Training.gradientAccumulation(8)  # with two stages: at least 3
                outputMode(poptorch.OutputMode.All)

        Raises:
            ConfigFileError: if a line is wrong; it says which, and why.
        """
        return self._change(lambda draft: run_lines(draft, filepath, {"poptorch": _POPTORCH, "torch": _TORCH}))

    def from_json(self, string: str) -> Self:
        """Set what a JSON object says: names of methods and their arguments.

        A list is spread over the arguments; a string such as `"OutputMode.All"` is the member of that enum. If an entry
        is wrong, no option is changed.

        Raises:
            ValueError: if it is no JSON object.
            AttributeError: if there is no such method.

        Example:
            >>> import poptorch
            >>> options = poptorch.Options()
            >>> _ = options.from_json('{"deviceIterations": 4, "outputMode": ["OutputMode.EveryN", 2]}')
            >>> options.device_iterations, options.output_return_period
            (4, 2)
        """
        return self._change(lambda draft: run_calls(draft, string, {**_ENUMS, "torch": _TORCH}))

    def _change(self, change: Callable[[Self], None]) -> Self:
        """Change a copy, and take over what it is afterwards; so an error changes nothing."""
        self._check()
        draft = self.clone()
        change(draft)
        self._adopt(draft)
        return self

    def toDict(self) -> dict[str, Any]:
        """All settings, those of groups too, in one dictionary.

        Raises:
            AssertionError: if the output mode still is the default; wrappers know which one that is.
        """
        if self.defaultOutputMode():
            raise AssertionError(
                "toDict: the output mode still is the default, which depends on whether the model is trained. Choose "
                "one: `options.outputMode(poptorch.OutputMode.All)`."
            )
        flat = {name.rpartition(".")[2]: value for name, value in self._dotted()}
        return {**flat, **self.execution_strategy.backendOptions()}

    def __repr__(self) -> str:
        lines = [f"    {name}={value!r},\n" for name, value in self._dotted()]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    def _dotted(self) -> Iterator[tuple[str, Any]]:
        """All settings with their values, those of groups under `group.setting`."""
        for name, value in self._values().items():
            if isinstance(value, OptionsDict):
                yield from ((f"{name}.{inner}", each) for inner, each in value._values().items())
            else:
                yield name, value


def _checked_period(method: str, period: int | None) -> int:
    if isinstance(period, int) and period > 0:
        return period
    raise AssertionError(f"{method}: `output_return_period` is {period!r}; expected a positive integer with EveryN.")


_ENUMS = {name: getattr(enums, name) for name in enums.__all__}
_TORCH = SimpleNamespace(float=torch.float, float32=torch.float32, half=torch.half, float16=torch.float16)
_POPTORCH = SimpleNamespace(
    **_ENUMS,
    **{name: getattr(strategies, name) for name in strategies.__all__ if name != "BlockId"},
    TensorLocationSettings=TensorLocationSettings,
)


def options_page() -> str:
    """A page in Markdown with every setting: what sets it, its default, and its effect here, or that it has none.

    Example:
        >>> print(options_page().splitlines()[0])
        # Options
    """
    groups = {name: each.kind for name, each in Options._declared().items() if isinstance(each, Group)}
    parts = [
        "# Options",
        table(Options, "General", ""),
        *(table(kind, name, f"{name}.") for name, kind in groups.items()),
        table(TensorLocationSettings, "TensorLocationSettings", ""),
    ]
    return "\n\n".join(parts) + "\n"
