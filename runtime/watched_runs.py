"""Runs of a user's Python file for the commands of `popxl`: observed, and stopped before the first run of a session."""

from __future__ import annotations

import atexit
import os
import runpy
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

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


class AnalyzedNames(UserDict[str, Any]):
    """Names of a program's `module`: analyzes the first call of one function, which then ends the program.

    Args:
        requesting: context of that call, such as a request for a memory plan; other functions are called without.

    Attributes:
        analysis: figures of the function; `None` if the program did not call it.
        requested: what `requesting` gave.
    """

    def __init__(
        self, name: str, target: Target | None, requesting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        super().__init__()
        if "." in name:
            raise PopxlError(
                f"{name!r} is a method, and only functions at the top level of a file are found: define one that calls "
                "it there."
            )
        self.module = ModuleType("__main__")
        self.data = self.module.__dict__
        self.data["__builtins__"] = __builtins__
        self._name, self._target, self._requesting = name, target, requesting
        self.analysis: Analysis | None = None
        self.requested: Any = None

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self._analyzed(value) if name == self._name and callable(value) else value)

    def absence(self, file: Path) -> str:
        """Why there is no analysis of a file that ended normally: start of a sentence."""
        if isinstance(self.data.get(self._name), Ir):
            return f"{file}:{self._name} is an Ir, and not a JAX function ({file} alone gives its sessions)"
        return f"{file} does not call a function {self._name!r} of its own"

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


@contextmanager
def silenced_stdout() -> Iterator[None]:
    """Drop what a program prints. Unlike a `StringIO`, the file can be reconfigured and has a buffer of bytes."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


_WAITING = (threading.__file__, selectors.__file__)
"""Files of functions in which Python waits for other threads, or for the network."""


class _Threads:
    """Threads of a program. One that would run a session ends, and so does the main thread, which may wait for it.

    Attributes:
        stop: what ended the first of these; `None` while all continue.
    """

    left: ClassVar[list[threading.Thread]] = []  # those of stopped programs

    def __init__(self) -> None:
        self.stop: NothingRuns | None = None
        self._earlier, self._is_running = set(threading.enumerate()), True
        self._other_failures = threading.excepthook
        threading.excepthook = self._end  # for good: threads may outlive the main thread of the program
        self._set_exception = Future.set_exception
        Future.set_exception = self._future_setter()  # type: ignore[method-assign, assignment]
        self._main = threading.get_ident() if threading.current_thread() is threading.main_thread() else None
        if self._main is not None:
            self._handler = signal.signal(signal.SIGURG, self._end_main)

    def _end(self, failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, NothingRuns):
            self._other_failures(failure)
        elif self._is_running and self.stop is None and failure.thread not in self._earlier:
            self.stop = failure.exc_value
            if self._main is not None:
                signal.pthread_kill(self._main, signal.SIGURG)  # it also ends waiting, unlike `interrupt_main`

    def _future_setter(self) -> Callable[[Future[Any], BaseException | None], None]:
        """`Future.set_exception`, which also ends a main thread that does not ask this future, and waits forever."""
        before = self._set_exception

        def set_exception(future: Future[Any], exception: BaseException | None) -> None:
            before(future, exception)
            if isinstance(exception, NothingRuns) and threading.get_ident() != self._main is not None:
                threading.Thread(target=self._end_once_waiting, args=(exception,), daemon=True).start()

        return set_exception

    def _end_once_waiting(self, stop: NothingRuns) -> None:
        while self._is_running and self.stop is None:
            time.sleep(0.5)  # in which a main thread that asks the future gets its exception
            frame = sys._current_frames().get(self._main or 0)
            if frame is not None and frame.f_code.co_filename in _WAITING:
                self._end(threading.ExceptHookArgs((NothingRuns, stop, None, threading.current_thread())))

    def _end_main(self, *_: Any) -> NoReturn:
        raise NothingRuns

    def finish(self) -> None:
        """The main thread has ended."""
        self._is_running = False
        Future.set_exception = self._set_exception  # type: ignore[method-assign]
        if self._main is not None:
            signal.signal(signal.SIGURG, self._handler)

    def leave(self) -> None:
        """The program was stopped, and its threads are left to themselves."""
        self.left.extend(each for each in threading.enumerate() if each not in self._earlier and not each.daemon)


def exit_without_threads(code: int) -> int:
    """Exit the process if stopped programs left threads, which may wait for their main thread forever: Python would
    wait for them. Otherwise, return the exit code."""
    if any(thread.is_alive() for thread in _Threads.left):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run_file(file: Path, arguments: Sequence[str], names: AnalyzedNames | None = None) -> tuple[str, int]:
    """Run a Python file as `__main__`.

    Args:
        names: dictionary of its global names, by default Python's own.

    Returns:
        The reason why it was stopped, if its next step would be a run, and its exit code. If it fails, its error has
        been printed.
    """
    argv, path, main = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path = [str(file), *arguments], [os.fspath(file.resolve().parent), *path]
    threads = _Threads()
    try:
        if names is None:
            runpy.run_path(os.fspath(file), run_name="__main__")
        else:
            names["__file__"] = os.fspath(file)
            sys.modules["__main__"] = names.module
            exec(compile(file.read_bytes(), os.fspath(file), "exec"), names.module.__dict__, names)
    except NothingRuns as stop:
        threads.leave()
        return _last_line([stop, threads.stop], file), 0
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
        sys.argv, sys.path, sys.modules["__main__"] = argv, path, main
        threads.finish()
        sys.stdout.flush()
    return "", 0


def _last_line(stops: Sequence[NothingRuns | None], file: Path) -> str:
    """Source line at which the program was stopped."""
    frames = (frame for stop in stops if stop is not None for frame in traceback.extract_tb(stop.__traceback__))
    last = [frame for frame in frames if Path(frame.filename) == file][-1]
    return f"`{last.line}` ({file}:{last.lineno})"
