"""Measures the rows of the performance table, each side by side with the same computation written by hand.

    python -m tests.benchmarks.run [--only NAME] [--json FILE] [--quick]
    python -m tests.benchmarks.run --page docs/performance.md [--only NAME | --again]

Times are never asserted: the table says what was met, and the exit status is 0. `harness.py` says how rows are
measured; the rows are in the other files. `page.py` makes the page about performance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from popxl.utils import table_to_string
from runtime.targets.devices import CPU_DEVICES
from tests.benchmarks import (
    blocks,
    building,
    empty_run,
    generation,
    gpt,
    importing,
    models,
    network,
    page,
    parallel,
    pipeline,
    remote,
    whole_models,
)
from tests.benchmarks.harness import HEADER, Result, Row, Size, measure, progress
from tests.benchmarks.machine import machine, now

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    network,
    blocks,
    gpt,
    generation,
    models,
    whole_models,
    pipeline,
    parallel,
    remote,
    building,
    empty_run,
    importing,
)
ROWS = tuple(row for file in FILES for row in file.ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="rows in whose names this pattern is found")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")
    parser.add_argument("--quick", action="store_true", help="few rounds, and none of the slow rows")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write tables and pictures into this page")
    parser.add_argument("--again", action="store_true", help="write the page from what was kept, and measure nothing")
    args = parser.parse_args()
    if args.again:
        page.write(args.page or parser.error("--again: expected --page, the page to be written"), ROWS)
        return
    rows = [row for row in ROWS if re.search(args.only, row.name) and not (args.quick and row.slow)]
    if not rows:
        parser.error(f"no row is called {args.only!r}; there are {', '.join(row.name for row in ROWS)}")
    here = [row for row in rows if row.devices <= jax.device_count()]
    elsewhere = [row for row in rows if row not in here]
    circumstances = {**now(), "quick": args.quick}

    results: list[Result] = []
    with contextlib.suppress(KeyboardInterrupt):  # what has been measured until then is shown
        for row in here:
            results.append(measure(row, Size.QUICK if args.quick else Size.FULL))
            if args.page:
                page.keep(args.page, machine(), circumstances, results[-1])
    progress()
    print(table_to_string([HEADER, *(line for result in results for line in result.lines())]))
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if args.json:
        raw = {"machine": machine(), "rows": [result.raw() for result in results]}
        args.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")
    if args.page:
        page.write(args.page, ROWS)
    if elsewhere:
        measure_elsewhere(elsewhere, args)


def measure_elsewhere(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Have rows measured that take more devices than there are here, by a process that has them. Only for a page."""
    count, names = max(row.devices for row in rows), "|".join(row.name for row in rows)
    if not args.page or CPU_DEVICES in os.environ:
        progress(f"left out, as there are too few devices ({CPU_DEVICES}={count}): {names}\n")
        return
    options = ["--only", f"^({names})$", "--page", str(args.page), *(["--quick"] if args.quick else [])]
    command = [sys.executable, "-m", "tests.benchmarks.run", *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | {CPU_DEVICES: str(count)}, check=True)


if __name__ == "__main__":
    main()
