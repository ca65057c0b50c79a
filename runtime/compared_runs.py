"""`popxl check FILE.py --run`: comparison of a file's program on many replicas with the same on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from popxl.base.choices import choosing
from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime.comparison import Comparison, compare
from runtime.machine import LayoutMachine
from runtime.watched_runs import WatchingMachine, run_file, watched

HOW = (
    'Let the program take the sizes of its axes from `popxl.choice("NAME", [SIZE, 1])`, where NAME is that of the '
    "axis; or from its command line, and say how with --run=ARGUMENTS, such as --run='--data 1'."
)


def compared_run(file: Path, arguments: Sequence[str], alone: Sequence[str], number: int) -> Comparison:
    """Run an Ir from a file, and its copy with all axes of size one, and compare both.

    Args:
        alone: arguments of the program for one replica; empty for the same ones.
        number: index of the Ir among those that the file builds.

    Raises:
        PopxlError: for an Ir without named axes, or an Ir that the file does not build for one replica.
    """
    ir = _built(file, arguments, {})[number]
    axes = ir.axes
    if math.prod(axes.values()) < 2:
        raise PopxlError(f"{ir!r} has no named axes of several replicas, such as those of `popxl.Ir(axes=...)`.")
    try:
        one = _built(file, alone or arguments, dict.fromkeys(axes, 1))
    except ValueError as problem:  # of a choice without this option
        raise PopxlError(f"{problem} {HOW}") from problem
    if len(one) <= number or one[number].replication_factor != 1:
        raise PopxlError(f"the program does not build {ir!r} for one replica. {HOW}")

    def program(sizes: dict[str, int]) -> Ir:
        return ir if sizes == axes else one[number]

    return compare(program, axes=axes)


def _built(file: Path, arguments: Sequence[str], taken: dict[str, Any]) -> list[Ir]:
    """The Irs that a program builds with these choices; what it prints is left out."""
    irs: dict[Ir, None] = {}
    with choosing(taken), watched(WatchingMachine(LayoutMachine()), irs), redirect_stdout(StringIO()):
        _, code = run_file(file, arguments)
    if code:
        raise PopxlError(f"{file} ended with the exit code {code}.")
    return [*irs]
