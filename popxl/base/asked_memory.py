"""What a tool asks training steps to keep in memory, in place of what the program leaves open."""

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
        memory: the plan or policy that training steps get where the program leaves it open.
        applied: what applied a plan or policy while the program was built.
    """

    memory: Any
    applied: list[Any] = field(default_factory=list)


_asked: ContextVar[AskedMemory | None] = ContextVar("asked_memory", default=None)


def asked_memory() -> AskedMemory | None:
    """Memory budget from a tool; `None` without one."""
    return _asked.get()


@contextmanager
def asking(memory: Any) -> Iterator[AskedMemory]:
    """Ask for a plan or policy while a block lasts."""
    asked = AskedMemory(memory)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
