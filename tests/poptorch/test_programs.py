"""Programs as people write them around poptorch, from end to end on data that they make up: `programs/`.

Each checks by itself that its model has learned, and that it computes on the host what it computes here.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs(program: Path, tmp_path: Path) -> None:
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, program, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{program.stem}: ")


@pytest.mark.thorough
def test_a_cheap_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them, in this process, which has imported and compiled much already."""
    (program,) = (path for path in PROGRAMS if path.stem == "recommender")
    runpy.run_path(str(program))["main"](str(tmp_path))
    assert capsys.readouterr().out.startswith("recommender: ")
