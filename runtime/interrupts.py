"""Work that no signal cuts in two.

Python handles signals between any two of its own steps, in the main thread, and what handles them may raise: Ctrl-C
raises `KeyboardInterrupt`. A run gives up the memory of the variables that it changes; were it left just then, they
would be lost.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of `signal`, without its look-up of names, which takes longest
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELD_BACK = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)
"""The signals that programs handle, as far as the system has them."""


_waiting: list[tuple[int, Any]] = []
"""The signals that wait for `uninterrupted` work to end, and what handles them."""


def handle_waiting() -> None:
    """Within `uninterrupted` work, where it may be left: handle the signals that wait. What handles one may raise."""
    if _waiting and threading.current_thread() is threading.main_thread():
        number, handler = _waiting.pop(0)
        handler(number, sys._getframe())


def uninterrupted(work: Callable[[], object]) -> None:
    """Do some work; signals that come meanwhile are handled right after it, in time or not.

    What handles one may raise then, so the work has to leave its results somewhere by itself. It should be short, or
    call `handle_waiting` where it may be left.

    Example:
        >>> import signal
        >>> done = []
        >>> def work():
        ...     signal.raise_signal(signal.SIGINT)
        ...     done.append("all of it")
        >>> try:
        ...     uninterrupted(work)
        ... except KeyboardInterrupt:
        ...     print("interrupted, but", *done)
        interrupted, but all of it
    """
    if threading.current_thread() is not threading.main_thread():  # there are no signals in others
        work()
        return
    before: dict[int, Any] = {}
    is_working = True

    def held_back(number: int, frame: Any) -> None:
        if is_working:
            _waiting.append((number, before[number]))
        else:  # one of these signals has come, and raised, before all could be handled as before
            before[number](number, frame)

    try:
        for number in HELD_BACK:
            handler = _signal.getsignal(number)
            if callable(handler):  # it is in Python
                before[number] = handler
                _signal.signal(number, held_back)
        work()
    finally:
        is_working = False
        for number, handler in before.items():
            _signal.signal(number, handler)
        came = dict.fromkeys(number for number, _ in _waiting)
        _waiting.clear()
        for number in came:  # not raised anew: who reads what `signal.set_wakeup_fd` writes, as asyncio, has been told
            handler = _signal.getsignal(number)  # one of those before may have set another one
            if callable(handler):
                handler(number, sys._getframe())
            else:
                _signal.raise_signal(number)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the length of a block. No signal interrupts its removal, which Python's functions do not expect.

    Example:
        >>> with scratch_folder() as folder:
        ...     (folder / "part").write_bytes(b"...")
    """
    folder = tempfile.TemporaryDirectory(prefix="popxl-")
    try:
        yield Path(folder.name)
    finally:
        uninterrupted(folder.cleanup)
