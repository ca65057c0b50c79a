"""Arrays in memory: how much XLA for TPUs takes of it for those that are there at some time.

An array lies where it is made until nobody needs it any more. So there are gaps between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

SMALL = 1024
"""What is so many times smaller than the largest leaves no gaps that matter."""


@dataclass(frozen=True)
class Span:
    """Room that is taken for a while.

    Attributes:
        first: the kernel before which it is taken.
        last: the kernel after which it is free again.
        bytes: how much it is.
    """

    first: int
    last: int
    bytes: int

    def after(self, kernels: int) -> Span:
        """The same, so many kernels later."""
        return Span(self.first + kernels, self.last + kernels, self.bytes)


class Spans:
    """Notes what is there while kernels run.

    Attributes:
        kernels: how many have run.
    """

    def __init__(self) -> None:
        self.kernels = 0
        self._over: list[Span] = []
        self._open: dict[Hashable, tuple[int, int]] = {}

    def take(self, key: Hashable, bytes: int) -> None:
        """Something new is there."""
        self._open[key] = self.kernels, bytes

    def pass_on(self, key: Hashable, new: Hashable) -> None:
        """Something lies where another was, which may have been there before all."""
        self._open[new] = self._open.pop(key, (self.kernels, 0))

    def free(self, key: Hashable) -> None:
        """Something is needed no more, after this kernel."""
        first, bytes = self._open.pop(key, (0, 0))
        self._over.append(Span(first, self.kernels, bytes))

    def insert(self, kernels: int, spans: Iterable[Span]) -> None:
        """Within this kernel others run: a turn of a loop."""
        self._over += [span.after(self.kernels) for span in spans]
        self.kernels += kernels

    def all(self) -> Iterator[Span]:
        """What was there, and is."""
        yield from (span for span in self._over if span.bytes)
        yield from (Span(first, self.kernels, bytes) for first, bytes in self._open.values() if bytes)


def packed(spans: Sequence[Span]) -> int:
    """The bytes that spans take together, each at one place.

    What is large and there for long is placed first; each lies in the smallest gap that it fits in. That is how XLA for
    TPUs (libtpu 0.0.52) does it, as far as one can see: of what it says is there, this makes of a GPT of 9.5 GB what it
    makes, within 0.1 %. Most that is there at once is 12 % less.
    """
    least = max((span.bytes for span in spans), default=0) // SMALL
    placed: list[tuple[Span, int]] = []
    large = (span for span in spans if span.bytes > least)
    for span in sorted(large, key=lambda span: -span.bytes * (span.last - span.first + 1)):
        around = sorted((place, other.bytes) for other, place in placed if _meet(span, other))
        found, smallest, end = None, 0, 0
        for place, bytes in around:
            gap = place - end
            if gap >= span.bytes and (found is None or gap < smallest):
                found, smallest = end, gap
            end = max(end, place + bytes)
        placed.append((span, end if found is None else found))
    return max((place + span.bytes for span, place in placed), default=0)


def _meet(one: Span, other: Span) -> bool:
    return one.first <= other.last and other.first <= one.last
