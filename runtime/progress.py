"""Progress of compilations and other long work: callbacks, and a progress line on terminals.

`stage` and `report_compilation` say what happens now, `report` says what was found; the context has the callbacks.

Nothing is shown in the first seconds of a compilation, or if standard error is not a terminal. The environment variable
`POPXL_PROGRESS` changes that: `off` shows nothing; `on` shows it there too, line by line.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Self

PATIENCE = 3.0
"""Seconds before anything is shown."""

INTERVALS = {True: 1.0, False: 10.0}
"""Seconds between what is shown: on a terminal, and elsewhere."""


@dataclass(frozen=True)
class CompilationProgress:
    """Progress of a program's compilation.

    Attributes:
        done, total: number of compiled executables, and of those to compile; a program that is one executable has 1.
        what: executable being compiled, in a few words; empty at the end.
        seconds: time so far.
    """

    done: int
    total: int
    what: str
    seconds: float

    def __str__(self) -> str:
        piece = f" {self.done + 1} of {self.total}" if self.total > 1 else ""
        return f"Compiling{piece}: {self.what}, {self.seconds:.0f} s"


Callback = Callable[[CompilationProgress], object]

_callback: ContextVar[Callback | None] = ContextVar("compilation_progress", default=None)
_reader: ContextVar[Callable[[str], object]] = ContextVar("reporting", default=lambda line: None)


@contextmanager
def compilation_progress(callback: Callback) -> Iterator[None]:
    """Call a function with compilation progress while a block runs, replacing the terminal's progress line.

    It is called in the thread that makes the session: before each executable is compiled, and at the end. Executables
    that were compiled before, or come from a file, are not counted; if none are left, only the end is reported.

    Args:
        callback: function of a `CompilationProgress`. Its exceptions end the compilation.

    Example:
        >>> from popxl.session import compilation_progress
        >>> told = []
        >>> with compilation_progress(told.append):
        ...     session = popxl.Session(ir)
        >>> told[-1].done == told[-1].total
        True
    """
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)


class _ProgressLine:
    """Progress line in standard error while a block runs: a thread prints a text periodically. On terminals it is
    cleared at the end."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start printing, unless that is disabled or has begun."""
        if self._thread is None and _is_enabled():
            self._thread = threading.Thread(target=self._show, name="progress line", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        stream = sys.stderr
        on_terminal = stream.isatty()
        begin, end = ("\r\x1b[K", "") if on_terminal else ("", "\n")
        waiting = PATIENCE
        while not self._over.wait(waiting):
            print(f"{begin}{self._text()}", end=end, file=stream, flush=True)
            waiting = INTERVALS[on_terminal]
        if on_terminal and waiting != PATIENCE:
            print(begin, end="", file=stream, flush=True)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Show a stage of long work on the progress line while a block runs, with the compilations in the block.

    Nothing is shown under a callback of `compilation_progress`, which is told of the compilations.

    Args:
        what: the stage, in a few words.

    Example:
        >>> with stage("Memory plan within 14 GB: solving"):
        ...     plan = 1 + 1  # takes a while
    """
    if _callback.get() is not None:
        yield
        return
    start, compiling = perf_counter(), ""

    def set_compiling(progress: CompilationProgress) -> None:
        nonlocal compiling
        compiling = f", compiling {progress.what}" if progress.what else ""

    line = _ProgressLine(lambda: f"{what}{compiling}, {perf_counter() - start:.0f} s")
    with line, compilation_progress(set_compiling):
        line.begin()
        yield


@contextmanager
def compilation() -> Iterator[None]:
    """Show the progress of a program's compilation, from `report_compilation`, while a block runs."""
    callback, start = _callback.get(), perf_counter()
    now = CompilationProgress(0, 0, "", 0.0)

    def timed() -> CompilationProgress:
        return replace(now, seconds=perf_counter() - start)

    def record_progress(progress: CompilationProgress) -> None:
        nonlocal now
        now = progress
        if callback is not None:
            callback(timed())
        else:
            line.begin()

    with _ProgressLine(lambda: str(timed())) as line, compilation_progress(record_progress):
        yield
    if callback is not None:
        callback(replace(timed(), done=now.total, what=""))


def report_compilation(what: str, done: int, total: int) -> None:
    """Report the start of compilation `what`, after `done` of `total` compilations."""
    if (callback := _callback.get()) is not None:
        callback(CompilationProgress(done, total, what, 0.0))


@contextmanager
def reporting(callback: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each line that `report` is given while a block runs.

    Example:
        >>> lines = []
        >>> with reporting(lines.append):
        ...     report("1: 3 MB as compiled")
        >>> lines
        ['1: 3 MB as compiled']
    """
    token = _reader.set(callback)
    try:
        yield
    finally:
        _reader.reset(token)


def report(line: str) -> None:
    """Report a result of long work, such as of one compilation of several."""
    _reader.get()(line)


def _is_enabled() -> bool:
    chosen = os.environ.get("POPXL_PROGRESS") or "auto"
    if chosen not in ("auto", "on", "off"):
        raise ValueError(f"The environment variable POPXL_PROGRESS is {chosen!r}; expected 'auto', 'on' or 'off'.")
    return sys.stderr is not None and (chosen == "on" or (chosen == "auto" and sys.stderr.isatty()))
