"""Validation of a program's blocks against the options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from poptorch.enums import Liveness, OutputMode
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.placement.capture_context import OpPlacement
from poptorch.placement.strategies import ParallelPhasedExecution, ShardedExecution

MAX_UNITS = 64
"""Maximum number of units per process."""


def check_placement(sites: Sequence[OpPlacement], options: Options, training: bool) -> None:
    """Check block requirements against the options.

    Args:
        sites: annotations of the operations of `forward`, in order.

    Raises:
        Error: if there are too few iterations or accumulation steps for the stages of a pipeline; too many units, or a
            number of units that is not a power of two; a phase on units of the other group; or a liveness that parallel
            phases do not have.
    """
    strategy = options.execution_strategy
    _check_units(sites, options)
    if isinstance(strategy, ParallelPhasedExecution):
        _check_parallel_phases(sites, strategy)
    elif strategy.overlaps_stages:
        _check_pipeline(sites, options, training)


def _check_units(sites: Sequence[OpPlacement], options: Options) -> None:
    """Check the number of units: of one process, and a power of two."""
    units = 1 + max((site.unit for site in sites), default=0)
    replicas = options.replication_factor
    asked = units * replicas
    if asked & (asked - 1) and not options.auto_round_num_ipus:
        raise Error(
            f"The model specifies the use of {asked} IPUs, however PopTorch must reserve a minimum of "
            f"{1 << asked.bit_length()} in order to allow the model to run, because PopTorch must reserve a power of 2 "
            f"or maximum of {MAX_UNITS} IPUs per process. Please reconfigure your model to use a different number of "
            "IPUs or set poptorch.Options().autoRoundNumIPUs(True)."
            + f" There are {units} for each of {replicas} replicas."
            * (replicas > 1)
        )
    if asked > MAX_UNITS:
        raise Error(
            f"Too many IPUs requested ({asked}). Experiments that need more than {MAX_UNITS} IPUs are run by several "
            f"processes, which `poprun` starts. Here there are {units} for each of {replicas} replicas: lower "
            "`replicationFactor`, or use fewer units."
        )


def _check_pipeline(sites: Sequence[OpPlacement], options: Options, training: bool) -> None:
    """Check that a pipeline gets as many micro-batches as it has stages."""
    forward = len(list(groupby(site.unit for site in sites)))
    if forward <= 1:
        return
    stages, given = 2 * forward - 1, options.Training.gradient_accumulation
    if training and given < stages:
        raise Error(
            "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of "
            f"pipeline stages ({stages}) when using poptorch.PipelinedExecution. Please note that a model with "
            f"{forward} pipeline stages in PopTorch will have an additional {forward - 1} stages when training. It "
            f"is {given}: accumulate over more micro-batches, or use fewer stages."
        )
    if not training and options.device_iterations < forward:
        raise Error(
            "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline stages "
            f"({forward}) of a pipelined inference model; it is {options.device_iterations}. Do more iterations, or "
            "use fewer stages."
        )


def _check_parallel_phases(sites: Sequence[OpPlacement], strategy: ParallelPhasedExecution) -> None:
    if strategy.liveness not in (Liveness.AlwaysLive, Liveness.OffChipAfterFwd):
        raise Error(
            f"ParallelPhasedExecution: the liveness is {strategy.liveness.name}; expected AlwaysLive or "
            "OffChipAfterFwd, as `sendTensorsOffChipAfterFwd` sets them. SerialPhasedExecution has all of them."
        )
    for site in sites:
        if (site.phase or 0) % 2 != site.unit % 2:
            raise Error(
                f"ParallelPhasedExecution: block {site.block!r} of phase {site.phase} is on unit {site.unit}; even "
                "phases must be on even units, and odd ones on odd units. Choose them: `strategy.phase(0).ipus(0, 2)`."
            )


def check_overlapped_io(options: Options, output_mode: OutputMode) -> None:
    """Check that the options allow overlapped transfers (`set_overlap_for_input`, `..._output`).

    Args:
        output_mode: the mode of its results, no longer the default.

    Raises:
        Error: unless the strategy is `ShardedExecution`, there are IO tiles, and the mode is `All` or `Sum`.
    """
    if not isinstance(options.execution_strategy, ShardedExecution):
        raise Error(
            f"Overlapped IO needs ShardedExecution; the execution strategy is {options.execution_strategy}. Choose it: "
            "`options.setExecutionStrategy(poptorch.ShardedExecution())`."
        )
    if options.TensorLocations.num_io_tiles is None:
        raise Error(
            "Overlapped IO needs IO tiles, and there are none. Set some: `options.TensorLocations.numIOTiles(32)`."
        )
    if output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"Overlapped IO needs the output mode All or Sum; it is {output_mode.name}. Choose one: "
            "`options.outputMode(poptorch.OutputMode.All)`."
        )
