"""Measures the rows of the performance table, each side by side with the same computation written by hand.

    python tests/benchmarks/run.py [--only NAME] [--json FILE] [--quick]

Times are never asserted: the table says what was met, and the exit status is 0. `harness.py` says how rows are
measured; the rows are in the other files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from popxl.utils import table_to_string
from tests.benchmarks import blocks, building, empty_run, gpt, importing, models, network, parallel, pipeline, remote
from tests.benchmarks.harness import HEADER, Result, Size, measure, progress

FILES = (network, blocks, gpt, models, pipeline, parallel, remote, building, empty_run, importing)
ROWS = tuple(row for file in FILES for row in file.ROWS)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    versions = {}
    for package in ("jax", "jaxlib", "numpy", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    devices = [str(device) for device in jax.devices()]
    return {"cpus": os.cpu_count(), "python": platform.python_version(), **versions, "devices": devices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAME", default="", help="rows whose names contain this")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")
    parser.add_argument("--quick", action="store_true", help="few rounds, and none of the slow rows")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in row.name and not (args.quick and row.slow)]
    if not rows:
        parser.error(f"no row is called {args.only!r}; there are {', '.join(row.name for row in ROWS)}")

    results: list[Result] = []
    with contextlib.suppress(KeyboardInterrupt):  # what has been measured until then is shown
        for row in rows:
            if row.devices > jax.device_count():
                progress(f"{row.name} is left out: it takes {row.devices} devices (POPXL_CPU_DEVICES={row.devices})\n")
                continue
            results.append(measure(row, Size.QUICK if args.quick else Size.FULL))
    progress()
    print(table_to_string([HEADER, *(line for result in results for line in result.lines())]))
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if args.json:
        raw = {"machine": machine(), "rows": [result.raw() for result in results]}
        args.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
