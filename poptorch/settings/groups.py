"""The groups within `poptorch.Options`, each with its settings and the methods that store them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self, TypeVar, get_args

import torch
from pydantic import ValidationError

from popart import RecomputationType
from poptorch.base.logging_ import logger
from poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from poptorch.errors import Error
from poptorch.settings.setting import NO_EFFECT, OptionsDict, Setting, positive, setting, strings
from popxl.options import SessionOptions
from popxl_addons.transforms.memory_plan import MemoryPlan, MemoryPolicy

_Group = TypeVar("_Group", bound=OptionsDict)


_TOLD = f"{NO_EFFECT}, as a warning says"


class TensorLocationSettings(OptionsDict):
    """Where tensors of one kind are stored.

    Example:
        >>> import poptorch
        >>> options = poptorch.Options()
        >>> location = poptorch.TensorLocationSettings().useOnChipStorage(False)
        >>> _ = options.TensorLocations.setActivationLocation(location)
    """

    min_elements_for_off_chip: int | None = setting(
        None,
        "tensors of fewer elements stay in the memory of the device; 2 if unset",
        "minElementsForOffChip",
        kind=int | None,
        shown="unset",
    )
    min_elements_for_replicated_tensor_sharding: int | None = setting(
        None,
        "tensors of fewer elements stay whole; 2 if unset",
        "minElementsForReplicatedTensorSharding",
        kind=int | None,
        shown="unset",
    )
    use_on_chip_storage: bool | None = setting(
        None,
        "if False, tensors are in the memory of the host; if unset, in that of the device, except for tensors that "
        "leave it under the liveness of a phased strategy",
        "useOnChipStorage",
        kind=bool | None,
        shown="unset",
    )
    use_replicated_tensor_sharding: bool | None = setting(
        None,
        "if True, each replica stores a part of every tensor whose elements can be divided evenly among the replicas "
        "that share it; not for activations, as a warning says",
        "useReplicatedTensorSharding",
        kind=bool | None,
        shown="unset",
    )
    use_io_tiles_to_load: bool | None = setting(None, _TOLD, "useIOTilesToLoad", kind=bool | None, shown="unset")
    use_io_tiles_to_store: bool | None = setting(None, _TOLD, "useIOTilesToStore", kind=bool | None, shown="unset")

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


def is_off_chip(location: TensorLocationSettings, elements: int, leaves: bool = False) -> bool:
    """Whether a tensor of so many elements is stored in the memory of the host, if `location` says or `leaves` does."""
    on_chip = not leaves if location.use_on_chip_storage is None else location.use_on_chip_storage
    return not on_chip and elements >= (location.min_elements_for_off_chip or 2)


def is_sharded(location: TensorLocationSettings, elements: int, replicas: int) -> bool:
    """Whether each of some replicas stores a part of a tensor of so many elements that they share."""
    least = location.min_elements_for_replicated_tensor_sharding or 2
    asked = location.use_replicated_tensor_sharding and elements >= least
    return bool(asked) and replicas > 1 and elements % replicas == 0


def _without_effect(location: TensorLocationSettings, is_of_activations: bool) -> list[str]:
    """The settings, by the names of their methods, that have been made and have no effect here."""
    lost = ["use_io_tiles_to_load", "use_io_tiles_to_store"]
    if is_of_activations:  # each replica has activations of its own
        lost += ["use_replicated_tensor_sharding", "min_elements_for_replicated_tensor_sharding"]
    return [_METHODS[name] for name, value in location._values().items() if name in lost and value]


_METHODS = {name: each.by for name, each in vars(TensorLocationSettings).items() if isinstance(each, Setting)}


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
        f"{_TOLD}; but overlapped IO needs some",
        "numIOTiles",
        kind=int | None,
        valid=lambda count: count is None or (32 <= count <= 192 and count % 2 == 0),
        expects="an even number from 32 to 192",
        words="numIOTiles must be an even number between 32 and 192.",
        shown="none",
    )
    activation_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, what the backward pass reads of the forward pass is in the memory of the host "
        "meanwhile (`popxl.ops.offload`)",
        "setActivationLocation",
        shown="unset",
    )
    weight_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, parameters, and buffers that `forward` does not overwrite, are in remote "
        "buffers (`popxl`); each layer loads its own, once in the forward pass and once in the backward pass",
        "setWeightLocation",
        shown="unset",
    )
    optimizer_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, the state of the optimiser is in remote buffers (`popxl`); a step loads and "
        "stores that of one parameter after the other",
        "setOptimizerLocation",
        shown="unset",
    )
    accumulator_location: TensorLocationSettings = setting(
        TensorLocationSettings(),
        "with `useOnChipStorage(False)`, gradients are summed over micro-batches in remote buffers (`popxl`); the "
        "backward pass loads and stores one sum after the other",
        "setAccumulatorLocation",
        shown="unset",
    )

    def _set(self, **values: Any) -> Self:
        super()._set(**values)
        for name, value in values.items():
            if isinstance(value, TensorLocationSettings):
                lost = _without_effect(value, is_of_activations=name == "activation_location")
                if lost:
                    logger.warning("TensorLocations.%s: %s has no effect here.", _LOCATIONS[name], ", ".join(lost))
            elif value is not None:
                logger.warning("TensorLocations.numIOTiles has no effect here, where there are no tiles.")
        return self

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


_LOCATIONS = {name: each.by for name, each in vars(_TensorLocationOptions).items() if isinstance(each, Setting)}


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
        valid=positive,
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
    memory_plan: MemoryPlan | MemoryPolicy | None = setting(
        None,
        "which activations of outlined layers the backward pass keeps, recomputes or loads from the host",
        "setMemoryPlan",
        kind=MemoryPlan | str | None,
        valid=lambda plan: not isinstance(plan, str) or plan in get_args(MemoryPolicy),
        expects=f"a popxl_addons.MemoryPlan, or one of {', '.join(map(repr, get_args(MemoryPolicy)))}",
        shown="unset",
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

    def setMemoryPlan(self, plan: MemoryPlan | MemoryPolicy) -> _TrainingOptions:
        """Keep, recompute or offload activations by a plan, as `train_step(memory=…)` does.

        The graphs that a plan names are layers that the model has several times; without such, it is the whole model.
        `popxl plan train.py --target "gpu h100" --budget 40GB` computes one for a program that sets none.

        Args:
            plan: `MemoryPlan.read_json(file)`, or a policy such as `"products"`.

        Raises:
            AssertionError: for another value. A plan of another model is a ValueError when the model is compiled, and
                a model with checkpoints an Error.
        """
        return self._set(memory_plan=plan)


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
    stochastic_rounding: bool = setting(
        False,
        "updates of weights, optimizer state and gradient accumulators in float16 or bfloat16 round up or down at "
        "random, right in the mean, from a seed that `randomSeed` sets and `rng_state` includes; other results are "
        "rounded to nearest",
        "enableStochasticRounding",
    )
    partials_type: torch.dtype = setting(
        torch.float,
        "torch.half lets accelerators multiply float32 numbers with fewer digits, which is quicker; sums are made in "
        "float32 in any case",
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
        """How exactly accelerators compute matrix products and convolutions of float32; on CPUs without effect.

        Args:
            dtype: `torch.float`, with all digits; or `torch.half`, with fewer, which is quicker: what
                `popxl.Ir.options.precision` calls "highest" and "default". Sums are made in float32 in any case.

        Raises:
            ValueError: if it is another.
        """
        return self._set(partials_type=dtype)

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> _PrecisionOptions:
        """Deprecated, and without effect: operands of mixed types follow PyTorch's rules."""
        return deprecated(self._set(half_float_casting=half_float_casting), "Precision.halfFloatCasting")

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Deprecated, and without effect: running statistics have the type of their buffers."""
        return deprecated(self._set(running_statistics_always_float=value), "Precision.runningStatisticsAlwaysFloat")


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
        return deprecated(self._set(trace_model=trace_model), "Jit.traceModel")


def deprecated(group: _Group, method: str) -> _Group:
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
        valid=positive,
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
        "`autoRecomputation`: which activations are computed again in the backward pass, by the kinds of "
        "`popart.RecomputationType`; those that `popxl.Ir.options` has (`placement`, `calledGraphs`, `remoteBuffers`, "
        "`precision`) have their effect there, and others none; a name that no session option has raises an Error",
        "set",
    )
    patterns: dict[str, bool] = setting(
        {},
        NO_EFFECT,
        "setPatterns",
        valid=lambda patterns: strings(patterns) and all(isinstance(use, bool) for use in patterns.values()),
        expects="a dict from names of patterns to bools",
    )
    patterns_level: int = setting(
        2, NO_EFFECT, "setPatterns", valid=lambda level: 0 <= level <= 3, expects="a number from 0 to 3"
    )
    engine_options: dict[str, str] = setting(
        {},
        NO_EFFECT,
        "setEngineOptions",
        valid=lambda options: strings([*options, *options.values()]),
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
        if not isinstance(key, str) or key.split(".")[0] not in _SESSION_OPTIONS:
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
        return self._set(patterns=_plain(patterns), patterns_level=level)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> _PopartOptions:
        """Set options of the engine, replacing those set before."""
        return self._set(engine_options=_plain(engine_options))

    @property
    def recomputation(self) -> RecomputationType | None:
        """Which activations are computed again in the backward pass, by `autoRecomputation`; `None` if that is not set.

        Raises:
            Error: if it is set to anything else.
        """
        value = self.options.get("autoRecomputation")
        if value is None:
            return None
        known = {kind.name: kind for kind in RecomputationType} | {int(kind): kind for kind in RecomputationType}
        if not isinstance(value, int | str) or isinstance(value, bool) or value not in known:
            kinds = ", ".join(f"{int(kind)} ({kind.name})" for kind in RecomputationType)
            raise Error(f"Session option 'autoRecomputation' is {value!r}; expected one of {kinds}.")
        return known[value]

    def check(self) -> None:
        """To be called when a model is compiled: whether all values are of types that session options have.

        Raises:
            Error: if one is not a bool, a number, a string, an enum, or a list or dictionary of these.
        """
        for key, value in self.options.items():
            if not _is_session_value(value):
                raise Error(
                    f"Session option {key!r} is {value!r} ({type(value).__name__}); expected a bool, a number, a "
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


def _plain(value: Mapping[str, Any]) -> Any:
    """A mapping as a dictionary; what is none as it is, for the check of its setting."""
    return dict(value) if isinstance(value, Mapping) else value


def _is_session_value(value: object) -> bool:
    if isinstance(value, Mapping):
        return strings(value) and all(map(_is_session_value, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_session_value, value))
    return isinstance(value, (bool, int, float, str))
