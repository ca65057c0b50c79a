"""Threads for compilation, which Ctrl-C does not reach.

Python handles signals in the main thread, and Ctrl-C raises `KeyboardInterrupt` there. JAX also polls for signals while
XLA compiles: it then frees a program that XLA still works on, and the process crashes sooner or later. So XLA compiles
in threads of this pool, which signals do not reach. An interrupted main thread continues at once: a thread finishes its
current compilation, and the result is dropped.

JAX traces and lowers in the main thread, where users' functions expect to be called. An exception during that could
leave JAX in an undefined state. So signals are deferred, and delivered between two ops of the program.
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

from runtime.jax_private import settings_of_this_thread
from runtime.signals import defer_signals

T = TypeVar("T")

_Job = tuple[Future[Any], Callable[[], Any]]


def lower(traced: Callable[[], Any]) -> Any:
    """Call a function that traces and lowers, with signals delivered between ops or afterwards."""
    return defer_signals(traced)


_compiling: set[threading.Thread] = set()


def _at_exit() -> None:
    """Exit handler: wait for compilations, because threads that return from XLA during shutdown abort the process.

    After an uncaught exception, Ctrl-C above all, the process ends at once. Otherwise it waits for the threads, because
    Python does not give exit handlers the exit code; Ctrl-C interrupts that wait, too.
    """
    failed = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    try:
        while _compiling and failed is None:
            for thread in [*_compiling]:
                thread.join()
    except KeyboardInterrupt as interrupt:
        failed = interrupt
    if not _compiling:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no such stream, or a broken pipe
            stream.flush()
    if isinstance(failed, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(1)


atexit.register(_at_exit)


class CompilePool:
    """A scoped thread pool for compilation.

    Its threads have the context variables and the JAX settings of the thread that makes the pool. The end of the block
    does not wait: jobs that have not begun are cancelled.

    Example:
        >>> with CompilePool(2) as pool:
        ...     futures = [pool.submit(lambda n=n: n * n) for n in range(3)]
        ...     [future.result() for future in futures]
        [0, 1, 4]
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        self._threads: list[threading.Thread] = []
        self._settings = settings_of_this_thread()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a job in a thread. Its future's `result()` waits, and raises the job's exception."""
        future: Future[T] = Future()
        self._futures.append(future)
        self._jobs.put((future, work))
        if len(self._threads) < self._count:
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(self._run_jobs,), name="popxl compilation", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _run_jobs(self) -> None:
        self._settings()
        while (job := self._jobs.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                _compiling.add(threading.current_thread())
                try:
                    future.set_result(work())
                except BaseException as problem:
                    future.set_exception(problem)
                _compiling.discard(threading.current_thread())
            del job, future, work  # its result may be large

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._futures:
            future.cancel()
        for _thread in self._threads:
            self._jobs.put(None)
