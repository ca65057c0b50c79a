"""How long `import popxl` takes, next to `import jax`: in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.harness import OURS, Measure, Row, Size, over, seconds, time_of

ROOT = Path(__file__).resolve().parents[2]


def importing(module: str) -> Measure:
    """Seconds that a fresh interpreter takes to import a module."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", f"import {module}"]
    return time_of(lambda: bool(subprocess.run(command, env=environment, check=True)))


@contextmanager
def parties(size: Size) -> Iterator[Mapping[str, Measure]]:
    measures = {OURS: importing("popxl"), "JAX": importing("jax")}
    if size is not Size.TINY:
        measures[OURS]()  # leaves compiled bytecode behind
    yield measures


ROWS = (Row("import", parties, (over(0.3, seconds),), rounds=11, about="the import"),)
