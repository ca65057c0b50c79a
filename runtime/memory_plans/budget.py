"""A program within a memory budget: plan, compile, and correct the plan by the compiler's figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from popxl.analysis.memory import Memory
from popxl.base.memory_requests import MemoryRequest
from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.errors import PopxlError
from runtime.costs.cost import Cost
from runtime.memory_plans.compiled import IN_ONE_PIECE, Compiled, Division
from runtime.memory_plans.division import ESTIMATE_SHARE, DivisionEstimate
from runtime.memory_plans.refusal import refusal
from runtime.memory_plans.search import COMPILATIONS, PlanSearch
from runtime.progress import reporting

_NEARLY = 1.3
"""Ratio of estimate to budget up to which the step in one piece is tried before a second division."""

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TEXT = re.compile(r"\s*([+-]?[0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*")


def bytes_of(text: str | int, who: str) -> int:
    """Parse a budget to a number of bytes.

    Raises:
        TypeError: for a value that is neither text nor an integer.
        ValueError: for text that is not a number with a unit, an unknown unit, or a value that is not positive.

    Example:
        >>> bytes_of("14 GB", "budget"), bytes_of("1.5GiB", "budget")
        (14000000000, 1610612736)
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise TypeError(f"{who} is {text!r} ({type(text).__name__}); expected text such as '14 GB', or bytes.")
    match = _TEXT.fullmatch(text if isinstance(text, str) else f"{text} B")
    units = {name.lower(): size for name, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        reason = f", whose unit is {match[2]!r}" if match is not None and match[2] else ""
        raise ValueError(f"{who} is {text!r}{reason}; expected a number with one of {', '.join(_UNITS)}: '14 GB'.")
    count = float(match[1]) * units[match[2].lower()]
    if not 1 <= count < math.inf:
        raise ValueError(
            f"{who} is {text!r}; expected {'more than zero' if count < 1 else 'a finite number of'} bytes."
        )
    return int(count)


@dataclass(frozen=True)
class BudgetedPlan(OnPage):
    """A memory plan within a budget, as compiled.

    Attributes:
        plan: the memory plan.
        budget: bytes of a device.
        memory: memory of the compiled program.
        cost: cost of a run.
        everything, everything_cost: memory and cost of the program if all activations are kept.
        compilations: number of compilations.
        takes_least_time: whether no plan within a larger budget would take less time, by the planner's estimate.
        host_bandwidth: bytes per second between a device and its host, if there are published figures.
    """

    plan: Any
    budget: int
    memory: Memory
    cost: Cost
    everything: Memory
    everything_cost: Cost
    compilations: int
    takes_least_time: bool
    host_bandwidth: float | None = None

    @property
    def peak(self) -> int:
        """Bytes that a device needs, as compiled."""
        return self.memory.device

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        costs = [self.cost, self.everything_cost]
        rows = [
            ["memory of a device", bytes_text(self.peak), bytes_text(self.everything.device)],
            ["of the budget", f"{self.peak / self.budget:.0%}", f"{self.everything.device / self.budget:.0%}"],
            ["operations", *(flops_text(cost.flops) for cost in costs)],
            ["bytes read and written", *(bytes_text(cost.bytes_accessed) for cost in costs)],
        ]
        if all(cost.seconds is not None for cost in costs):
            rows.append(["a run, estimated", *(seconds_text(cost.seconds or 0.0) for cost in costs)])
        if all(cost.cycles is not None for cost in costs):
            rows.append(["cycles of a run", *(count_text(cost.cycles or 0) for cost in costs)])
        times = "once" if self.compilations == 1 else f"{self.compilations} times"
        what = f"The budget is {bytes_text(self.budget)} of a device. The program was compiled {times}."
        if self.takes_least_time:
            what += " By estimate, more memory would save no time."
        return Page(
            "Memory within a budget",
            [
                what,
                Table(["as compiled", "this plan", "everything kept"], rows),
                *self.plan.page(self.host_bandwidth).parts,
            ],
        )


def plan_within(
    compiled: Callable[[MemoryRequest], Compiled],
    budget: int,
    log: Callable[[str], object],
    compilations: int = COMPILATIONS,
) -> BudgetedPlan:
    """Find a plan whose compiled program needs no more than a budget, and adds least time by published figures.

    If the program leaves the number of its micro-batches open, where the state of its optimiser is, or in how many
    chunks logits are computed, estimates from the first compiled program choose these. Further divisions are tried only
    if no plan of that one fits.

    Args:
        compiled: function that builds a program as requested, and compiles it.
        log: function called with a line after each compilation.
        compilations: maximum number of compilations for each division.

    Raises:
        ValueError: for fewer than two compilations.
        PopxlError: if no plan found is within the budget; the message has the smallest, and its largest values.
    """
    if compilations < 2:
        raise ValueError(
            f"plan_memory: `compilations` is {compilations}; expected 2 or more: one with everything kept, and others "
            "with plans."
        )
    whole = search = PlanSearch(compiled, budget, compilations=compilations)
    with reporting(log):
        search.try_everything()
        first, tried = search.everything, [search]
        divisions = [] if search.is_sufficient else _order(first, budget)
        for division in divisions:
            search = whole
            if division != whole.division:
                search = PlanSearch(compiled, budget, division, compilations)
                search.try_everything()
                tried.append(search)
            search.try_plans()
            if search.fitting:
                break
        if not search.fitting:
            search.try_other_mode()
    if not search.fitting:
        raise PopxlError(refusal([found for each in tried for found in each.compiled], first.needs, budget))
    solution, best = search.best
    takes_least, count = search.takes_least_time(solution), sum(len(each.compiled) for each in tried)
    plan, bandwidth = best.applied.plan, None if best.chip is None else best.chip.host_bandwidth
    return BudgetedPlan(plan, budget, best.memory, best.cost, first.memory, first.cost, count, takes_least, bandwidth)


def _order(first: Compiled, budget: int) -> Iterator[Division]:
    """Divisions in the order of trials: the cheapest within the budget by estimate, and the step in one piece, if it is
    nearly within the budget: first, if its smallest plan takes less time. Then another by estimate: the smallest, if
    none is within the budget. As estimates may be wrong, the step in one piece comes last if it was not tried."""
    untried = [*first.divisions]
    if len(untried) > 1:
        estimate = DivisionEstimate(first, ESTIMATE_SHARE * budget)
        cheapest = estimate.cheapest(untried)
        order = [] if cheapest is None else [cheapest]
        if IN_ONE_PIECE not in order:
            least, seconds = estimate.smallest(IN_ONE_PIECE)
            if least <= _NEARLY * budget:
                is_first = cheapest is None or seconds < estimate.seconds(cheapest)
                order.insert(0 if is_first else 1, IN_ONE_PIECE)
        for division in order:
            untried.remove(division)
            yield division
        if untried:
            division = estimate.cheapest(untried) or min(untried, key=estimate.smallest)
            untried.remove(division)
            yield division
    if IN_ONE_PIECE in untried:
        yield IN_ONE_PIECE
