"""`Options`: all options for compiling and running a model.

Each group declares its settings in its class body, with their accepted values and their effects; its methods store
them. The groups are in `poptorch.settings.groups`, `locations` and `session_options`; descriptors of settings in
`poptorch.settings.setting`; readers of files and JSON in `poptorch.settings.files`. `python -m poptorch options` prints
a page of all settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch

import popxl
from poptorch import enums
from poptorch.base.logging_ import logger
from poptorch.base.replica_groups import ReplicaGroups
from poptorch.enums import CommGroupType, ConnectionType, OutputMode, PartialBatch, SyncPattern
from poptorch.placement import strategies
from poptorch.placement.strategies import PipelinedExecution, _IExecutionStrategy
from poptorch.settings.files import ConfigFileError, run_calls, run_lines
from poptorch.settings.groups import _DistributedOptions, _JitOptions, _PrecisionOptions, _TrainingOptions
from poptorch.settings.locations import TensorLocationSettings, _TensorLocationOptions
from poptorch.settings.session_options import _PopartOptions
from poptorch.settings.setting import NO_EFFECT, Group, OptionsDict, group, in_words, positive, setting, strings, table

__all__ = ["Anchor", "ConfigFileError", "Options", "TensorLocationSettings", "options_page"]


def _fraction(value: float) -> bool:
    return 0 <= value <= 1


@dataclass(frozen=True)
class Anchor:
    """Tensor within a model whose values are recorded at each run.

    Args:
        long_name: name in the program.
        output_mode: values to keep; None: as for results.
        output_return_period: every how many iterations, with `OutputMode.EveryN`.
    """

    long_name: str
    output_mode: OutputMode | None = None
    output_return_period: int = 1


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false")


def _json_variable(name: str) -> dict[str, Any]:
    """JSON object in an environment variable."""
    text = os.environ.get(name) or "{}"
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(f"The environment variable {name} is {text!r}; expected a JSON object.") from None


def _profile_dir_of_environment() -> str | None:
    """Report folder named in the environment."""
    engine, tracing = _json_variable("POPLAR_ENGINE_OPTIONS"), _json_variable("PVTI_OPTIONS")
    return engine.get("autoReport.directory") or tracing.get("directory")


def _profile_dir_asked_for() -> str | None:
    """Report folder, if the environment switches reports on."""
    asked = _json_variable("POPLAR_ENGINE_OPTIONS").get("autoReport.all") or _json_variable("PVTI_OPTIONS").get(
        "enable"
    )
    return (_profile_dir_of_environment() or ".") if asked == "true" else None


def _library_folders() -> list[str]:
    return [f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__, popxl.__file__)]


class Options(OptionsDict):
    """Options for compiling and running a model.

    Methods set, and return the options, so that calls chain; attributes of the same names in lower case read:
    `deviceIterations(2)`, `device_iterations`. Using options freezes them: change a `clone()`.

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
        valid=positive,
        expects="a positive integer",
    )
    replication_factor: int = setting(
        1,
        "copies of the model that work at the same time, each on its part of the rows",
        "replicationFactor",
        valid=positive,
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
    kept_programs: int = setting(
        8,
        "so many programs a model keeps: one for each kind of arguments of `generate`, and for each shape "
        "or number that the host finds on the way; with 1, numbers are not looked at, and there is an Error",
        "keptPrograms",
        valid=positive,
        expects="a positive integer",
    )
    partial_batch: PartialBatch = setting(
        PartialBatch.Compile,
        "what becomes of a batch with fewer rows than those that the model was compiled for, such as the last of a "
        "data set: Compile: programs of their own run it, at most `keptPrograms`; Pad: in inference, rows are added "
        "that do not come back; Refuse: it is an Error",
        "partialBatch",
        shown="Compile",
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
        valid=strings,
        expects="a list of strings",
        make=_library_folders,
        shown="the folders of torch and of this library",
    )
    updatable_named_buffers: list[str] = setting(
        [],
        "the buffers that `copyNamedBuffersToDevice` writes",
        "updatableNamedBuffers",
        valid=strings,
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
    target: str | None = setting(
        None,
        "the machine that models are compiled for, which need not be here, as `popxl.Target` describes it",
        "useOfflineIpuTarget",
        kind=str | None,
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
        """Replication factor, as for `popxl.Ir`."""
        return self.replication_factor

    @property
    def product_precision(self) -> Literal["highest", "default"]:
        """Precision of float32 products, as for `popxl.Ir.options.precision`.

        Half partials allow fewer digits, whether `Precision.setPartialsType` or the session option
        `partialsTypeMatMuls` says so.
        """
        of_products = str(self._Popart.options.get("partialsTypeMatMuls", "")).lower()
        return "default" if self.Precision.partials_type is torch.half or of_products == "half" else "highest"

    # Batches

    def deviceIterations(self, device_iterations: int) -> Self:
        """Set the number of optimiser steps, or inference passes, per call, which multiplies its rows.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set the number of data-parallel replicas, each with its own rows.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Feed equal rows to all replicas of a group. Call it after `replicationFactor`.

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
        ReplicaGroups.from_type(input_group_type, input_group_size, self.replication_factor)
        return self._set(input_group_size=input_group_size, input_group_type=input_group_type)

    @property
    def input_groups(self) -> ReplicaGroups:
        """Replica groups with equal rows.

        Raises:
            ValueError: if the replication factor has changed so that the size of a group no longer divides it.
        """
        return ReplicaGroups.from_type(self.input_group_type, self.input_group_size, self.replication_factor)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Select the results that a call returns.

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
        """Whether the output mode is still `Default`, which wrappers replace."""
        return self.output_mode == OutputMode.Default

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Refuse models with buffers that differ between replicas (True), or give each replica its own copy (False)."""
        return self._set(broadcast_buffers=broadcast_buffers)

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Replace inputs by normal noise from the device, for measurements without transfers."""
        return self._set(synthetic_data=enabled)

    # Models

    def randomSeed(self, random_seed: int) -> Self:
        """Seed random numbers of models and shuffling, and PyTorch's generator (`torch.manual_seed`)."""
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
        """Record a tensor within the model, for `getAnchoredTensor`.

        Args:
            short_name: name for `getAnchoredTensor`.
            long_name: name in the program; `getTensorNames` lists them.
            output_mode: values to keep; as for results, if None.
            output_return_period: the N of `EveryN`.

        Raises:
            AssertionError: if a name is not a string, `output_mode` is not a mode, or `EveryN` lacks a positive N.
        """
        for name, value, kind in (
            ("short_name", short_name, str),
            ("long_name", long_name, str),
            ("output_mode", output_mode, OutputMode | None),
        ):
            assert isinstance(value, kind), f"anchorTensor: `{name}` is {value!r}; expected {in_words(kind)}."
        period = _checked_period("anchorTensor", output_return_period) if output_mode == OutputMode.EveryN else 1
        return self._set(anchored_tensors={**self.anchored_tensors, short_name: Anchor(long_name, output_mode, period)})

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Set the names of buffers that `copyNamedBuffersToDevice` uploads."""
        return self._set(updatable_named_buffers=buffers)

    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute variances of normalisations in two passes, for accuracy. Always on here."""
        return self._set(stable_norm=enabled)

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Report unused optimiser attributes as debug messages, not as warnings."""
        return self._set(relax_optimizer_attributes_checks=relax)

    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """Set the execution strategy of blocks on several IPUs.

        Args:
            strategy: a `PipelinedExecution` (the default), `ShardedExecution`, `ParallelPhasedExecution` or
                `SerialPhasedExecution`.
        """
        return self._set(execution_strategy=strategy)

    # Devices

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Set the time of attaching to a device: `Always` (at the start), `OnDemand` (once compiled), or `Never`."""
        return self._set(connection_type=connection_type)

    def useIpuModel(self, use_model: bool) -> Self:
        """Run on the CPU (True), or on an accelerator if present (False); overrides `POPTORCH_IPU_MODEL`."""
        return self._set(ipu_model=use_model)

    def useIpuId(self, ipu_id: int) -> Self:
        """Select a device by index."""
        return self._set(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int | str = 2) -> Self:
        """Compile only, for a machine elsewhere; sets `ConnectionType.Never`.

        Args:
            ipu_version: 1, 2 or 21; or the machine to compile for, as `popxl.Target` describes it: "tpu v5e:2x2".

        Example:
            >>> options = poptorch.Options().useOfflineIpuTarget("gpu h100:8")
        """
        if isinstance(ipu_version, str):
            popxl.Target(ipu_version)  # reports errors of the description now
            return self._set(target=ipu_version, connection_type=ConnectionType.Never)
        return self._set(ipu_version=ipu_version, target=None, connection_type=ConnectionType.Never)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Round a number of IPUs up to a power of two, instead of raising an error."""
        return self._set(auto_round_num_ipus=auto_round_num_ipus)

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Set the memory proportion for temporary values by IPU: `{"IPU0": 0.5}`."""
        return self._set(available_memory_proportion=available_memory_proportion)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Set the synchronisation pattern of IPUs."""
        return self._set(sync_pattern=sync_pattern)

    # Compiling, reports, logs

    def enableExecutableCaching(self, path: str | None) -> Self:
        """Cache compiled programs in the folder `path`; `None` switches the cache off."""
        return self._set(executable_cache=path)

    def partialBatch(self, partial_batch: PartialBatch) -> Self:
        """Select the treatment of batches with fewer rows than the compiled ones.

        Rows form as many whole steps as possible; the rest is another step, whose micro-batches are of equal size. Rows
        that do not suffice for all replicas go to one replica.

        Args:
            partial_batch: `Compile`, `Pad` or `Refuse`.

        Example:
            >>> import poptorch
            >>> _ = poptorch.Options().partialBatch(poptorch.PartialBatch.Refuse)
        """
        return self._set(partial_batch=partial_batch)

    def keptPrograms(self, kept_programs: int) -> Self:
        """Limit the number of cached programs of a model; the least recently used are evicted.

        `generate` needs one for each argument signature. If a shape, or a Python branch, depends on numbers of a run
        (`x[mask]`, `x.sum().item()`), there is a graph break, and a program for each shape or number that occurs. With
        1 there are no graph breaks, but an `Error` that names the place.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(kept_programs=kept_programs)

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write reports to the folder `profile_dir`, by default the current one.

        The folder that `POPLAR_ENGINE_OPTIONS` or `PVTI_OPTIONS` name in the environment has priority, with a warning.
        """
        asked, folder = profile_dir or ".", _profile_dir_of_environment()
        if folder not in (None, asked):
            logger.warning(
                "enableProfiling: reports are written to %r rather than %r, as the environment says.", folder, asked
            )
        return self._set(profile_dir=folder or asked)

    def modelName(self, name: str) -> Self:
        """Set the model's name in reports, also the name of their folder."""
        return self._set(model_name=name)

    def logDir(self, log_dir: str) -> Self:
        """Write logs to the folder `log_dir`."""
        return self._set(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """Limit repetitions of equal log messages; `None` sets no limit."""
        return self._set(max_repeat_logs=max_lines)

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Count the cycles of each run."""
        return self._set(log_cycle_count=log_cycle_count)

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar while a model is compiled."""
        return self._set(show_compilation_progress_bar=show)

    def disableModuleNamescope(self) -> Self:
        """Omit module names from names of operations."""
        return self._set(module_namescope_enabled=False)

    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Omit frames from source locations whose file path contains any of `excludes`."""
        return self._set(source_location_excludes=excludes)

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Add to the patterns of `sourceLocationExcludes`."""
        return self._set(source_location_excludes=[*self.source_location_excludes, *excludes])

    # All of them

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply the option calls in a file, one per line, without the prefix `options.`.

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
        """Apply a JSON object of method names with arguments.

        A list is spread over the arguments; a string such as `"OutputMode.All"` is the member of that enum. If an entry
        is wrong, no option is changed.

        Raises:
            ValueError: if it is not a JSON object.
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
        """Apply changes to a draft, and adopt it without errors only."""
        self._check()
        draft = self.clone()
        change(draft)
        self._adopt(draft)
        return self

    def toDict(self) -> dict[str, Any]:
        """All settings, including groups, in one dictionary.

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
        """All settings with values; groups as `group.setting`."""
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
    """Markdown page of all settings: methods, defaults and effects.

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
