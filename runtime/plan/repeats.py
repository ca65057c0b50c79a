"""Grouping of repeated plan steps into larger segments.

A dispatch costs the host time, and compiling the same steps again costs more. So repeated steps are merged into one
segment, of the length that leaves the fewest steps over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

TOGETHER = (4, 5, 3, 6, 7, 8)
"""Numbers of consecutive equal steps in one segment: the first number with the smallest remainder is used; remaining
steps are segments of their own. Larger segments need fewer dispatches, smaller ones less compilation."""

FEWEST, LONGEST = 4, 100
"""Least repetitions, and maximum number of steps, of a sequence that becomes one segment, such as a layer's gradient
and weight updates. One dispatch then replaces many small ones."""

SMALL = 300
"""This many ops are compiled quickly, whatever they repeat."""


def group_steps(structures: Sequence[Hashable], sizes: Sequence[int], ipus: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Group steps where beneficial: yields index of first step and step count per segment.

    Args:
        structures: structure of each step; equal ones are compiled once.
        sizes: number of ops of each for XLA.
        ipus: IPU of each; a segment is on one IPU.

    Example:
        >>> list(group_steps("xabababab", [9] * 9, [0] * 9))
        [(0, 1), (1, 2), (3, 2), (5, 2), (7, 2)]
    """
    first = 0
    while first < len(structures):
        period, times = _repeat(structures, sizes, ipus, first)
        size = period if period > 1 else min(TOGETHER, key=lambda size: times % size)
        grouped = first + (period * times // size * size if times > 1 else 0)
        end = first + period * times
        yield from ((start, size) for start in range(first, grouped, size))
        yield from ((start, 1) for start in range(grouped, end))
        first = end


def _repeat(structures: Sequence[Hashable], sizes: Sequence[int], ipus: Sequence[int], first: int) -> tuple[int, int]:
    """Period and repetition count of steps starting at `first`: maximal total steps, then shortest period. (1, 1)
    without a worthwhile repetition."""
    best = (1, 1)
    for period in range(1, min(LONGEST, (len(structures) - first) // FEWEST) + 1):
        last = first + period
        if ipus[last - 1] != ipus[first]:
            break
        if structures[last] != structures[first]:
            continue
        distinct = dict(zip(structures[first:last], sizes[first:last], strict=True))
        if sum(sizes[first:last]) > max(SMALL, TOGETHER[0] * sum(distinct.values())):
            continue
        end = first
        while end + period < len(structures) and structures[end] == structures[end + period]:
            end += 1
        times = (end - first) // period + 1
        if times >= FEWEST and period * times >= max(2 * TOGETHER[0], best[0] * best[1] + 1):
            best = (period, times)
    return best
