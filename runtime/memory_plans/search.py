"""Plans of one program within a memory budget: solve, compile, and correct the limit by the compiler's figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from popxl.base.memory_requests import MemoryRequest
from popxl.base.pages import bytes_text
from runtime.memory_plans.compiled import IN_ONE_PIECE, RELEASES, Compiled, Division
from runtime.memory_plans.solver import Release, Solution, keep_all, least_seconds, most_bytes, solve
from runtime.progress import report, stage

COMPILATIONS = 4
"""Default limit of compilations: with everything kept, with a plan, with the corrected plan, and once more if that one
is above the budget or uses little of it.
"""

_ENOUGH, _ENOUGH_BEFORE_LAST = 0.9, 0.85
"""Shares of the budget from which a plan makes another compilation, or the last one, unnecessary."""

_AIM = 0.95
"""Target share of the budget after a plan above the budget."""

_LAST_AIMS = (0.92, 0.96, 1.0)
"""Target shares between a plan above the budget and one within it: the next share if the plan for one is known."""

_FIRST_AIM: Mapping[Release, float] = {"read": 0.93, "call": 0.86, "loop": 0.93}
"""Target share of the first plan: noinline calls hold more than is counted."""


class PlanSearch:
    """Tried plans of a program, with their solutions.

    Args:
        compiled: function that builds a program as requested, and compiles it.
        division: division of the step besides its plan.
        compilations: maximum number of compilations, without one for the smallest plan if none fits.
    """

    def __init__(
        self,
        compiled: Callable[[MemoryRequest], Compiled],
        budget: int,
        division: Division = IN_ONE_PIECE,
        compilations: int = COMPILATIONS,
    ) -> None:
        self._compile_with, self._budget, self.division = compiled, budget, division
        self._compilations = compilations
        self._besides = "" if division == IN_ONE_PIECE else f", {division}"
        self._title = f"Memory plan within {bytes_text(budget)}{self._besides}"
        self.tried: list[tuple[Solution, Compiled]] = []

    @property
    def is_sufficient(self) -> bool:
        """Whether everything is within the budget, or the last plan uses the budget or adds as little time as any."""
        solution, last = self.tried[-1]
        peak = last.memory.device
        if peak > self._budget:
            return False
        enough = _ENOUGH_BEFORE_LAST if len(self.tried) == self._compilations - 1 else _ENOUGH
        return len(self.tried) == 1 or peak >= enough * self._budget or self.takes_least_time(solution)

    def takes_least_time(self, solution: Solution) -> bool:
        """Whether a larger budget would save no time, by the solver's estimate."""
        return solution.seconds <= 1.01 * self._least_seconds

    @cached_property
    def _least_seconds(self) -> float:
        return least_seconds(self.everything.needs, self.everything.chip, self.everything.release)

    def try_everything(self) -> None:
        """Compile the program with all activations kept."""
        first = self._compile("everything")
        self._add(keep_all(first.needs, first.release, first.chip), first)

    @property
    def compiled(self) -> list[Compiled]:
        """The programs that were compiled."""
        return [found for _, found in self.tried]

    @property
    def everything(self) -> Compiled:
        """The program with all activations kept."""
        return self.compiled[0]

    def try_plans(self) -> None:
        """Compile plans until one uses the budget; the smallest plan if none fits."""
        while not self.is_sufficient and len(self.tried) < self._compilations and any(map(self._try, self._limits())):
            pass
        if not self.fitting:
            self._try(None)

    def _try(self, limit: float | None) -> bool:
        """Compile a plan with at most `limit` bytes of activations. False if there is no untried plan."""
        last = self.compiled[-1]
        solution = self._solved(limit, last.offloadable, last.release)
        if solution is None or any(solution.treatments == known.treatments for known, _ in self.tried):
            return False
        if solution.bytes > self.tried[0][0].bytes:
            return False  # more than with everything kept: the time to solve was too short
        self._try_plan(solution, self.everything.chosen_mode)
        return True

    def _try_plan(self, solution: Solution, mode: str | None) -> None:
        plan = self.everything.applied.plan_with(solution.treatments, self._budget, mode)
        self._add(solution, self._compile(plan))

    def try_other_mode(self) -> None:
        """Compile the smallest plan in loops if calls were inlined, and inlined otherwise, where the program leaves
        that open."""
        mode = {"inlined": "rolled", None: None}.get(self.everything.chosen_mode, "inlined")
        if mode is not None and (solution := self._solved(None, (), RELEASES[mode])) is not None:
            self._try_plan(solution, mode)

    @property
    def fitting(self) -> list[tuple[Solution, Compiled]]:
        """Plans within the budget."""
        return [each for each in self.tried if each[1].memory.device <= self._budget]

    @property
    def best(self) -> tuple[Solution, Compiled]:
        """The plan within the budget that takes least time: by the compiler's cycles, or by published figures."""
        return min(self.fitting, key=lambda each: each[1].cost.cycles or each[0].seconds)

    def _compile(self, memory: Any) -> Compiled:
        number = len(self.tried) + 1
        before = f", {bytes_text(self.tried[-1][1].memory.device)} the last time" if self.tried else ""
        last = f"of at most {self._compilations}" if number <= self._compilations else "with the smallest plan"
        with stage(f"{self._title}: program {number} {last}{before}"):
            return self._compile_with(MemoryRequest(memory, *self.division))

    def _add(self, solution: Solution, found: Compiled) -> None:
        self.tried.append((solution, found))
        report(
            f"{len(self.tried)}: {bytes_text(found.memory.device)} as compiled, of {bytes_text(self._budget)}, with "
            f"{bytes_text(solution.bytes)} of activations{self._besides}"
        )

    def _solved(self, limit: float | None, offloadable: Collection[str], release: Release) -> Solution | None:
        with stage(f"{self._title}: solving"):
            return solve(self.everything.needs, limit, self.everything.chip, offloadable, release)

    def _limits(self) -> Iterator[float | None]:
        """Bytes of activations for which the peak should be just below the budget; None, as few as possible, if nothing
        fits yet.

        Peaks grow about linearly with planned bytes. A byte weighs more than one where kernels hold further values
        beside activations: of a single program, temporaries say how much. With plans on both sides of the budget, the
        limit is on the line between them. If only plans above it are known, there is one more try: its margin grows
        with the excess of the last one, and if no plan has as few bytes as the line asks for, the weight is one.
        """
        needs = self.everything.needs
        points = [
            (most_bytes(needs, each.treatments, found.release), found.memory.device) for each, found in self.tried
        ]
        fitting = [each for each in points if each[1] <= self._budget]
        planned, peak = points[-1]
        if fitting:
            low, high = max(fitting), min(each for each in points if each[1] > self._budget)
            if low[0] < high[0]:
                slope = (high[0] - low[0]) / (high[1] - low[1])
                yield from (low[0] + (aim * self._budget - low[1]) * slope for aim in _LAST_AIMS)
            return
        if len(points) == 1:
            first = self.everything
            yield planned + (_FIRST_AIM[first.release] * self._budget - peak) / first.weight(planned)
        else:
            weight = 1.0
            if planned != points[0][0]:
                weight = min(max((points[0][1] - peak) / (points[0][0] - planned), 0.25), 2.0)
            aim = max(_AIM - 0.75 * (peak / self._budget - 1), 0.7) * self._budget
            yield planned + (aim - peak) / weight
            if weight < 1.0:
                yield planned + aim - peak
        yield None
