"""Periodic spans of a signature sequence: candidates for loop iterations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from popxl.base.group_by import group_by

FEWEST = 3
"""Least number of iterations of a loop."""

OFTEN = 16
"""Maximum number of occurrences of a signature in an iteration for the search of periods."""


class PeriodicRange(NamedTuple):
    """Periodic range of a sequence: elements from `first` to `end` equal those one `period` earlier."""

    first: int
    end: int
    period: int

    @property
    def repetitions(self) -> int:
        """The number of full periods."""
        return (self.end - self.first) // self.period

    @property
    def starts(self) -> range:
        """Possible starts of the first period, without loss of a repetition."""
        return range(self.first, self.end - self.repetitions * self.period + 1)


def periodic_ranges(signatures: Sequence[int], sizes: Sequence[int], first: int, end: int) -> list[PeriodicRange]:
    """The longest periodic spans between `first` and `end`, largest saving first.

    Args:
        sizes: weight of each element. An iteration has exactly one element with a weight above 0.

    Example:
        >>> periodic_ranges([7, 1, 2, 1, 2, 1, 2, 1], [0, 5, 0, 5, 0, 5, 0, 5], 0, 8)
        [PeriodicRange(first=1, end=8, period=2)]
    """
    total = [0, *accumulate(sizes)]
    ranges: defaultdict[int, list[PeriodicRange]] = defaultdict(list)
    known: defaultdict[int, set[int]] = defaultdict(set)  # positions in spans, except in their last iterations
    for position, period in _repeats(signatures, sizes, first, end):
        if position not in known[period]:
            start, last = position, position + period
            while start > first and signatures[start - 1] == signatures[start - 1 + period]:
                start -= 1
            while last < end and signatures[last] == signatures[last - period]:
                last += 1
            ranges[period].append(PeriodicRange(start, last, period))
            known[period].update(range(start, last - period))

    def saved(span: PeriodicRange) -> int:
        return (span.repetitions - 1) * (total[span.first + span.period] - total[span.first])

    long_enough = (span for of_period in ranges.values() for span in of_period if span.repetitions >= FEWEST)
    return sorted(long_enough, key=lambda span: (-saved(span), span.period, span.first))


def _repeats(signatures: Sequence[int], sizes: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Indices of costly elements, with their distances to the next equal elements, up to `OFTEN` of these."""
    costly = (i for i in range(first, end) if sizes[i])
    for positions in group_by(costly, signatures.__getitem__).values():
        for occurrences in range(1, min(OFTEN, len(positions) - 1) + 1):
            for position, later in zip(positions, positions[occurrences:], strict=False):
                yield position, later - position
