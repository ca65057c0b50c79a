"""`.ci/matrix.py`, which runs a part of the tests with each Python and each JAX: it asks for what is there."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[1]
MATRIX = runpy.run_path(str(ROOT / ".ci" / "matrix.py"))


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_what_it_runs_is_there() -> None:
    paths = [*MATRIX["SMOKE"], *MATRIX["TORCH"], MATRIX["PROCESSES"]]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_it_begins_with_the_oldest_versions_of_the_project(project: Any) -> None:
    oldest = MATRIX["oldest_jax"]()
    assert tuple(map(int, oldest.split("."))) <= jax.__version_info__
    assert project["project"]["requires-python"] == f">={MATRIX['PYTHONS'][0]}"
    assert project["tool"]["mypy"]["python_version"] == MATRIX["PYTHONS"][0]
    named = [each.rpartition(" ")[2] for each in project["project"]["classifiers"] if "Python :: 3." in each]
    assert named == list(MATRIX["PYTHONS"][: len(named)]) != []


def test_pythons_that_are_not_here_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert MATRIX["main"](["9.9"]) == 0
    assert capsys.readouterr().out == "python 9.9: skipped, as there is none here\n"
