"""Memory plans and policies that a tool requests for training steps, where the program leaves them open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AskedMemory:
    """Memory plan or policy for a program, with its result.

    Attributes:
        memory: the plan or policy.
        applied: objects that applied it while the program was built.
        held: for graphs that stages of a pipeline call, the most micro-batches whose activations a device holds at a
            time.
    """

    memory: Any
    applied: list[Any] = field(default_factory=list)
    held: dict[Any, int] = field(default_factory=dict)


_asked: ContextVar[AskedMemory | None] = ContextVar("asked_memory", default=None)


def asked_memory() -> AskedMemory | None:
    """Memory plan or policy requested by a tool; `None` without one."""
    return _asked.get()


@contextmanager
def asking(memory: Any) -> Iterator[AskedMemory]:
    """Context manager that requests a plan or policy."""
    asked = AskedMemory(memory)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
