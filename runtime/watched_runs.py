"""Runs of a user's Python file for the commands of `popxl`: observed, and stopped before the first run of a session."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

from popxl.base.pages import bytes_text
from popxl.context import get_current_context
from popxl.core.recording import Op
from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime.costs.memory import least_memory_of
from runtime.jax_analysis import Analysis, analyze
from runtime.machine import Machine, NothingRuns
from runtime.pipes import is_broken_pipe
from runtime.program.build_layout import layout_for
from runtime.program.compiled import CompiledProgram, Precompiled
from runtime.program.run import Runner
from runtime.session import Session
from runtime.targets.devices import Device
from runtime.targets.offline import Target


class AnalyzedNames(dict[str, Any]):
    """Names of a program: analyzes the first call of one function, which then ends the program.

    Args:
        requesting: context of that call, such as a request for a memory plan; other functions are called without.

    Attributes:
        analysis: figures of the function; `None` if the program did not call it.
        requested: what `requesting` gave.
    """

    def __init__(
        self, name: str, target: Target | None, requesting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        super().__init__(__name__="__main__", __builtins__=__builtins__)
        self._name, self._target, self._requesting = name, target, requesting
        self.analysis: Analysis | None = None
        self.requested: Any = None

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self._analyzed(value) if name == self._name and callable(value) else value)

    def _analyzed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def analyzed(*args: Any, **kwargs: Any) -> Any:
            with self._requesting() as self.requested:
                self.analysis = analyze(function, *args, target=self._target, **kwargs)
            raise NothingRuns

        return analyzed


class WatchingMachine(Machine):
    """Machine wrapper recording programs and runners created by another machine.

    Attributes:
        runners: runner of each session, where it runs.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.programs: list[tuple[Ir, CompiledProgram]] = []
        self.runners: dict[CompiledProgram, Runner | None] = {}

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        return self._machine.device(description, ir)

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        program = self._machine.program(ir, device, precompiled)
        self.programs.append((ir, program))
        return program

    def runner(self, program: CompiledProgram) -> Runner | None:
        runner = self.runners[program] = self._machine.runner(program)
        return runner

    def refusal(self, what: str, device: Device) -> BaseException:
        return self._machine.refusal(what, device)


class TrialMachine(WatchingMachine):
    """Records compiled programs; a failed compilation stops the user's program and stores the problem. So does a
    program whose variables and feeds alone exceed a chip's memory, without compiling.

    Attributes:
        problem: why a program could not be compiled.
        has_figures: whether the memory and speed of the device are known.
    """

    problem = ""
    has_figures = True

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        layout = layout_for(ir, device)
        figures = device.chip
        try:
            if figures is None:
                self.has_figures = False
                raise PopxlError(
                    f"The memory and speed of {device} are not known. Name a machine by `--target`, or measure this "
                    "one by `popxl calibrate`, and set POPXL_CHIP to the file."
                )
            least, capacity = least_memory_of(layout), figures.memory_bytes
            if least > capacity:
                raise PopxlError(
                    f"The program does not fit, and was not compiled: its variables and feeds alone need "
                    f"{bytes_text(least)} of a chip, which has {bytes_text(capacity)}."
                )
            return super().program(ir, device, precompiled)
        except PopxlError as problem:
            self.problem = str(problem)
            raise NothingRuns from problem


@contextmanager
def watched(machine: Machine, irs: dict[Ir, None] | None = None) -> Iterator[None]:
    """Make sessions use `machine`, recording Irs that receive ops."""

    def record_ir(op: Op) -> None:
        if irs is not None:
            irs.setdefault(op.graph.ir)

    context = get_current_context()
    before, Session.machine = Session.machine, machine
    hook = context.register_op_created_hook(record_ir)
    try:
        yield
    finally:
        Session.machine = before
        context.remove_op_created_hook(hook)


def run_file(file: Path, arguments: Sequence[str], names: dict[str, Any] | None = None) -> tuple[str, int]:
    """Run a Python file as `__main__`.

    Args:
        names: dictionary of its global names, by default Python's own.

    Returns:
        The reason why it was stopped, if its next step would be a run, and its exit code. If it fails, its error has
        been printed.
    """
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(file), *arguments], [os.fspath(file.resolve().parent), *path]
    try:
        if names is None:
            runpy.run_path(os.fspath(file), run_name="__main__")
        else:
            names["__file__"] = os.fspath(file)
            exec(compile(file.read_bytes(), os.fspath(file), "exec"), names)
    except NothingRuns as stop:
        return _last_line(stop.__traceback__, file), 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return "", end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as problem:
        if isinstance(problem, BrokenPipeError) and is_broken_pipe():
            raise
        frames = problem.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename) != file:
            frames = frames.tb_next  # so that it begins in the program
        traceback.print_exception(problem.with_traceback(frames))
        if isinstance(problem, ModuleNotFoundError):
            print(
                f"popxl: {file} needs {problem.name!r}, which is not installed beside popxl, in {sys.prefix}. Install "
                f"it there: {sys.executable} -m pip install NAME.",
                file=sys.stderr,
            )
        return "", 1
    finally:
        sys.argv, sys.path = argv, path
        sys.stdout.flush()
    return "", 0


def _last_line(frames: TracebackType | None, file: Path) -> str:
    """Source line at which the program was stopped."""
    own_frames = [frame for frame in traceback.extract_tb(frames) if Path(frame.filename) == file]
    return f"`{own_frames[-1].line}` ({file}:{own_frames[-1].lineno})"
