"""A program within a memory budget: plan, compile, and correct the plan by the compiler's figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from popxl.analysis.memory import Memory
from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.core.recording import Op
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ir import Ir
from runtime.costs.cost import Cost
from runtime.costs.executables import chip_of
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.memory_needs import GraphNeeds
from runtime.memory_refusal import refusal
from runtime.memory_solver import Release, Solution, keep_all, most_bytes, solve
from runtime.program.compiled import CompiledProgram
from runtime.progress import stage
from runtime.targets.chip import Chip

COMPILATIONS = 3
"""How often a program is compiled at most: with everything kept, with the plan, and with the corrected plan."""

_RELEASES: Mapping[str, Release] = {"inlined": "read", "rolled": "loop", "batched": "loop"}
"""By how called graphs are compiled; else memory is free after a call."""

_AIM = 0.95
"""Share of the budget that a plan aims at, once the weight of a planned byte is known."""

_FIRST_AIM: Mapping[Release, float] = {"read": 0.93, "call": 0.86, "loop": 0.93}
"""The same for the first plan: noinline calls hold more than is counted."""

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
    found = _TEXT.fullmatch(text if isinstance(text, str) else f"{text} B")
    units = {name.lower(): size for name, size in _UNITS.items()}
    if found is None or found[2].lower() not in units:
        reason = f", whose unit is {found[2]!r}" if found is not None and found[2] else ""
        raise ValueError(f"{who} is {text!r}{reason}; expected a number with one of {', '.join(_UNITS)}: '14 GB'.")
    count = float(found[1]) * units[found[2].lower()]
    if not 1 <= count < math.inf:
        raise ValueError(
            f"{who} is {text!r}; expected {'more than zero' if count < 1 else 'a finite number of'} bytes."
        )
    return int(count)


class Compiled(NamedTuple):
    """Program compiled with a memory plan.

    Attributes:
        ir: the program.
        memory, cost: figures of the compiler.
        chip: published figures, if there are any.
        offloadable: names of graphs whose offloaded activations are on the host meanwhile: those that rerolled loops
            call, on TPUs. XLA fetches those of other calls long before they are read; on GPUs, no plan of a budget with
            them has been compiled.
        release: time when the memory of an activation is freed.
        applied: object that applied the plan: its `needs` are the graphs, its `plan` is the applied plan, and
            `plan_with(treatments)` another plan for the same program.
    """

    ir: Ir
    memory: Memory
    cost: Cost
    chip: Chip | None
    offloadable: frozenset[str]
    release: Release
    applied: Any


def compiled_program(ir: Ir, program: CompiledProgram, applied: Sequence[Any]) -> Compiled:
    """Compiled program, with the data for the plan search.

    Args:
        applied: objects that applied memory plans while it was built.

    Raises:
        ValueError: if the program applies no memory plan, or several.
    """
    if len(applied) != 1:
        raise ValueError(
            f"plan_memory: the program applies {len(applied)} memory plans; expected one. Give `memory` to the one "
            "`train_step` or `autodiff` of the program. A `poptorch.trainingModel` applies one where it is compiled, "
            "unless its model has checkpoints, or its options recompute (`autoRecomputation`, a pipeline) or set a "
            "plan (`setMemoryPlan`). Nothing runs, so a program has to train before it runs anything else."
        )
    release = "read" if applied[0].is_whole else _RELEASES.get(program.layout.calls, "call")
    offloadable = frozenset(_offloadable(program, applied[0].names))
    memory, cost = memory_of_program(ir, program), cost_of(program)
    return Compiled(ir, memory, cost, chip_of(program), offloadable, release, applied[0])


def _offloadable(program: CompiledProgram, names: Mapping[Graph, str]) -> Iterator[str]:
    """Names of planned graphs that only loops call, on devices where loops offload."""
    layout = program.layout
    rerolling = layout.rerolling
    if rerolling is None or layout.calls != "rolled" or layout.compile_target.platform != "tpu":
        return
    in_loops = {op for loop in rerolling.loops for op in loop.all_ops}
    for graph, name in names.items():
        if all(call in in_loops or "repeat_count" in _caller(call) for call in graph.call_sites):
            yield name


def _caller(call: Op) -> Mapping[str, Any]:
    """Attributes of the op whose graph makes a call; none in the main graph, and in graphs called several times."""
    callers = call.graph.call_sites
    return callers[0].attributes if len(callers) == 1 else {}


def planned_program(programs: Sequence[tuple[Ir, CompiledProgram]], applied: Sequence[Any]) -> Compiled:
    """Compiled program that a memory plan was applied to, among those of a user's file; the first one without any.

    Raises:
        ValueError: as for `compiled_program`.
    """
    planned = (each for each in programs if any(each[0] is by.model.ir for by in applied))
    return compiled_program(*next(planned, programs[0]), applied)


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
    """

    plan: Any
    budget: int
    memory: Memory
    cost: Cost
    everything: Memory
    everything_cost: Cost
    compilations: int

    @property
    def peak(self) -> int:
        """Bytes that a device needs, as compiled."""
        return self.memory.device

    def page(self) -> Page:
        """What `print` and notebooks show."""
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
        return Page(
            "Memory within a budget",
            [what, Table(["as compiled", "this plan", "everything kept"], rows), *self.plan.page().parts],
        )


