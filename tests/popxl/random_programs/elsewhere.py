"""Where random programs have their remote buffers on machines that are not here:

    python -m tests.popxl.random_programs.elsewhere "tpu v5e:2x2" --count 100

The compiler of the machine has to be installed (the extra `tpu` or `gpu`). Every program has remote variables, and one
replica or four, which share a chip where the machine has one ("tpu v5e"). The session looks itself where XLA has put
what is remote; here the text that XLA has compiled is counted once more. How many executables copy a whole buffer on
the way is told: some conditionals do, with loops in their branches. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX

import popxl
from popxl.base.log import Logger
from popxl.errors import PopxlError
from runtime.plan.plan import Plan
from tests.popxl.random_programs.maker import Maker

TOGETHER = 5
"""So many programs are one Ir."""


def program(seeds: Sequence[int]) -> popxl.Ir:
    """Programs with these seeds. The first one says on how many replicas, and how called graphs are compiled."""
    replicas = 4 if seeds[0] // TOGETHER % 2 else 1
    ir = popxl.Ir(replicas)
    ir.options.enableInplaceAmbiguityChecking = False
    ir.options.calledGraphs = ("auto", "dispatched", "kept")[seeds[0] // TOGETHER % 3]  # type: ignore[assignment]
    with ir.main_graph, popxl.in_sequence():
        for seed in seeds:
            Maker(seed, streams=True, buffers=True, replicas=replicas).main()
    return ir


def executables(session: popxl.Session) -> Iterator[tuple[Any, int]]:
    """What XLA has compiled, and how many buffers each part of it uses."""
    program = session.program
    if not isinstance(program.executable, Plan):
        yield program.executable, len(program.layout.buffers)
        return
    found = {}
    for piece in program.executable.segments:
        found[piece.structure] = sum(isinstance(c, popxl.RemoteBuffer) for c in piece.channels)
    yield from ((structure.executable, count) for structure, count in found.items())


def check(ir: popxl.Ir, target: str) -> tuple[int, int]:
    """Compile a program, and return how many remote buffers it has, and how many executables copy one as a whole.

    Raises:
        PopxlError: if XLA has put one, or anything else, where it does not belong.
        AssertionError: if the text says otherwise.
    """
    session, copying = popxl.Session(ir, target), 0
    for executable, count in executables(session):
        ((read, written),) = re.findall(
            r"entry_computation_layout=\{\((.*)\)->(.*?)\}(?:, \w+=|\n)", executable.as_text()
        )
        assert (read.count("S(5)"), written.count("S(5)")) == (count, count)
        sizes = executable.memory_analysis()
        assert (count > 0) == (sizes.host_argument_size_in_bytes > 0)
        assert sizes.host_alias_size_in_bytes == sizes.host_output_size_in_bytes, "a buffer is not overwritten"
        copying += sizes.host_temp_size_in_bytes > 0
    return len(session.program.layout.buffers), copying


def main() -> int:
    """Check as many programs as the arguments say. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="such as 'tpu v5e:2x2'")
    parser.add_argument("--count", type=int, default=100, help="of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    arguments = parser.parse_args()
    Logger().setLevel("ERR")  # programs are odd, and popxl would say so
    start, failed, found = perf_counter(), 0, (0, 0)
    for first in range(arguments.seed, arguments.seed + arguments.count, TOGETHER):
        seeds = range(first, min(first + TOGETHER, arguments.seed + arguments.count))
        try:
            more = check(program(seeds), arguments.target)
            found = (found[0] + more[0], found[1] + more[1])
        except (AssertionError, PopxlError, RuntimeError) as problem:
            failed += 1
            print(
                f"\n--seed {first} --count {len(seeds)}: {type(problem).__name__}: {str(problem)[:2000]}\n", flush=True
            )
        done = seeds.stop - arguments.seed
        told = f"{done} programs, {found[0]} buffers, {found[1]} times copied as a whole, {failed} failed"
        print(f"{told}, {perf_counter() - start:.0f} s", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
