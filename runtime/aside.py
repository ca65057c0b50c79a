"""Compiling, where Ctrl-C does no harm.

Python handles signals in the main thread, and Ctrl-C raises `KeyboardInterrupt` there. JAX looks for signals while XLA
compiles, too: it then lets go of a program that XLA is still busy with, and the process dies sooner or later. So XLA
compiles in threads from here, which signals do not reach. Nobody has to wait for these: an interrupted main thread goes
on at once. What a thread has begun it finishes, and it is thrown away.

JAX traces and lowers in the main thread, where the functions of users expect to be called. What an exception anywhere
in the midst of that leaves behind, nobody knows. So signals wait; between two ops of the program they are handled.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from runtime.interrupts import uninterrupted
from runtime.jax_private import settings_of_this_thread

T = TypeVar("T")

_Work = tuple[Future[Any], Callable[[], Any]]


def lower(traced: Callable[[], Any]) -> Any:
    """What a function gives that has JAX trace and lower. Signals are handled where ops are traced, or afterwards."""
    lowered: list[Any] = []
    uninterrupted(lambda: lowered.append(traced()))
    return lowered[0]


_busy: set[threading.Thread] = set()


def _end() -> None:
    """At the end of the program: a thread that comes back from XLA while Python is taken down would abort the process.

    After an uncaught exception, Ctrl-C above all, the process ends at once. Otherwise the threads are waited for, as
    Python tells nobody here with which exit code it is about to end; Ctrl-C ends that, too.
    """
    failed = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    try:
        while _busy and failed is None:
            for thread in [*_busy]:
                thread.join()
    except KeyboardInterrupt as interrupt:
        failed = interrupt
    if not _busy:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            stream.flush()
    if isinstance(failed, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(1)


atexit.register(_end)


class Aside:
    """Threads that do work, for the length of a block: as many as there is work, up to a number.

    They have the context variables and the settings of JAX of the thread that makes this. At the end of the block
    nobody waits: what has not begun is dropped.

    Args:
        count: how many pieces of work may be done at once.

    Example:
        >>> with Aside(2) as aside:
        ...     futures = [aside.begin(lambda n=n: n * n) for n in range(3)]
        ...     [future.result() for future in futures]
        [0, 1, 4]
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        self._threads: list[threading.Thread] = []
        self._settings = settings_of_this_thread()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Have some work done. The future's `result()` waits for it, and raises what it raises."""
        future: Future[T] = Future()
        self._futures.append(future)
        self._work.put((future, work))
        if len(self._threads) < self._count:
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(self._do,), name="popxl compilation", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _do(self) -> None:
        self._settings()
        while (next_one := self._work.get()) is not None:
            future, work = next_one
            if future.set_running_or_notify_cancel():
                _busy.add(threading.current_thread())
                try:
                    future.set_result(work())
                except BaseException as problem:
                    future.set_exception(problem)
                _busy.discard(threading.current_thread())
            del next_one, future, work  # what it made may be large

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._futures:
            future.cancel()
        for _thread in self._threads:
            self._work.put(None)
