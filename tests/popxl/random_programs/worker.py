"""Processes that check random programs, and whoever asks them to: the end of one is an answer, too."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX
os.environ.setdefault("POPXL_CPU_DEVICES", "8")
os.environ.setdefault("POPART_LOG_LEVEL", "ERR")  # programs are odd, and popxl would say so

import jax

from tests.popxl.random_programs.agreement import agree, described

PATIENCE = 600
"""Seconds for some programs: what takes longer hangs."""

ENOUGH = 2 << 30
"""Bytes of memory from which on a process is replaced."""


@dataclass(frozen=True)
class Answer:
    """What came of some programs.

    Attributes:
        problem: what went wrong; `None`, if nothing did.
        text: the programs.
        is_last: whether the process has grown too large.
    """

    problem: str | None
    text: str = ""
    is_last: bool = False


def work(connection: Connection) -> None:
    """Check programs as asked."""
    is_last = False
    while not is_last:
        try:
            seeds, most = connection.recv()
        except EOFError:  # nobody asks any more
            return
        try:
            agree(seeds, most, show=lambda graph: connection.send(str(graph)))
            problem = None
        except Exception as raised:
            problem = described(raised)
        jax.clear_caches()
        gc.collect()
        is_last = _memory() > ENOUGH
        connection.send(Answer(problem, is_last=is_last))


def _memory() -> int:
    """Bytes that this process has, where the system says so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


class Worker:
    """Checks programs in another process; in a new one, when that has ended."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def check(self, seeds: Sequence[int], most: int | None = None) -> Answer:
        """What comes of programs, as `agree` takes them."""
        if self._process is None:
            self._start()
        texts: list[str] = []
        try:
            self._connection.send((seeds, most))
            while self._connection.poll(PATIENCE):
                received = self._connection.recv()
                if isinstance(received, Answer):
                    if received.is_last:
                        self.stop()
                    return Answer(received.problem, "\n".join(texts))
                texts.append(received)
            problem = f"nothing came within {PATIENCE} seconds"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            problem = f"the process ended with the code {self._process.exitcode}"
        self.stop()
        return Answer(problem, "\n".join(texts))

    def _start(self) -> None:
        processes = multiprocessing.get_context("spawn")
        self._connection, other = processes.Pipe()
        self._process = processes.Process(target=work, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
