"""Live ranges: the last step of a sequence that uses each value."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def last_uses(steps: Iterable[Iterable[K]], kept: Iterable[K] = ()) -> dict[K, int]:
    """The number of the last step that uses each value; one past the last step for values that are kept.

    Args:
        kept: values that are used after all steps.

    Example:
        >>> last_uses([["a"], ["a", "b"], ["b", "c"]], kept=["c"])
        {'a': 1, 'b': 2, 'c': 3}
    """
    found: dict[K, int] = {}
    count = 0
    for count, values in enumerate(steps, start=1):
        found.update(dict.fromkeys(values, count - 1))
    found.update(dict.fromkeys(kept, count))
    return found
