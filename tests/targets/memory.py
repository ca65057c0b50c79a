"""The memory of a chip that is foreseen for programs, beside what the compiler says.

    python -m tests.targets.memory [--programs "GPT, plain" vocabulary | --large | --others] [--targets "tpu v5e"]

Nothing is run. `memory_programs` has the programs: twenty, these as large as a chip, and twelve others.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from popxl.ir import Ir
from runtime.costs.foreseen import foreseen
from runtime.program.machine import NothingRuns, ProgramElsewhere, TargetMachine
from runtime.program.program import Described, Program, Ready
from runtime.session import Session
from runtime.targets.devices import Device
from runtime.targets.offline import Target
from tests.targets.memory_programs import LARGE, OTHERS, PROGRAMS

ALL = {**PROGRAMS, **LARGE, **OTHERS}

FASTER = "--xla_gpu_autotune_level=0 --xla_backend_optimization_level=0"
"""For XLA: memory is laid out before code is made, which need not be good here."""

TARGETS = ("gpu h100", "tpu v5e")
SQUARES = {"tpu v5e": "2x2"}
"""How four chips stand."""


class Compared(NamedTuple):
    """Bytes of a chip.

    Attributes:
        variables: what is given: variables, and what is fed.
        foreseen: all that is foreseen.
        compiled: all that the compiler says, without code.
        code: the machine code, if it says.
        seconds: what it took to foresee it, of CPU time.
    """

    variables: int
    foreseen: int
    compiled: int
    code: int
    seconds: float

    @property
    def error(self) -> float:
        """By how much too much is foreseen, of what the compiler says."""
        return self.foreseen / self.compiled - 1


class _Catching(TargetMachine):
    """Takes the first program that is asked for, and ends what asks."""

    found: tuple[Ir, Device]

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        self.found = ir, device
        raise NothingRuns


def compile_faster() -> None:
    """Have XLA make code of no quality. It looks before it compiles first."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FASTER}".strip()


def caught(make: Callable[[], object], target: str) -> tuple[Ir, Device]:
    """The first program that makes a session on a target, and where; it is not compiled."""
    machine, before = _Catching(Target(target)), Session.machine
    Session.machine = machine
    try:
        make()
    except NothingRuns:
        return machine.found
    finally:
        Session.machine = before
    raise AssertionError(f"{make} makes no session")


def compared(name: str, kind: str) -> Compared:
    """A program, foreseen and compiled."""
    chips, make = ALL[name]
    layout = f":{SQUARES.get(kind, chips)}" if chips > 1 else ""
    ir, device = caught(make, kind + layout)
    ir.options.precision = "default"  # of float32, XLA for TPUs compiles other products for minutes
    begun = time.process_time()
    found = foreseen(Described(ir, device).layout)
    seconds = time.process_time() - begun
    assert found is not None, f"{name} is a plan"
    (executable,) = ProgramElsewhere(ir, device).executables()
    said = executable.memory_analysis()
    needed = said.temp_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    compiled, code = said.argument_size_in_bytes + needed, said.generated_code_size_in_bytes
    return Compared(found.arguments, found.device, compiled, code, seconds)


def lines(names: list[str], kinds: list[str]) -> Iterator[str]:
    """The table in Markdown, and a sentence for each target."""
    yield "| | | variables and feeds | foreseen | compiled | error |"
    yield "|---" * 6 + "|"
    for kind in kinds:
        errors = []
        for name in names:
            found = compared(name, kind)
            errors.append(abs(found.error))
            sizes = (f"{count / 1e6:,.0f}".replace(",", " ") for count in found[:3])
            yield f"| {name} | {kind} | {' | '.join(sizes)} | {found.error:+.1%} |"
        counts = (sum(error <= limit for error in errors) for limit in (0.05, 0.15))
        within = " and ".join(f"{n} within {limit} %" for n, limit in zip(counts, (5, 15), strict=True))
        yield f"{kind}: {within}, of {len(errors)}."


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.targets.memory", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--programs", nargs="+", choices=ALL)
    help = "the same programs, as large as a chip"
    which.add_argument("--large", action="store_const", dest="programs", const=[*LARGE], help=help)
    help = "those that no rule was made for"
    which.add_argument("--others", action="store_const", dest="programs", const=[*OTHERS], help=help)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    options = parser.parse_args()
    compile_faster()
    for line in lines(options.programs or [*PROGRAMS], options.targets):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
