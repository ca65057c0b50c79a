"""Lock for executables with collectives: CPUs run them sequentially.

In a collective, each device blocks a thread until the others arrive. XLA has about as many threads as devices, and
starts an executable on each device as soon as it can. If devices wait in one executable and others in the next, no
thread may be left for the devices that they wait for. XLA then ends the process after a minute (jaxlib 0.10.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from popxl.base.arrays import Array


class CpuCollectiveLock:
    """The process-wide lock of executables with collectives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: Array = None  # results of the last executable called

    def run_exclusive(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call an executable after earlier ones, and wait for its results.

        The results may be donated to executables that are not waited for; so the next caller does not wait for them.
        """
        with self._lock:
            self._wait()
            return jax.block_until_ready(call(*arguments))

    @contextmanager
    def acquire(self, changing: Sequence[Array]) -> Iterator[Callable[[Sequence[Array]], None]]:
        """Hold the lock during the call of an executable, without waiting for results.

        XLA starts it after the executable that made its donated arguments; so that one is not waited for either.

        Yields:
            A function that takes the results of the executable.
        """
        with self._lock:
            if not any(array is self._in_flight for array in changing):
                self._wait()
            yield self._set_results

    def _set_results(self, arrays: Sequence[Array]) -> None:
        self._in_flight = min(arrays, key=lambda array: array.nbytes, default=None)  # kept until the next call

    def _wait(self) -> None:
        before, self._in_flight = self._in_flight, None
        if before is not None and not before.is_deleted():
            before.block_until_ready()
