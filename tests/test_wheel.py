"""The wheel: all of the packages is in it, and it works outside of the checkout."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import popxl

ROOT = Path(__file__).parents[1]

PACKAGES = ("popart", "popdist", "poptorch", "poptorch_geometric", "popxl", "popxl_addons", "runtime")

LIMIT = 300  # seconds, after which a program is stopped: far more than any of these takes


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The variables without a way back to the checkout."""


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    """What a command prints, which has to succeed. `path` is a folder in which commands are looked for first."""
    environment = ENVIRONMENT | {"PATH": os.pathsep.join([*([path] if path else []), os.environ["PATH"]])}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("only Git knows which files belong to the packages, and this is no checkout")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel .` makes, of a copy of the checkout: nothing of an earlier build is there."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", made)  # without a network
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    (wheel,) = made.iterdir()
    return wheel


def test_what_is_in_it(wheel: Path, tracked: list[str]) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    packages = tuple(f"{name}/" for name in PACKAGES)
    expected = {name for name in tracked if name.startswith(packages) or name == "popdist.py"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"popxl/py.typed", "poptorch/OPERATORS.md", "popdist.py"} <= expected
    assert (metadata["Name"], metadata["Version"]) == ("popxl-jax", popxl.__version__)


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tutorials, and with a fresh environment: the wheel is installed there, and nothing else.

    What it needs is not installed anew, which takes long: the environment sees the packages of this one. It sees no
    editable installation, as those need a `.pth` file of the environment itself.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(ROOT / "tutorials", folder / "tutorials")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return folder


@pytest.mark.thorough
def test_it_works_outside_of_the_checkout(folder: Path) -> None:
    """Both commands, with a tutorial each. (One test, as each would install it again.)"""
    programs = folder / "env" / "bin"

    def say(command: str) -> str:
        return run(*shlex.split(command), cwd=folder, path=str(programs))

    needs = {"poptorch": "torch", "poptorch_geometric": "torch_geometric"}
    names = ", ".join(name for name in PACKAGES if importlib.util.find_spec(needs.get(name, name)))
    files = say(f"python -c 'import {names}; print(*(each.__file__ for each in ({names})))'").split()
    assert [file for file in files if not file.startswith(f"{programs.parent}/")] == []

    assert say("popxl --version").split()[:2] == ["popxl", popxl.__version__]
    assert say("poprun --version").split()[:2] == ["popxl", popxl.__version__]
    shown = say("popxl show tutorials/1_basic_concepts/mnist.py --quick")
    assert "main graph:" in shown and "nothing is compiled or run." in shown
    program = "python -W error tutorials/9_several_processes/several_processes.py"
    printed = say(f"poprun --num-instances 2 --num-replicas 4 {program}")
    assert "[1] the same weights as one process with whole batches: True" in printed
