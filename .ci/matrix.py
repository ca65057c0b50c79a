#!/usr/bin/env python3
"""Run tests with each Python and each JAX: `.ci/matrix.py [--torch | --whole] [--jax oldest|newest] [PYTHON ...]`.

For each Python there are two environments: one with the oldest JAX that pyproject.toml allows, one with the newest that
there is. Both are installed from the index that pip uses, with the newest of all else. They are made anew each time in
`.cache/matrix`, and removed after their tests; `--install` makes them and stops there, and `--installed` takes what it
has left. A line says how each went, and more name the tests that failed; the whole output is beside the environment.
Pythons are looked for in PATH, and among those of pyenv. Those that are not here are left out, and a line says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    parser.add_argument("--part", metavar="K/N", help="the K-th of N parts of these tests, as for pytest")
    parser.add_argument("--jax", choices=("oldest", "newest"), help="with this JAX alone")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--install", action="store_true", help="make the environments, and run nothing there")
    steps.add_argument("--installed", action="store_true", help="use the environments that `--install` has made")
    options = parser.parse_args(arguments)
    extras, tests = "test,tutorials", SMOKE
    if options.torch:
        extras, tests = "test,tutorials,torch", SMOKE + TORCH
    if options.whole:
        extras, tests = "dev", []
    if options.part:
        tests = [f"--part={options.part}", *tests]
    jax = {"oldest": f"jax=={oldest_jax()} jaxlib=={oldest_jax()}".split(), "newest": ["jax", "jaxlib"]}
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for version in options.pythons or PYTHONS:
        python = interpreter(version)
        for age, wanted in jax.items() if python else ():
            if options.jax not in (None, age):
                continue
            print(f"python {version}, the {age} jax: ", end="", flush=True)
            environment = Environment(python, LOGS / f"{version}-{age}")
            is_good, what = True, "installed"
            if not options.installed:
                is_good, what = environment.install(f".[{extras}]", *wanted)
            if is_good and not options.install:
                is_good, what = environment.test(tests)
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


@dataclass(frozen=True)
class Environment:
    """An environment of a Python in a folder; the output of its commands is in a file with the suffix `.log` beside it.

    Methods return whether all went well, and a few words on it.
    """

    python: Path
    folder: Path

    @property
    def log(self) -> Path:
        """The output of the commands."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def install(self, *packages: str) -> tuple[bool, str]:
        """Make the environment, in place of an older one, and install packages into it."""
        self.log.unlink(missing_ok=True)
        if not self._run(self.python, "-m", "venv", "--clear", self.folder):
            return False, f"makes no environment, see {self.log.relative_to(ROOT)}"
        if not self._run(self._own("python"), "-m", "pip", "install", "--quiet", "--editable", *packages):
            return False, f"cannot be installed, see {self.log.relative_to(ROOT)}"
        return True, "installed"

    def test(self, tests: Sequence[str]) -> tuple[bool, str]:
        """Run pytest with these arguments, and several processes; and remove the environment."""
        began, own = time.monotonic(), self._own("python")
        versions = subprocess.run([own, "-c", VERSIONS], capture_output=True, text=True).stdout
        passed = self._run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", *tests)
        *lines, last = self.log.read_text(encoding="utf-8").rstrip().split("\n")
        failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        options = ("--num-instances=2", "--num-replicas=4")
        if not self._run(self._own("poprun"), *options, own, "-W", "error", PROCESSES):
            passed, last = False, f"poprun fails; {last}"
        shutil.rmtree(self.folder)
        said = f"{last} of {time.monotonic() - began:.0f}s, with {versions.strip()}"
        return passed, said if passed else "\n".join([f"FAILED, see {self.log.relative_to(ROOT)}: {said}", *failures])

    def _own(self, command: str) -> Path:
        return self.folder / "bin" / command

    def _run(self, *command: str | Path) -> bool:
        with self.log.open("a", encoding="utf-8") as output:
            return subprocess.run(command, cwd=ROOT, env=_variables(), stdout=output, stderr=output).returncode == 0


def _variables() -> dict[str, str]:
    """The variables without what would lead to other packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}


if __name__ == "__main__":
    sys.exit(main())
