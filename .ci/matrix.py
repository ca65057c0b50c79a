#!/usr/bin/env python3
"""Run tests with each Python and each JAX: `.ci/matrix.py [--torch | --whole] [--jax oldest|newest] [PYTHON ...]`.

For each Python there are two environments, made anew each time: one with the oldest JAX that pyproject.toml allows, one
with the newest that there is. Both are installed from the index that pip uses, with the newest of all else. A line says
how each went, and more name the tests that failed; the whole output is in the folder `.cache/matrix`. Pythons are
looked for in PATH, and among those of pyenv. Those that are not here are left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "matrix"

PYTHONS = ("3.11", "3.12", "3.13", "3.14")

SMOKE = """
    tests/test_a_smoke.py tests/test_house.py
    tests/popxl/ops/test_reductions.py tests/popxl/test_autodiff.py tests/popxl/test_interop.py
    tests/popxl/test_session.py tests/popxl/test_session_files.py tests/popxl/test_laziness.py
    tests/popxl/test_printing.py tests/popxl/test_command.py
    tests/popxl_addons/test_addons_layers.py tests/popxl_addons/test_addons_module.py
""".split()
"""What differs most between versions: what JAX keeps to itself, files, processes, text; a family of ops; the kits."""

TORCH = ["tests/poptorch"]
"""All of it: each PyTorch moves something that a capture leans on."""

PROCESSES = "tutorials/9_several_processes/several_processes.py"
"""What several processes run together at the end, by the commands of the environment."""

VERSIONS = """
import jax, numpy, platform
print(f"python {platform.python_version()}, jax {jax.__version__}, numpy {numpy.__version__}")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the command line. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"by default {' '.join(PYTHONS)}")
    parser.add_argument(
        "--torch",
        action="store_true",
        help="with PyTorch and tests of poptorch: gigabytes, where pip finds none for CPUs",
    )
    parser.add_argument("--whole", action="store_true", help="all tests in place of a part, with all that they need")
    parser.add_argument("--jax", choices=("oldest", "newest"), help="with this JAX alone")
    options = parser.parse_args(arguments)
    extras, tests = "test,tutorials", SMOKE
    if options.torch:
        extras, tests = "test,tutorials,torch", SMOKE + TORCH
    if options.whole:
        extras, tests = "dev", []
    jax = {"oldest": f"jax=={oldest_jax()} jaxlib=={oldest_jax()}".split(), "newest": ["jax", "jaxlib"]}
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for version in options.pythons or PYTHONS:
        python = interpreter(version)
        for age, wanted in jax.items() if python else ():
            if options.jax not in (None, age):
                continue
            print(f"python {version}, the {age} jax: ", end="", flush=True)
            is_good, what = tried(python, wanted, LOGS / f"{version}-{age}.log", extras, tests)
            failed += not is_good
            print(what, flush=True)
        if python is None:
            print(f"python {version}: skipped, as there is none here", flush=True)
    return 1 if failed else 0


def oldest_jax() -> str:
    """The version from which on pyproject.toml allows JAX."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (oldest,) = (found[1] for each in dependencies if (found := re.fullmatch(r"jax>=([\d.]+)", each)))
    return oldest


def interpreter(version: str) -> Path | None:
    """A Python of this version: in PATH, or else of pyenv, whose command in PATH may only say that it is not active."""
    for path in _candidates(version):
        asked = [path, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        found = subprocess.run(asked, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() == version:
            return path
    return None


def _candidates(version: str) -> Iterator[Path]:
    if (found := shutil.which(f"python{version}")) is not None:
        yield Path(found)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    yield from sorted(versions.glob(f"{version}.*/bin/python"))


def tried(python: Path, jax: Sequence[str], log: Path, extras: str, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests pass in a fresh environment with these extras, and a few words on them; no tests are all."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("w", encoding="utf-8") as output:
        own = Path(folder, "bin", "python")

        def does(*command: str | Path) -> bool:
            return subprocess.run(command, cwd=ROOT, env=_environment(), stdout=output, stderr=output).returncode == 0

        if not does(python, "-m", "venv", folder):
            return False, f"makes no environment, see {log.relative_to(ROOT)}"
        if not does(own, "-m", "pip", "install", "--quiet", "--editable", f".[{extras}]", *jax):
            return False, f"cannot be installed, see {log.relative_to(ROOT)}"
        versions = subprocess.run([own, "-c", VERSIONS], capture_output=True, text=True).stdout
        passed = does(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", *tests)
        *lines, last = log.read_text(encoding="utf-8").rstrip().split("\n")
        failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        options = ("--num-instances=2", "--num-replicas=4")
        if not does(own.with_name("poprun"), *options, own, "-W", "error", PROCESSES):
            passed, last = False, f"poprun fails; {last}"
    said = f"{last} of {time.monotonic() - began:.0f}s, with {versions.strip()}"
    return passed, said if passed else "\n".join([f"FAILED, see {log.relative_to(ROOT)}: {said}", *failures])


def _environment() -> dict[str, str]:
    """The variables without what would lead to other packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}


if __name__ == "__main__":
    sys.exit(main())
