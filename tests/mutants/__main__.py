"""Mutation testing: right programs are made wrong by one edit each, run beside the originals, and checked.

python -m tests.mutants [--programs "by hand" "kit, experts"] [--kinds "drop a collective"] [--missed FILE] [--ran FILE]

Running takes most of the time, and does not depend on the checker: `--ran` keeps in a file which mutants change
numbers, so that a run goes on where the last one ended, and the checker alone is tried again in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import numpy as np

import popxl
from popxl.analysis.checking import check
from popxl.errors import PopxlError
from tests.devices import one_device
from tests.mutants.mutations import Mutation, mutations
from tests.mutants.programs import ALIKE, PROGRAMS

STEPS = 2

Numbers = Mapping[str, np.ndarray]


class Ran:
    """Which mutants change numbers, as runs have shown: a file of one line each; `None` for what makes no program."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self.known: dict[str, bool | None] = dict(json.loads(line) for line in lines)

    def note(self, key: str, changed: bool | None) -> None:
        self.known[key] = changed
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps([key, changed]) + "\n")


@dataclass(frozen=True)
class Mutant:
    """A program that was made wrong, and what became of it.

    Attributes:
        program: that it was made of.
        kind, what: the edit.
        changed: whether its numbers are others.
        findings: what the checker finds.
        notes: what it says besides.
        at_line: whether one of both is at a right line.
        where: the graph and the op.
    """

    program: str
    kind: str
    what: str
    changed: bool
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    at_line: bool
    where: tuple[int, int]

    @property
    def told(self) -> bool:
        """Whether the checker says something of it."""
        return bool(self.findings or self.notes)


def found_in(ir: popxl.Ir) -> list[tuple[str, str]]:
    """What is found in a program before it runs: the lines, and the categories."""
    return [(each.line, each.category) for each in check(ir).findings]


def numbers(name: str, ir: popxl.Ir) -> Numbers:
    """All variables on all replicas, and all that is stored, after some steps."""
    for v in ir.main_graph.variables:
        if v.piece is None and not v.location_info.isRemote() and v.replica_grouping.group_size > 1:
            v.retrieval_mode = "all_replicas"
    rng = np.random.default_rng(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with popxl.Session(ir, one_device(ir.replication_factor)) as session:
            found: dict[str, np.ndarray] = {}
            for step in range(STEPS):
                feeds = {}
                for stream in sorted(ir.get_all_h2d_streams(), key=lambda each: each.tensor.name):
                    shape = (stream.num_host_transfers, ir.replication_factor, *stream.shape)
                    array = rng.normal(size=shape) if stream.dtype.is_floating_point else rng.integers(0, 8, shape)
                    if name.startswith(ALIKE):  # replicas along the last axis have the same data
                        array[:, 1::2] = array[:, ::2]
                    feeds[stream] = array.astype(stream.dtype.as_numpy()).reshape(session.host_shape(stream))
                stored = session.run(feeds)
                found |= {f"{s.tensor.name} {step}": np.asarray(each) for s, each in stored.items()}
            values = session.values_of(ir.main_graph.variables)
            return found | {v.name: np.array(each) for v, each in values.items()}


def differ(found: Numbers, expected: Numbers) -> bool:
    """Whether numbers of two programs are others. Copies on replicas may be fewer in one."""
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape:
            return True
        scale = max(float(np.abs(value).max(initial=0)), 0.1)  # what is smaller may be the rounding of a zero
        if not np.allclose(other, value, 0, 5e-6 * scale, equal_nan=True):
            return True
    return False


def made(name: str, mutation: Mutation, expected: Callable[[], Numbers], ran: Ran) -> Mutant | None:
    """A mutant, run and checked; `None` where the edit makes no program."""
    key = f"{name}: {mutation.kind} {mutation.where} {mutation.number}"
    if key in ran.known and ran.known[key] is None:
        return None
    ir = PROGRAMS[name]()
    try:
        lines, what = mutation.on(ir)
        report = check(ir)
        if key not in ran.known:
            ran.note(key, differ(numbers(name, ir), expected()))
    except (PopxlError, ValueError, TypeError, NotImplementedError) as problem:
        ran.note(key, None)
        print(f"no program: {key}: {str(problem)[:160]}", file=sys.stderr)
        return None
    at_line = any(each.line in lines for each in (*report.findings, *report.notes))
    findings, notes = ([f"{e.category} ({e.line})" for e in some] for some in (report.findings, report.notes))
    changed = bool(ran.known[key])
    return Mutant(name, mutation.kind, what, changed, tuple(findings), tuple(notes), at_line, mutation.where)


def all_mutants(programs: list[str], kinds: list[str], ran: Ran) -> Iterator[Mutant]:
    for name in programs:
        ir = PROGRAMS[name]()
        for line, category in found_in(ir):
            print(f"found in the original: {name}: {category} ({line})", file=sys.stderr)
        edits = [each for each in mutations(ir) if not kinds or each.kind in kinds]
        expected = cache(partial(numbers, name, ir))
        for mutation in edits:
            if (mutant := made(name, mutation, expected, ran)) is not None:
                yield mutant


def table(mutants: list[Mutant]) -> Iterator[str]:
    """In Markdown: for each kind of edit, how many were made, changed numbers, were found, and at the right line."""
    yield "| | made | change numbers | found | at the right line | change nothing | of these, found |"
    yield "|---|---|---|---|---|---|---|"
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for each in mutants:
        by_kind[each.kind].append(each)
    for kind, some in [*sorted(by_kind.items()), ("all", mutants)]:
        changed, same = [e for e in some if e.changed], [e for e in some if not e.changed]
        found = [each for each in changed if each.told]
        at_line = [each for each in found if each.at_line]
        warned = [each for each in same if each.findings]
        counts = (len(some), len(changed), len(found), len(at_line), len(same), len(warned))
        yield f"| {kind} | {' | '.join(map(str, counts))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="*", default=[""], help="how names begin")
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--missed", type=Path, help="write those that were not found there")
    parser.add_argument("--ran", type=Path, help="keep there which mutants change numbers, and do not run these again")
    options = parser.parse_args()
    programs = [name for name in PROGRAMS if name.startswith(tuple(options.programs))]
    mutants = list(all_mutants(programs, options.kinds, Ran(options.ran)))
    print("\n".join(table(mutants)))
    missed = [f"- missed: {m.program}: {m.kind}: {m.what} {m.where}" for m in mutants if m.changed and not m.told]
    missed += [
        f"- elsewhere: {m.program}: {m.kind}: {m.what}: {'; '.join(m.findings + m.notes)}"
        for m in mutants
        if m.changed and m.told and not m.at_line
    ]
    missed += [
        f"- false: {m.program}: {m.kind}: {m.what}: {'; '.join(m.findings)}"
        for m in mutants
        if not m.changed and m.findings
    ]
    print("\n" + "\n".join(missed))
    if options.missed is not None:
        options.missed.write_text("\n".join(missed) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
