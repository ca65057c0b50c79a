"""`Options`: all options for compiling and running a model.

Each class declares its settings in its body, with their accepted values and their effects; its methods store them.
`Options` extends those of rows and results, `poptorch.settings.batches`, of devices, `devices`, and of reports,
`reports`. Nested groups are in `groups`, `locations` and `session_options`; descriptors of settings in `setting`;
readers of files and JSON in `files`; defaults from the environment in `environment`. `python -m poptorch options`
prints a page of all settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch

from poptorch import enums
from poptorch.enums import OutputMode
from poptorch.placement import strategies
from poptorch.placement.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    _IExecutionStrategy,
)
from poptorch.settings.batches import _BatchOptions, checked_period
from poptorch.settings.devices import _DeviceOptions
from poptorch.settings.files import ConfigFileError, run_calls, run_lines
from poptorch.settings.groups import _DistributedOptions, _JitOptions, _PrecisionOptions, _TrainingOptions
from poptorch.settings.locations import TensorLocationSettings, _TensorLocationOptions
from poptorch.settings.reports import _ReportOptions
from poptorch.settings.session_options import _PopartOptions
from poptorch.settings.setting import Group, OptionsDict, group, in_words, positive, setting, strings, table

__all__ = [
    "Anchor",
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "options_page",
]


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


class Options(_ReportOptions, _DeviceOptions, _BatchOptions):
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

    broadcast_buffers: bool = setting(
        True,
        "models that write a buffer are refused where there are several replicas; if False, each has its own copy",
        "broadcastBuffers",
    )
    random_seed: int | None = setting(
        None,
        "random numbers of models, and the order of shuffled data, are the same in every run of the program",
        "randomSeed",
    )
    anchored_tensors: dict[str, Anchor] = setting(
        {}, "tensors within the model that `getAnchoredTensor` gives", "anchorTensor", default_text="none"
    )
    executable_cache: str | None = setting(
        None,
        "the folder in which compiled programs are kept, so that they are not compiled again",
        "enableExecutableCaching",
        make=lambda: os.environ.get("POPTORCH_CACHE_DIR") or None,
        default_text="the environment variable POPTORCH_CACHE_DIR, or none",
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
    updatable_named_buffers: list[str] = setting(
        [],
        "the buffers that `copyNamedBuffersToDevice` writes",
        "updatableNamedBuffers",
        valid=strings,
        expects="a list of strings",
        default_text="none",
    )
    execution_strategy: _IExecutionStrategy = setting(
        PipelinedExecution(),
        "which units and stages blocks belong to; the rules that make a program valid are checked",
        "setExecutionStrategy",
        kind=_IExecutionStrategy,
        expects="an execution strategy, such as poptorch.ShardedExecution()",
    )
    stable_norm: bool = setting(
        False, "variances of normalisations are computed in two passes in any case", "enableStableNorm"
    )

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

    # Models

    def randomSeed(self, random_seed: int) -> Self:
        """Seed random numbers of models and shuffling, and PyTorch's generator (`torch.manual_seed`)."""
        self._set(random_seed=random_seed)
        torch.manual_seed(random_seed)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Refuse models with buffers that differ between replicas (True), or give each replica its own copy (False)."""
        return self._set(broadcast_buffers=broadcast_buffers)

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
        period = checked_period("anchorTensor", output_return_period) if output_mode == OutputMode.EveryN else 1
        return self._set(anchored_tensors={**self.anchored_tensors, short_name: Anchor(long_name, output_mode, period)})

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Set the names of buffers that `copyNamedBuffersToDevice` uploads."""
        return self._set(updatable_named_buffers=buffers)

    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute variances of normalisations in two passes, for accuracy. Always on here."""
        return self._set(stable_norm=enabled)

    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """Set the execution strategy of blocks on several IPUs.

        Args:
            strategy: a `PipelinedExecution` (the default), `ShardedExecution`, `ParallelPhasedExecution` or
                `SerialPhasedExecution`.
        """
        return self._set(execution_strategy=strategy)

    def keptPrograms(self, kept_programs: int) -> Self:
        """Limit the number of cached programs of a model; the least recently used are evicted.

        `generate` needs one for each argument signature. If a shape, or a Python branch, depends on numbers of a run
        (`x[mask]`, `x.sum().item()`), there is a graph break, and a program for each shape or number that occurs. With
        1 there are no graph breaks, but an `Error` that names the place.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(kept_programs=kept_programs)

    def enableExecutableCaching(self, path: str | None) -> Self:
        """Cache compiled programs in the folder `path`; `None` switches the cache off."""
        return self._set(executable_cache=path)

    # All options

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
        """Dictionary of all settings, including groups.

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
        """Values of all settings; groups as `group.setting`."""
        for name, value in self._values().items():
            if isinstance(value, OptionsDict):
                yield from ((f"{name}.{inner}", each) for inner, each in value._values().items())
            else:
                yield name, value


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
