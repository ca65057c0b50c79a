"""First calls are measured, and their table is written."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.benchmarks import first_call
from tests.benchmarks.first_call import COMPILED, MODELS, OURS, PHASES, WAYS


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_first_call(way: str, tmp_path: Path) -> None:
    """Its phases are parts of it, and what is compiled is kept for another process."""
    found = first_call.first_call(MODELS[0], way, OURS, str(tmp_path))
    assert found.keys() == {*PHASES, "cpu", "wall"}
    assert all(found[phase] > 0 for phase in PHASES)
    assert sum(found[phase] for phase in PHASES) < found["cpu"]
    assert len(list(tmp_path.glob("*.popef"))) == 1


def test_a_table_of_two_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are in the order of the models; a party that was not measured has empty cells, and what was kept stays."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{first_call.BEGIN}\nold\n{first_call.END}\n\nafter\n")
    run = {"cpu": 2.04, "wall": 3.0, "capture": 0.5, "building": 0.25, "tracing": 0.25}
    names = [MODELS[0].name, MODELS[3].name]
    monkeypatch.setattr(first_call, "in_processes", lambda model, way, party: {"first": run, "again": run})
    for name, more in zip(reversed(names), (["--alone"], []), strict=True):
        arguments = ["--only", f"^{name}$", "--ways", "training", "--page", str(page), *more]
        monkeypatch.setattr(sys, "argv", ["first_call.py", *arguments])
        first_call.main()
    header, _, *lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert header.count("|") == lines[0].count("|") == len(first_call.HEADER) + 1
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == names
    assert lines[0].endswith("| 0.5 | 0.2 | 0.2 | 1.0 | 2.0 (3.0) | 2.0 (3.0) | 2.0 (3.0) | 2.0 (3.0) |")
    assert lines[1].endswith("| 2.0 (3.0) | 2.0 (3.0) |  |  |")
    kept = json.loads((tmp_path / "page" / "first-calls.json").read_text())
    assert kept[f"{names[0]}, training"].keys() == {OURS, COMPILED}
    page.write_text("nothing to be replaced")
    with pytest.raises(ValueError, match="expected a line"):
        first_call.write(page, kept)
