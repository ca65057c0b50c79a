"""Tuning of a program's choices for a machine: compiles each combination without running it; selects the fastest that
fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from popxl.base.choices import VARIABLE, Choices, as_text, override_choices, unknown_in_environment
from popxl.base.pages import OnPage, Page, Table, bytes_text, seconds_text
from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.program.compiled import CompiledProgram
from runtime.progress import report, stage


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)


class Trial(_Frozen):
    """Combination of choices, with compiled memory and time requirements on a chip.

    Attributes:
        choices: value of each choice.
        memory_bytes: required memory; `None` if it was not compiled, or the compiler gave up.
        fits: whether the memory suffices.
        seconds: estimated time of a run, as `Cost.seconds`; `None` if it was not compiled.
        units: work of a run: the product of the choices that declare it.
        problem: reason why it could not be compiled; empty if it was.
    """

    choices: Mapping[str, Any]
    memory_bytes: int | None
    fits: bool
    seconds: float | None
    units: float
    problem: str = ""

    @property
    def seconds_a_unit(self) -> float:
        """Ranking criterion: run time per unit of work."""
        return float("inf") if self.seconds is None else self.seconds / self.units

    def line(self) -> str:
        """One-line summary of the choices and their outcome."""
        memory = "not compiled" if self.memory_bytes is None else bytes_text(self.memory_bytes)
        seconds = "" if self.seconds is None else f", {seconds_text(self.seconds)} a run, estimated"
        return f"{as_text(self.choices)}: {memory}{seconds}, {'fits' if self.fits else 'does not fit'}"


class TuneResult(OnPage, _Frozen):
    """Tuning result: tried combinations in option order, and the best.

    Attributes:
        target: the machine.
        capacity: memory of a chip, in bytes.
        tried: all combinations, or those before an interruption.
        is_complete: whether these are all combinations.
    """

    target: str
    capacity: int
    tried: tuple[Trial, ...]
    is_complete: bool = True

    @property
    def best(self) -> Trial | None:
        """Fastest fitting combination, first among equals; `None` if nothing fits."""
        return min((t for t in self.tried if t.fits), key=lambda t: t.seconds_a_unit, default=None)

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        names = [*dict.fromkeys(name for t in self.tried for name in t.choices)]
        rows = []
        for t in self.tried:
            memory = "" if t.memory_bytes is None else bytes_text(t.memory_bytes)
            seconds = "" if t.seconds is None else seconds_text(t.seconds)
            a_unit = [seconds_text(t.seconds_a_unit) if t.seconds is not None else ""] * self._has_work
            verdict = "best" if t is self.best else "fits" if t.fits else "does not fit"
            rows.append([*(str(t.choices.get(n, "")) for n in names), memory, seconds, *a_unit, verdict])
        columns = [*names, "memory of a chip", "a run, estimated", *["for one"] * self._has_work, ""]
        problems = [f"{as_text(t.choices)}: {t.problem}" for t in self.tried if t.problem]
        conclusion = (
            f"None fits: a chip of {self.target} has {bytes_text(self.capacity)}."
            if self.best is None
            else f'The fastest that fits: {VARIABLE}="{as_text(self.best.choices)}"'
        )
        has = bytes_text(self.capacity)
        intro = f"A chip has {has}. Times are estimates; nothing has run."
        stopped = [] if self.is_complete else ["Interrupted: other combinations were not tried."]
        return Page(f"Fitting into {self.target}", [intro, Table(columns, rows), *problems, *stopped, conclusion])

    @property
    def _has_work(self) -> bool:
        return any(t.units != 1 for t in self.tried)


class CompiledTrial(NamedTuple):
    """Compilation outcome of a program.

    Attributes:
        programs: compiled programs, with their Irs.
        problem: reason why one was not compiled; empty if all were.
    """

    programs: Sequence[tuple[Ir, CompiledProgram]]
    problem: str = ""


def tune_choices(compiled: Callable[[], CompiledTrial]) -> TuneResult:
    """Compile a program for each combination of its choices, but for those that the environment has made. Ctrl-C
    returns the combinations tried so far. Reports each with its result, and unknown choices of the environment.

    Args:
        compiled: function that runs the program up to its first run on a device.

    Raises:
        PopxlError: if the program has no choices, makes no session, or cannot be compiled with any of them.
        KeyboardInterrupt: if nothing was tried before.
    """
    trials: list[tuple[Trial, _MachineFigures | None]] = []
    untried: list[dict[str, Any]] = [{}]
    is_complete = True
    while untried:  # later choices may depend on earlier ones; so each run reports further options
        fixed = untried.pop()
        try:
            with stage(f"Combination {len(trials) + 1} of the choices"):
                choices, found = _compile_trial(compiled, fixed)
        except KeyboardInterrupt:
            if not trials:
                raise
            is_complete = False
            break
        trials.append(found)
        if choices.options:
            report(f"{len(trials)}: {found[0].line()}")
            if len(trials) == 1 and (unknown := unknown_in_environment(choices.options)):
                report(unknown)
        selected = list(choices.selections().items())
        for number in range(len(fixed), len(selected)):
            name = selected[number][0]
            open_options = () if name in choices.fixed else choices.options[name]
            others = (option for option in open_options if option != selected[number][1])
            untried += reversed([{**dict(selected[:number]), name: option} for option in others])
    if is_complete and len(trials) == 1 and not trials[0][0].choices:
        raise PopxlError("the program has no choices; it asks for them by `popxl.choice(name, options)`.")
    figures = next((each for _, each in trials if each is not None), None)
    if figures is None:
        raise PopxlError(f"no combination of its choices can be compiled. {trials[0][0].problem}")
    results = tuple(each for each, _ in trials)
    return TuneResult(target=figures.machine, capacity=figures.capacity, tried=results, is_complete=is_complete)


class _MachineFigures(NamedTuple):
    """Description of a machine, and memory of a chip in bytes."""

    machine: str
    capacity: int


def _figures(program: CompiledProgram) -> _MachineFigures | None:
    """Figures of a program's machine; `None` for an unknown chip."""
    chip = program.device.chip
    return None if chip is None else _MachineFigures(str(program.device.target or chip.name), chip.memory_bytes)


def _compile_trial(
    compiled: Callable[[], CompiledTrial], fixed: Mapping[str, Any]
) -> tuple[Choices, tuple[Trial, _MachineFigures | None]]:
    with override_choices(fixed) as choices:
        programs, problem = compiled()
    if not programs and not problem:
        choices_text = f" with {as_text(choices.selections())}" if choices.options else ""
        raise PopxlError(f"the program makes no session{choices_text}, so there is nothing to compile.")
    memory = max((memory_of_program(ir, program).device for ir, program in programs), default=None)
    figures = next((_figures(program) for _, program in programs), None)
    trial = Trial(
        choices=choices.selections(),
        memory_bytes=memory,
        fits=not problem and memory is not None and figures is not None and memory <= figures.capacity,
        seconds=None if problem else sum(cost_of(program).seconds or 0.0 for _, program in programs),
        units=prod(float(choices.selections()[name]) for name in choices.work),
        problem=problem,
    )
    return choices, (trial, figures)
