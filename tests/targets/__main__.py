"""Compiles the tests, the tutorials and the models for TPUs and GPUs, and writes what came of it as a page.

    python -m tests.targets                          # all, an hour: the page docs/targets.md
    python -m tests.targets --part 3/100 --areas ops collectives --print

It needs the extras `tpu` and `gpu`, and neither a TPU nor a GPU. Nothing is run: a test has done its part when it
reaches its first run. Each area and target is a process of its own, as XLA may end one. With `--add FILE`, what was
found before is in that file, and on the page, too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jax

from popxl.base.version import VERSION
from tests.tutorials.test_tutorials import LAUNCHERS, PROGRAMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "targets.md"

TARGETS = ("tpu v5e:2x4", "gpu h100:8")

AREAS: Mapping[str, Sequence[str]] = {
    "ops": ["tests/targets/op_table.py"],
    "op-tests": ["tests/popxl/ops"],
    "collectives": ["tests/popxl/ops/test_collectives.py", "tests/popxl/test_replicas.py"],
    "variables": ["tests/popxl/test_remote_variables.py", "tests/popxl/test_remote_buffer.py"],
    "conditionals": ["tests/popxl/test_conditional.py"],
    "loops": ["tests/popxl/test_repeat.py"],
    "transfers": ["tests/popxl/test_streams.py"],
    "placement": ["tests/popxl/test_placement.py"],
    "calls": ["tests/popxl/test_call.py", "tests/popxl/test_autodiff.py", "tests/popxl/test_plan.py"],
    "random": ["tests/popxl/test_random_programs.py"],
    "offloading": ["tests/targets/random_offloading.py"],
    "gpt": ["tests/targets/gpt_variants.py"],
    "poptorch": ["tests/poptorch/test_models.py", "tests/poptorch/test_operators.py"],
    "tutorials": [],
}
"""What is compiled, and the tests that are taken for it; of tutorials, the programs."""

Found = dict[tuple[str, str], dict[str, Any]]

SECONDS = 3 * 3600
"""No area takes longer."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.targets", description=__doc__.split("\n")[0])
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=[*AREAS], metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--targets", nargs="+", default=[*TARGETS], metavar="MACHINE", help="which machines")
    parser.add_argument("--part", metavar="K/N", default="", help="the K-th of N parts of each area")
    parser.add_argument("--thorough", action="store_true", help="all dtypes, sizes and seeds, rather than some")
    parser.add_argument("--add", metavar="FILE", type=Path, help="keep what is found there, with what is there already")
    parser.add_argument("--print", action="store_true", help="print the page, rather than write it to docs/targets.md")
    options = parser.parse_args()
    found: Found = {}
    if options.add is not None and options.add.is_file():
        found = {(each["area"], each["target"]): each for each in json.loads(options.add.read_text(encoding="utf-8"))}
    for area in options.areas:
        for target in options.targets:
            start = time.perf_counter()
            result = tutorials(target) if area == "tutorials" else tested(area, target, options.part, options.thorough)
            how = {"part": options.part if area != "tutorials" else "", "thorough": options.thorough}
            when = {"day": date.today().isoformat(), "seconds": time.perf_counter() - start}
            found[area, target] = {"area": area, "target": target} | result | how | when
            print(f"{area} for {target}: {told(found[area, target])}", file=sys.stderr)
            if options.add is not None:  # each time: it takes hours
                options.add.write_text(json.dumps([*found.values()]), encoding="utf-8")
            if not options.print:
                PAGE.parent.mkdir(exist_ok=True)
                PAGE.write_text(page(found), encoding="utf-8")
    if options.print:
        print(page(found))
    return int(any(result["failed"] for result in found.values()))


