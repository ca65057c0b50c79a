"""Programs as people write them around poptorch, from end to end on data that they make up: `programs/`.

Each checks by itself that its model has learned, and that it computes on the host what it computes here.
"""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))
IN_THE_USUAL_RUN = "graphs"  # the cheapest


@pytest.mark.parametrize(
    "program",
    [pytest.param(path, marks=[pytest.mark.thorough] * (path.stem != IN_THE_USUAL_RUN)) for path in PROGRAMS],
    ids=lambda path: path.stem,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:This DataLoader will create:UserWarning")
def test_programs(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(program))["main"](str(tmp_path))
    assert capsys.readouterr().out.startswith(f"{program.stem}: ")
