"""Recursion over nested graphs that may be deeper than Python's recursion limit.

A recursive step is a generator: it yields a nested step, is sent that step's result, and returns its own result. Errors
are raised at the `yield`, as from a function call.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

Trampolined = Generator[Any, Any, T]
"""Work with a result, as a generator of the work that it needs done first."""


def run_trampoline(work: Trampolined[T]) -> T:
    """Do nested work. Returns its result.

    Example:
        >>> def height(tree):
        ...     heights = []
        ...     for branch in tree:
        ...         heights.append((yield height(branch)))
        ...     return 1 + max(heights, default=0)
        >>> run_trampoline(height([[], [[]]]))
        3
    """
    try:
        question = next(drive(work))
    except StopIteration as end:
        return end.value
    raise TypeError(f"run_trampoline: the work asks for {question!r}, which is no work; `drive` lets it be answered.")


def drive(work: Trampolined[T]) -> Generator[Any, Any, T]:
    """Drive nested generators as a single generator, which yields only non-generator values for its driver to answer.

    Example:
        >>> def doubled():
        ...     return 2 * (yield "a number?")
        >>> def asking():
        ...     return 1 + (yield doubled())
        >>> work = drive(asking())
        >>> next(work)
        'a number?'
        >>> try:
        ...     work.send(3)
        ... except StopIteration as end:
        ...     end.value
        7
    """
    waiting = [work]
    result: Any = None
    problem: BaseException | None = None
    while waiting:
        try:
            needed = waiting[-1].send(result) if problem is None else waiting[-1].throw(problem)
        except StopIteration as end:
            waiting.pop()
            result, problem = end.value, None
        except BaseException as raised:
            waiting.pop()
            result, problem = None, raised
        else:
            result, problem = None, None
            if isinstance(needed, Generator):
                waiting.append(needed)
            else:
                result = yield needed
    if problem is not None:
        raise problem
    return result