def plan_within(compiled: Callable[[Any], Compiled], budget: int, told: Callable[[str], object]) -> BudgetedPlan:
    """Find a plan whose compiled program needs no more than a budget, and adds least time by published figures.

    Args:
        compiled: function that builds a program with a plan or policy, and compiles it.
        told: function called with a line after each compilation.

    Raises:
        PopxlError: if no plan found is within the budget; the message has the smallest, and its largest values.
    """
    search = _Search(compiled, budget, told)
    search.try_everything()
    while not search.is_done and len(search.tried) < COMPILATIONS and search.try_next():
        pass
    if not search.fitting:
        search.try_smallest()
    return search.result()


class _Search:
    """Plans that were tried, with their solutions."""

    def __init__(self, compiled: Callable[[Any], Compiled], budget: int, told: Callable[[str], object]) -> None:
        self._compiled, self._budget, self._told = compiled, budget, told
        self._title = f"Memory plan within {bytes_text(budget)}"
        self.tried: list[tuple[Solution, Compiled]] = []

    @property
    def is_done(self) -> bool:
        """Whether the last plan uses the budget, or does without recomputation."""
        solution, last = self.tried[-1]
        peak = last.memory.device
        return peak <= self._budget and (not solution.seconds or peak >= 0.9 * self._budget)

    @property
    def _graphs(self) -> Sequence[GraphNeeds]:
        needs: Sequence[GraphNeeds] = self.tried[0][1].applied.needs
        return needs

    def try_everything(self) -> None:
        """Compile the program with all activations kept."""
        first = self._compile("everything")
        self._add(keep_all(first.applied.needs, first.release), first)

    def try_next(self) -> bool:
        """Compile the next plan. False if there is none that was not tried."""
        return any(self._try(limit) for limit in self._limits())

    def try_smallest(self) -> bool:
        """Compile the plan with the least activations. False if it was tried."""
        return self._try(None)

    def _try(self, limit: float | None) -> bool:
        """Compile a plan with at most `limit` bytes of activations. False if there is none that was not tried."""
        solution = self._solved(limit)
        if solution is None or self._is_known(solution) or solution.bytes > self.tried[0][0].bytes:
            return False  # more than with everything kept: the time to solve was too short
        self._add(solution, self._compile(self.tried[0][1].applied.plan_with(solution.treatments)))
        return True

    @property
    def fitting(self) -> list[tuple[Solution, Compiled]]:
        """Plans within the budget."""
        return [each for each in self.tried if each[1].memory.device <= self._budget]

    def result(self) -> BudgetedPlan:
        """The best plan within the budget."""
        if not self.fitting:
            _, lowest = min(self.tried, key=lambda each: each[1].memory.device)
            raise PopxlError(refusal(lowest.ir, lowest.memory, lowest.applied.model, self._graphs, self._budget))
        _, best = min(self.fitting, key=lambda each: each[0].seconds)
        first = self.tried[0][1]
        return BudgetedPlan(
            best.applied.plan, self._budget, best.memory, best.cost, first.memory, first.cost, len(self.tried)
        )

    def _compile(self, memory: Any) -> Compiled:
        number = len(self.tried) + 1
        before = f", {bytes_text(self.tried[-1][1].memory.device)} the last time" if self.tried else ""
        last = f"of at most {COMPILATIONS}" if number <= COMPILATIONS else "with the smallest plan"
        with stage(f"{self._title}: program {number} {last}{before}"):
            return self._compiled(memory)

    def _add(self, solution: Solution, found: Compiled) -> None:
        self.tried.append((solution, found))
        self._told(
            f"{len(self.tried)}: {bytes_text(found.memory.device)} as compiled, of {bytes_text(self._budget)}, with "
            f"{bytes_text(solution.bytes)} of activations"
        )

    def _solved(self, limit: float | None) -> Solution | None:
        last = self.tried[-1][1]
        with stage(f"{self._title}: solving"):
            return solve(self._graphs, limit, last.chip, last.offloadable, last.release)

    def _is_known(self, solution: Solution) -> bool:
        return any(solution.treatments == known.treatments for known, _ in self.tried)

    def _limits(self) -> Iterator[float | None]:
        """Bytes of activations for which the peak should be just below the budget; None, as few as possible, if nothing
        fits yet.

        Peaks grow about linearly with planned bytes. A byte weighs more than one where kernels hold further values
        beside activations: of a single program, temporaries say how much. With plans on both sides of the budget, the
        limit is on the line between them. If only plans above it are known, there is one more try: its margin grows
        with the excess of the last one, and if no plan has as few bytes as the line asks for, the weight is one.
        """
        points = [self._point(solution, found) for solution, found in self.tried]
        fitting = [each for each in points if each[1] <= self._budget]
        planned, peak = points[-1]
        if fitting:
            low, high = max(fitting), min(each for each in points if each[1] > self._budget)
            if low[0] < high[0]:
                yield low[0] + (_AIM * self._budget - low[1]) * (high[0] - low[0]) / (high[1] - low[1])
            return
        if len(points) == 1:
            release, temporaries = self.tried[0][1].release, self.tried[0][1].memory.temporaries or 0
            weight = min(max(temporaries / planned, 1.0), 2.0) if planned else 1.0
            yield planned + (_FIRST_AIM[release] * self._budget - peak) / weight
        else:
            weight = 1.0
            if planned != points[0][0]:
                weight = min(max((points[0][1] - peak) / (points[0][0] - planned), 0.25), 2.0)
            aim = max(_AIM - 0.75 * (peak / self._budget - 1), 0.7) * self._budget
            yield planned + (aim - peak) / weight
            if weight < 1.0:
                yield planned + aim - peak
        yield None

    def _point(self, solution: Solution, found: Compiled) -> tuple[int, int]:
        """Planned bytes of a tried plan, and its peak as compiled."""
        return most_bytes(self._graphs, solution.treatments, found.release), found.memory.device
