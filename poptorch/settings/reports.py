"""Options of reports and messages: their folders, names and amount."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import torch

import popxl
from poptorch.base.logging_ import logger
from poptorch.settings.environment import profile_dir_of_environment, requested_profile_dir
from poptorch.settings.setting import NO_EFFECT, OptionsDict, setting, strings


def _library_folders() -> list[str]:
    folders = Path(torch.__file__).parent, Path(__file__).parents[1], Path(popxl.__file__).parent
    return [f"{folder}{os.sep}" for folder in folders]


class _ReportOptions(OptionsDict):
    """Reports, logs, and names of operations in them."""

    profile_dir: str | None = setting(
        None,
        "the folder to which reports about the model are written",
        "enableProfiling",
        make=requested_profile_dir,
        default_text="none, unless POPLAR_ENGINE_OPTIONS or PVTI_OPTIONS asks for reports",
        of_the_run=True,
    )
    model_name: str | None = setting(
        None, "the name of the model in reports", "modelName", default_text="training or inference"
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
        default_text="the folders of torch and of this library",
    )
    log_cycle_count: bool = setting(False, "`cycleCount` may be asked", "logCycleCount")

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write reports to the folder `profile_dir`, by default the current one.

        The folder that `POPLAR_ENGINE_OPTIONS` or `PVTI_OPTIONS` name in the environment has priority, with a warning.
        """
        asked, folder = profile_dir or ".", profile_dir_of_environment()
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

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Report unused optimiser attributes as debug messages, not as warnings."""
        return self._set(relax_optimizer_attributes_checks=relax)

    def disableModuleNamescope(self) -> Self:
        """Omit module names from names of operations."""
        return self._set(module_namescope_enabled=False)

    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Omit frames from source locations whose file path contains any of `excludes`."""
        return self._set(source_location_excludes=excludes)

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Add to the patterns of `sourceLocationExcludes`."""
        return self._set(source_location_excludes=[*self.source_location_excludes, *excludes])
