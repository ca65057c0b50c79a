"""`ProgramCache`: the most recently used programs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from poptorch.base.logging_ import Warned

Program = TypeVar("Program")


class ProgramCache(Generic[Program]):
    """LRU cache of programs. Evictions are warned of, once: each new program costs a compilation.

    Args:
        capacity: maximum number of programs.
        close: function that releases a program.
        warning: text of the warning, with `%d` for the capacity, and for twice the capacity.

    Example:
        >>> cache = ProgramCache(2, close=lambda number: print("closing", number), warning="more than %d; allow %d")
        >>> [cache.get(lambda number: number == wanted, make=lambda: wanted) for wanted in (1, 2, 1, 3)]
        closing 2
        [1, 2, 1, 3]
    """

    def __init__(self, capacity: int, close: Callable[[Program], None], warning: str) -> None:
        self._capacity, self._close, self._warning = capacity, close, warning
        self._programs: list[Program] = []  # that used last is the last
        self._warned = Warned()

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs)

    def get(self, fits: Callable[[Program], bool], make: Callable[[], Program]) -> Program:
        """The most recently used program that fits; a new one if none does."""
        fitting = next((each for each in reversed(self._programs) if fits(each)), None)
        program = make() if fitting is None else fitting
        self._programs = [*(each for each in self._programs if each is not program), program]
        if len(self._programs) > self._capacity:
            self._close(self._programs.pop(0))
            self._warned.once("evictions", self._warning, self._capacity, 2 * self._capacity)
        return program

    def clear(self) -> None:
        """Release all programs."""
        while self._programs:
            self._close(self._programs.pop())
