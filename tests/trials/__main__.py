"""Random programs, each run on many replicas and on one, and checked:

python -m tests.trials [--families kit "by hand"] [--first 0] [--count 1000] [--seconds 600] [--ran FILE]

The experiment decides which are right: variables and losses agree with those of one replica that gets the same global
batch. The check is asked independently. A right program with a certain finding is a false alarm; a wrong one of which
nothing is said is missed, unless all of its gradients, or the stored loss alone, are wrong by one factor: then there is
nothing to compare with. `--ran` keeps the results in a file, so that a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import popxl
from popxl.analysis.checking import check
from popxl.analysis.replicas.report import Finding
from popxl.errors import PopxlError
from popxl.testing import Comparison, compare
from tests.trials.families import FAMILIES
from tests.trials.op_by_op import op_by_op
from tests.trials.program import Program

STEPS, TOLERANCE, LARGEST = 2, 1e-5, 1e6


@dataclass(frozen=True)
class Trial:
    """A random program, and what became of it.

    Attributes:
        family, seed: what it is made of.
        is_right: whether variables and losses are those of one replica; `None` for what makes no program, or
            numbers that grow too large.
        certain, uncertain: categories of findings.
        noted: whether there is no finding, and a note: the program stores numbers of each replica.
        factor: if nothing is found in a wrong program: by which factor all gradients are wrong, if nothing else is but
            what is stored; else 0.
        differs: the first thing that differs; or the error of what makes no program.
    """

    family: str
    seed: int
    is_right: bool | None
    certain: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    noted: bool = False
    factor: float = 0.0
    differs: str = ""


def tried(family: str, seed: int) -> Trial:
    """Run and check a program."""
    program, findings, notes = FAMILIES[family](seed), list[Finding](), list[Finding]()

    def build(axes: dict[str, int]) -> popxl.Ir:
        ir = program.build(axes)
        if ir.replication_factor > 1:
            checked = check(ir)
            findings.extend(checked.findings)
            notes.extend(checked.notes)
        return ir

    try:
        report = compare(build, axes=program.axes, steps=STEPS, tolerance=TOLERANCE)
    except (PopxlError, ValueError, TypeError, NotImplementedError, FloatingPointError) as problem:
        return Trial(family, seed, None, differs=f"{type(problem).__name__}: {str(problem)[:200]}")
    numbers = [number for each in report.differences for number in (each.found, each.expected)]
    if not all(abs(number) < LARGEST for number in numbers):
        return Trial(family, seed, None, differs="OverflowError: its numbers grow beyond what can be compared")
    certain, uncertain = (tuple(sorted(e.category for e in findings if e.certain is c)) for c in (True, False))
    wrong = [str(each) for each in report.differences] + [f"{name} drifts apart" for name in _drifting(report)]
    is_noted = bool(notes) and not findings
    factor = _factor(program) if wrong and not (findings or is_noted) else 0.0
    return Trial(family, seed, not wrong, certain, uncertain, is_noted, factor, wrong[0][:200] if wrong else "")


def _drifting(report: Comparison) -> list[str]:
    """Variables of which replicas have their own, although their mean is right; not sums of gradients, which may."""
    left_out = report.left_out.items()
    return [name for name, why in left_out if why.startswith("each replica") and not name.startswith("gradients.")]


def _factor(program: Program) -> float:
    """The number by which all gradients of one replica have to be multiplied to make those of many."""
    sizes = {*program.axes.values(), math.prod(program.axes.values())}
    for factor in (1, *(each for n in sizes for each in (n, 1 / n))):

        def build(axes: dict[str, int], factor: float = factor) -> popxl.Ir:
            return program.build(axes, factor if all(n == 1 for n in axes.values()) else 1.0)

        report = compare(build, axes=program.axes, steps=STEPS, tolerance=TOLERANCE)
        if all(each.what == "loss" for each in report.differences):
            return float(factor)
    return 0.0


def trials(families: list[str], seeds: range, until: float, file: Path | None) -> Iterator[Trial]:
    """Trials of some seeds: those of a file, and the others."""
    lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
    known = {(t.family, t.seed): t for t in (Trial(**json.loads(line)) for line in lines)}
    for seed in seeds:
        for family in families:
            if (family, seed) not in known:
                if time.monotonic() > until:
                    continue
                known[family, seed] = trial = tried(family, seed)
                if file is not None:
                    with file.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(asdict(trial)) + "\n")
            yield known[family, seed]


def told(trial: Trial) -> bool:
    """Whether the check says something of a program."""
    return bool(trial.certain or trial.uncertain or trial.noted)


COLUMNS: Mapping[str, Callable[[Trial], object]] = {
    "programs": lambda t: t.is_right is not None,
    "right": lambda t: t.is_right,
    "certain finding": lambda t: t.is_right and t.certain,
    "uncertain": lambda t: t.is_right and t.uncertain and not t.certain,
    "wrong": lambda t: t.is_right is False,
    "found": lambda t: t.is_right is False and told(t),
    "one factor": lambda t: t.is_right is False and t.factor and not told(t),
    "missed": lambda t: t.is_right is False and not t.factor and not told(t),
}


def table(made: list[Trial]) -> Iterator[str]:
    """In Markdown: how many programs of each family were right and wrong, and what was found in them."""
    yield f"| | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for family in dict.fromkeys(t.family for t in made):
        counts = (sum(bool(holds(t)) for t in made if t.family == family) for holds in COLUMNS.values())
        yield f"| {family} | {' | '.join(map(str, counts))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--ran", type=Path, help="keep results there, and do not run these again")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    with op_by_op(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [*trials(options.families, seeds, time.monotonic() + options.seconds, options.ran)]
    print("\n".join(table(made)))
    for trial in made:
        if trial.is_right and trial.certain:
            print(f"- false alarm: {trial.family} {trial.seed}: {', '.join(trial.certain)}")
        elif COLUMNS["missed"](trial):
            print(f"- missed: {trial.family} {trial.seed}: {trial.differs}")
    errors = Counter(trial.differs for trial in made if trial.is_right is None)
    for error, number in errors.most_common(8):
        print(f"- no program, {number}: {error}")


if __name__ == "__main__":
    main()
