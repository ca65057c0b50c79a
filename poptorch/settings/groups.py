"""Groups within `poptorch.Options`, with their settings and methods."""

from __future__ import annotations

import os
from typing import TypeVar, get_args

import torch

from poptorch.base.logging_ import logger
from poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from poptorch.settings.setting import NO_EFFECT, OptionsDict, positive, setting
from popxl_addons.transforms.activations import MemoryPolicy
from popxl_addons.transforms.memory_plan import MemoryPlan

_Group = TypeVar("_Group", bound=OptionsDict)


class _TrainingOptions(OptionsDict):
    """Training options; `options.Training`.

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
    )
    mean_accumulation_and_replication_reduction_strategy: MeanReductionStrategy = setting(
        MeanReductionStrategy.Post,
        "when a mean is divided, which decides its rounding and whether float16 gradients overflow",
        "setMeanAccumulationAndReplicationReductionStrategy",
        default_text="Post; Running if the optimiser accumulates in float16",
    )
    automatic_loss_scaling: bool = setting(
        False, "the loss scale is state of the program, adjusted to the gradients in float16", "setAutomaticLossScaling"
    )
    convolution_dithering: bool | None = setting(None, NO_EFFECT, "setConvolutionDithering")
    memory_plan: MemoryPlan | MemoryPolicy | None = setting(
        None,
        "which activations of outlined layers the backward pass keeps, recomputes or loads from the host",
        "setMemoryPlan",
        kind=MemoryPlan | str | None,
        valid=lambda plan: not isinstance(plan, str) or plan in get_args(MemoryPolicy),
        expects=f"a popxl_addons.MemoryPlan, or one of {', '.join(map(repr, get_args(MemoryPolicy)))}",
    )

    @property
    def meanAccumulationAndReplicationReductionStrategy(self) -> MeanReductionStrategy:
        """Alias of `setMeanAccumulationAndReplicationReductionStrategy`."""
        return self.mean_accumulation_and_replication_reduction_strategy

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches whose gradients are accumulated per optimiser step.

        A call then takes this many times the rows, and layers that use batch statistics still see one micro-batch.

        Args:
            gradient_accumulation: the number of micro-batches.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> _TrainingOptions:
        """Set the reduction of gradients over micro-batches and replicas: mean or sum.

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
        """Set the division strategy for mean gradients.

        Args:
            mean_reduction_strategy: `Running` cannot overflow; `Post` is faster; `PostAndLoss` is deprecated.
        """
        return self._set(mean_accumulation_and_replication_reduction_strategy=mean_reduction_strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Adjust the loss scale during training to keep float16 gradients within range.

        After each step it is halved if a gradient in float16 was greater than an eighth of the largest number of
        float16, or was none, in any micro-batch; else it is doubled, up to 2¹⁵. Where all gradients are in float32 it
        stays. `optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]` is what `loss_scaling` is multiplied by in
        the next run, and a tensor that is anchored under `"finalLossScale"` is the product.
        """
        return self._set(automatic_loss_scaling=enabled)

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Vary the tile layout of convolutions."""
        return self._set(convolution_dithering=enabled)

    def setMemoryPlan(self, plan: MemoryPlan | MemoryPolicy) -> _TrainingOptions:
        """Keep, recompute or offload activations by a plan, as `train_step(memory=…)` does.

        A plan names graphs of layers that the model has several times; without such layers, the whole model. `popxl
        plan train.py --target "gpu h100" --budget 40GB` computes one for a program that sets none.

        Args:
            plan: `MemoryPlan.read_json(file)`, or a policy such as `"products"`.

        Raises:
            AssertionError: for another value. A plan of another model is a ValueError when the model is compiled, and a
                model with checkpoints an Error.
        """
        return self._set(memory_plan=plan)


class _PrecisionOptions(OptionsDict):
    """Precision options: rounding, and checks of values; `options.Precision`.

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
        HalfFloatCastingBehavior.Default, f"{NO_EFFECT}; deprecated", "halfFloatCasting"
    )
    running_statistics_always_float: bool = setting(True, f"{NO_EFFECT}; deprecated", "runningStatisticsAlwaysFloat")

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Raise an `Error` at run time for divisions by zero, overflows, NaN results and comparisons with NaN."""
        return self._set(floating_point_exceptions=enabled)

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round float16 results stochastically, without bias."""
        return self._set(stochastic_rounding=enabled)

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """How exactly accelerators compute matrix products and convolutions of float32; on CPUs without effect.

        Args:
            dtype: `torch.float` for full precision; or `torch.half` for a lower and faster one: the values "highest"
                and "default" of `popxl.Ir.options.precision`. Sums are always in float32.

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
    """Obsolete options of PyTorch's JIT compiler; `options.Jit`."""

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
    """Identity of this process among several; `options.Distributed`.

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
        default_text="the environment variable OMPI_COMM_WORLD_RANK, or 0",
    )
    num_processes: int = setting(
        1,
        "how many parts the data set is in",
        "configureProcessId",
        valid=positive,
        expects="a positive integer",
        make=lambda: _environment_integer(_OMPI_NAMES[0], 1),
        default_text="the environment variable OMPI_COMM_WORLD_SIZE, or 1",
    )

    @property
    def processId(self) -> int:
        """Index of this process."""
        return self.process_id

    @property
    def numProcesses(self) -> int:
        """Number of processes."""
        return self.num_processes

    distributed_process_id, num_distributed_processes = processId, numProcesses

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the index of this process, and the number of processes.

        Args:
            process_id: index of this process, from 0.
            num_processes: number of processes.

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
        """Read process index and count from environment variables, by default OpenMPI's.

        Args:
            var_num_processes: environment variable with the number of processes; 1 if it is not set.
            var_process_id: environment variable with the index of this process; 0 if it is not set.

        Raises:
            ValueError: if one is not an integer.
            AssertionError: if there is no such process.
        """
        return self.configureProcessId(
            _environment_integer(var_process_id, 0), _environment_integer(var_num_processes, 1)
        )

    def disable(self) -> _DistributedOptions:
        """Use a single process, regardless of the environment."""
        return self.configureProcessId(0, 1)
