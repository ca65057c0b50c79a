"""Wrapper-specific options: user options with model-dependent and optimiser-dependent defaults resolved."""

from __future__ import annotations

import torch

from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.program.batching import Batching


def own_options(options: Options, training: bool) -> Options:
    """Copy user options, resolving defaults that depend on the wrapper kind. User options are frozen.

    Raises:
        poptorch.Error: for accumulated gradients without training.
    """
    options.freeze()
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if training else OutputMode.All)
    if not training and own.Training.gradient_accumulation != 1:
        raise createPoptorchError(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value (1) "
            "when running a poptorch.inferenceModel()."
            + " Use poptorch.Options().deviceIterations() to process a sufficient number of batches each run for "
            "pipelined execution instead."
            * own.execution_strategy.overlaps_stages
            + f" It is {own.Training.gradient_accumulation}."
        )
    own.freeze()
    return own


def for_fewer_rows(options: Options, batching: Batching) -> Options:
    """Copy options for a run with different batching.

    Raises:
        poptorch.Error: if results of every Nth iteration are requested.
    """
    if options.output_mode is OutputMode.EveryN:
        raise createPoptorchError(
            f"The batch has fewer rows than those that the model was compiled for, and there is no step of them that "
            f"OutputMode.EveryN with a period of {options.output_return_period} would return. Choose OutputMode.All or "
            "OutputMode.Final, or leave such batches out."
        )
    own = options.clone()
    own._set(device_iterations=batching.device_iterations, replication_factor=batching.groups.replicas)
    if batching.groups.size == 1:
        own._set(input_group_size=1)
    own.Training._set(gradient_accumulation=batching.gradient_accumulation)
    own.freeze()
    return own


def needs_running_mean(optimizer: torch.optim.Optimizer, options: Options) -> bool:
    """Whether gradients accumulate in float16, where sums may overflow but running means do not."""
    strategy = options.Training.mean_accumulation_and_replication_reduction_strategy
    in_half = getattr(optimizer, "accum_type", None) == torch.float16
    return in_half and strategy is MeanReductionStrategy.Post and not getattr(optimizer, "use_combined_accum", False)


def with_running_mean(options: Options) -> Options:
    """Copy options, selecting `MeanReductionStrategy.Running`."""
    own = options.clone()
    own.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    own.freeze()
    return own
