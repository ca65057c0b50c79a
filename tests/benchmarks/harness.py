"""What a row of the performance table is, and how it is measured. The rows themselves are in the files beside this one.

A row lets parties that compute the same take turns. Machines are noisy, so numbers are only compared within one round;
a row shows the median over the rounds, with the quartiles. Nothing here asserts a time.
"""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

OURS = "popxl"
"""The party that is held to the targets."""

Measure = Callable[[], float]
"""One round of one party: what it took, in the unit of the row."""


class Size(enum.Enum):
    """How much work the rows do: to report, to have a look, or only to see that they run."""

    FULL = "full"
    QUICK = "quick"
    TINY = "tiny"


@dataclass(frozen=True)
class Target:
    """What we want of a row, compared with one of the other parties.

    Attributes:
        rival: the other party. Without one (it may not be installed) there is nothing to compare.
        compare: the number that is judged, from one round of ours and one of theirs.
        limit: the worst number that is good enough; `None` if the rival is only there to be seen.
        least: whether larger numbers are better.
        show: the number as text.
        is_ratio: whether the number says how many times better ours is.
    """

    rival: str
    compare: Callable[[float, float], float]
    limit: float | None
    least: bool
    show: Callable[[float], str]
    is_ratio: bool = False

    def met(self, value: float) -> bool | None:
        """Whether a number is good enough."""
        if self.limit is None:
            return None
        return value >= self.limit if self.least else value <= self.limit

    def __str__(self) -> str:
        return "" if self.limit is None else f"{'≥' if self.least else '≤'} {self.show(self.limit)}"


def times(limit: float | None, rival: str = "JAX") -> Target:
    """To take no more than the rival, `limit` times over."""
    return Target(rival, lambda ours, theirs: theirs / ours, limit, True, lambda value: f"{value:.2f} x", is_ratio=True)


def over(limit: float, show: Callable[[float], str], rival: str = "JAX") -> Target:
    """To take at most `limit` more than the rival."""
    return Target(rival, lambda ours, theirs: ours - theirs, limit, False, lambda value: f"{show(value)} over")


def at_most(limit: float, show: Callable[[float], str], rival: str = "JAX") -> Target:
    """To take at most `limit`, whatever the rival takes."""
    return Target(rival, lambda ours, theirs: ours, limit, False, show)


def per_second(limit: float, rival: str = "JAX") -> Target:
    """To do something at least `limit` times a second, whatever the rival does."""
    return Target(rival, lambda ours, theirs: 1 / ours, limit, True, lambda value: f"{value:,.0f} / s")


def seconds(value: float) -> str:
    """Seconds, in a unit that suits."""
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if abs(value) * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def megabytes(value: float) -> str:
    """Bytes, in millions."""
    return f"{value / 1e6:.3g} MB"


def gigabytes_per_second(value: float) -> str:
    """Seconds for a gigabyte, as what is moved in a second."""
    return f"{1 / value:.3g} GB / s"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: what it is called.
        parties: makes the measure of each party by its name, ours first, after checking that all compute the same. A
            context, so that what is measured can be released.
        targets: what we want.
        rounds: how many rounds tell enough; 1 for what is the same every time.
        slow: too much for a quick look.
        devices: how many it takes at least.
        show: a measure as text.
        about: what is measured, with its sizes, for the page.
    """

    name: str
    parties: Callable[[Size], AbstractContextManager[Mapping[str, Measure]]]
    targets: tuple[Target, ...]
    rounds: int = 25
    show: Callable[[float], str] = seconds
    slow: bool = False
    devices: int = 1
    about: str = ""


@dataclass(frozen=True)
class Result:
    """What was measured for a row: for each party, one number a round."""

    row: Row
    measures: Mapping[str, list[float]]

    def lines(self) -> list[list[str]]:
        """Cells of the table: a line for each rival that was there."""
        return [self._line(target) for target in self.row.targets if target.rival in self.measures]

    def _line(self, target: Target) -> list[str]:
        lower, median, upper = self.quartiles(target)
        ours, theirs = (self.row.show(float(np.median(self.measures[party]))) for party in (OURS, target.rival))
        spread = f"{target.show(lower)} … {target.show(upper)}"
        met = {True: "met", False: "not met", None: ""}[target.met(median)]
        return [self.row.name, ours, f"{theirs} ({target.rival})", target.show(median), spread, str(target), met]

    def quartiles(self, target: Target) -> list[float]:
        """Lower quartile, median and upper quartile of the number that is judged, over the rounds."""
        pairs = zip(self.measures[OURS], self.measures[target.rival], strict=True)
        return np.quantile([target.compare(*pair) for pair in pairs], (0.25, 0.5, 0.75)).tolist()

    def raw(self) -> dict[str, Any]:
        """Everything that was measured, as plain data."""
        targets = [
            {"rival": t.rival, "target": str(t), "quartiles": self.quartiles(t), "met": t.met(self.quartiles(t)[1])}
            for t in self.row.targets
            if t.rival in self.measures
        ]
        return {"row": self.row.name, "measures": dict(self.measures), "targets": targets}


HEADER = ["row", "ours", "theirs", "compared", "quartiles", "target", ""]


def measure(row: Row, size: Size = Size.FULL) -> Result:
    """Let the parties of a row take turns, each round starting with another one."""
    rounds = {Size.FULL: row.rounds, Size.QUICK: min(row.rounds, 5), Size.TINY: 1}[size]
    progress(f"{row.name}: preparing")
    with row.parties(size) as parties:
        measures: dict[str, list[float]] = {party: [] for party in parties}
        order = list(parties)
        for k in range(rounds):
            progress(f"{row.name}: round {k + 1} of {rounds}")
            for party in order:
                measures[party].append(parties[party]())
            order = order[1:] + order[:1]
    progress()
    return Result(row, measures)


def progress(text: str = "") -> None:
    """Say on standard error what is being done, in one line that is written over."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def time_of(work: Callable[[], Any], count: int = 1) -> Measure:
    """Seconds that one piece of work takes, when done `count` times in a row and waited for at the end."""

    def measured() -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = work()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    return measured


def check_agreement(expected: Any, **others: Any) -> None:
    """`AssertionError` if a party computes something else than the first. Arrays, or trees of them."""
    for party, values in others.items():
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(values), strict=True):
            np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=2e-3, atol=2e-5, err_msg=party)
