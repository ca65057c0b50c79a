"""Deferred signals: calls that no signal handler interrupts.

Python runs signal handlers between any two of its own steps, in the main thread, and handlers may raise: Ctrl-C raises
`KeyboardInterrupt`. A run donates the memory of the variables that it changes; an exception during it would lose them.
And JAX compares the keys of its caches in Python, called from C++, which turns any exception into a `ValueError`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of `signal`, without its look-up of names, which takes longest
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEFERRED = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)
"""Deferred signals: those that programs handle, where the system has them."""


_pending: list[tuple[int, Any]] = []
"""Deferred signals, with their handlers."""


def deliver_pending_signals() -> None:
    """Run the handler of the first deferred signal, which may raise an exception; no-op outside `defer_signals`."""
    if _pending and threading.current_thread() is threading.main_thread():
        number, handler = _pending.pop(0)
        handler(number, sys._getframe())


def defer_signals(work: Callable[[], T]) -> T:
    """Call a function and return what it returns; deliver signals that arrive meanwhile right afterwards.

    Signal handlers may raise then, so the function itself has to store results that must not be lost. It should be
    short, or call `deliver_pending_signals` where an exception does no harm.

    Example:
        >>> import signal
        >>> done = []
        >>> def work():
        ...     signal.raise_signal(signal.SIGINT)
        ...     done.append("all of it")
        >>> try:
        ...     defer_signals(work)
        ... except KeyboardInterrupt:
        ...     print("interrupted, but", *done)
        interrupted, but all of it
    """
    if threading.current_thread() is not threading.main_thread():  # other threads handle no signals
        return work()
    # What is in Python. Loops that set handlers have no branches: where Python 3.13 jumps back from one, it handles
    # signals, and an exception that is raised there passes by the `finally`.
    before: dict[int, Any] = {n: handler for n in DEFERRED if callable(handler := _signal.getsignal(n))}
    is_working = True

    def defer(number: int, frame: Any) -> None:
        if is_working:
            _pending.append((number, before[number]))
        else:  # one of these signals has raised, before all could be restored
            before[number](number, frame)

    try:
        for each in before:
            _signal.signal(each, defer)
        return work()
    finally:
        try:
            _restore(before, defer)
        finally:
            is_working = False
            _deliver_all()


def _restore(before: Mapping[int, Any], defer: Any) -> None:
    """Restore signal handlers replaced by `defer`, even if a restored handler raises meanwhile."""
    deferred = {number: handler for number, handler in before.items() if _signal.getsignal(number) is defer}
    try:
        for number, handler in deferred.items():
            _signal.signal(number, handler)
    except BaseException:
        _restore(before, defer)
        raise


def _deliver_all() -> None:
    """Run the handlers of all deferred signals, once each, up to the first that raises an exception."""
    try:
        came = dict.fromkeys([number for number, _ in _pending])
    finally:
        _pending.clear()  # also if another signal, which is handled as ever, raises here: an exception is on its way
    for number in came:  # not raised again: readers of `signal.set_wakeup_fd`, such as asyncio, have been notified
        handler = _signal.getsignal(number)  # an earlier handler may have set another one
        if callable(handler):
            handler(number, sys._getframe())
        else:
            _signal.raise_signal(number)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for a `with` block; signals are deferred during its removal.

    Example:
        >>> with scratch_folder() as folder:
        ...     (folder / "part").write_bytes(b"...")
    """
    folder = tempfile.TemporaryDirectory(prefix="popxl-")
    try:
        yield Path(folder.name)
    finally:
        defer_signals(folder.cleanup)
