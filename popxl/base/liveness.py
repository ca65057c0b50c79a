"""Live ranges: from the step of a sequence that makes a value to the last step that reads it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class LiveRange(NamedTuple):
    """Steps between which a value is live.

    Attributes:
        first: the step that makes the value; -1 if it is there before all steps.
        last: the last step that reads it; the step that makes it, if none does.
    """

    first: int
    last: int


def live_ranges(steps: Iterable[tuple[Iterable[K], Iterable[K]]], kept: Iterable[K] = ()) -> dict[K, list[LiveRange]]:
    """Live ranges of each value in order, one per step that defines it; the first is that of a given value, if any.

    Args:
        steps: the values that each step reads, and those that it then makes.
        kept: values that are read after all steps.

    Example:
        >>> live_ranges([("a", "b"), ("b", "a")], kept="a")
        {'a': [LiveRange(first=-1, last=0), LiveRange(first=1, last=2)], 'b': [LiveRange(first=0, last=1)]}
    """
    found: dict[K, list[LiveRange]] = {}
    for i, (read, made) in enumerate(chain(steps, [(kept, ())])):
        for value in read:
            ranges = found.setdefault(value, [LiveRange(-1, i)])
            ranges[-1] = LiveRange(ranges[-1].first, i)
        for value in made:
            found.setdefault(value, []).append(LiveRange(i, i))
    return found


def last_uses(steps: Iterable[Iterable[K]], kept: Iterable[K] = ()) -> dict[K, int]:
    """The number of the last step that uses each value; one past the last step for values that are kept.

    Args:
        kept: values that are used after all steps.

    Example:
        >>> last_uses([["a"], ["a", "b"], ["b", "c"]], kept=["c"])
        {'a': 1, 'b': 2, 'c': 3}
    """
    ranges = live_ranges(((values, ()) for values in steps), kept)
    return {value: each[-1].last for value, each in ranges.items()}