def tested(area: str, target: str, part: str, thorough: bool) -> dict[str, Any]:
    """What became of the tests of an area."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--tb=line"]
        command += ["-p", "tests.targets.plugin", "--target", target, "--target-results", str(results)]
        command += ["--part", part] if part else []
        command += ["--thorough=1/1"] if thorough else []
        done = subprocess.run(
            [*command, *AREAS[area]], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode in (0, 1) or (done.returncode == 5 and part):  # tests have failed; no test is in the part
            return json.loads(results.read_text(encoding="utf-8"))
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return {"programs": 0, "reached": 0, "tests": 0, "failed": {area: f"The process ended ({done.returncode}): {last}"}}


def tutorials(target: str) -> dict[str, Any]:
    """What became of the tutorials, as far as their first run; but for those of several processes, which a target is
    not for."""
    found: dict[str, Any] = {"programs": 0, "reached": 0, "tests": 0, "failed": {}}
    for program, (arguments, _) in ((name, told) for name, told in PROGRAMS.items() if name not in LAUNCHERS):
        command = [sys.executable, "-m", "popxl", "report", str(ROOT / "tutorials" / program), "--target", target]
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found["tests"] += 1
        found["programs"] += done.stdout.count("=== session ")
        found["reached"] += "Stopped at " in done.stdout
        if done.returncode:
            found["failed"][program] = "\n".join(done.stderr.strip().splitlines()[-1:])
    return found


# The page ------------------------------------------------------------------------------------------------------------


PROSE = "## What XLA and JAX refuse\n"
"""Where the text of the page begins that is not written by the command."""


def told(result: Mapping[str, Any]) -> str:
    """One cell: programs that were compiled, of which tests, and on which day; and tests that failed."""
    failed = f", **{len(result['failed'])} failed**" if result["failed"] else ""
    which = f"part {result['part']}" if result["part"] else "all"
    how = f"{which}{', thorough' * result['thorough']}; {result['day']}"
    return f"{result['programs']} programs of {result['tests']} tests{failed} ({how})"


def page(found: Found) -> str:
    """The table, and below it what was left out, and why tests failed; and the text that the page has already."""
    targets = [*dict.fromkeys(target for _, target in found)]
    lines = [
        "# What compiles offline",
        "",
        f"`python -m tests.targets` wrote this page, with popxl {VERSION} and jax {jax.__version__}. Nothing was run: "
        "each test stops at its first run, and the program that it would run is compiled. Numbers were not checked.",
        "",
        "`ops` is the table of ops: each op in float32, float16 and bfloat16, or in its integer dtypes; forward, in "
        "place, and its gradient. The other rows are the tests of these names, without those marked `thorough` unless "
        "stated. `offloading` is 50 random programs with random memory plans. `all` means all tests of a row; a part "
        "is selected by the names of the tests.",
        "",
        "| | " + " | ".join(targets) + " |",
        "|---" * (len(targets) + 1) + "|",
    ]
    for area in dict.fromkeys(area for area, _ in found):
        cells = (told(found[area, target]) if (area, target) in found else "–" for target in targets)
        lines.append(f"| {area} | " + " | ".join(cells) + " |")
    for target in targets:
        missing = [area for area in AREAS if (area, target) not in found]
        lines += ["", f"Not compiled for {target}: {', '.join(missing)}."] if missing else []
    for target in targets:
        why = Counter(
            reason(message)
            for (_, compiled_for), result in found.items()
            if compiled_for == target
            for message in result["failed"].values()
        )
        if why:
            lines += ["", f"What failed for {target}:", "", "| tests | |", "|---|---|"]
            lines += [f"| {count} | {text} |" for text, count in why.most_common()]
    _, head, prose = PAGE.read_text(encoding="utf-8").partition(PROSE)
    return "\n".join([*lines, "", head]) + prose


def reason(message: str) -> str:
    """An error in a line, without what differs from test to test."""
    line = " ".join(message.partition("--------------------")[0].split())
    return re.sub(r"\b0x[0-9a-f]+\b|%[\w.\-]+", "…", line)[:300].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
