"""Tests, compiled for a machine that is not here, as far as their first run; and the page of what came of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runtime.machine import NothingRuns
from tests.popxl.ops.rows import ROWS
from tests.targets import __main__ as command
from tests.targets import op_table, plugin


@pytest.mark.targets
def test_tests_go_as_far_as_their_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.AREAS, "smoke", ["tests/test_a_smoke.py"])  # type: ignore[misc]
    result = command.tested("smoke", "tpu v5e", "", thorough=False)
    assert result["failed"] == {}
    assert result["tests"] > result["reached"] == result["programs"] > 3


@pytest.mark.thorough
def test_a_process_that_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no compiler, or XLA has ended it."""
    monkeypatch.setitem(command.AREAS, "none", ["tests/there_is_no_such_file.py"])  # type: ignore[misc]
    result = command.tested("none", "tpu v9", "", thorough=False)
    assert result["programs"] == 0 and "The process ended (" in result["failed"]["none"]


def test_programs_are_compiled_as_users_have_them() -> None:
    """Not as quickly as for other tests."""
    marks: list[str] = []
    config = SimpleNamespace(getoption={"target": "tpu v5e"}.get)
    tests = [SimpleNamespace(get_closest_marker=lambda name: None, add_marker=marks.append) for _ in range(2)]
    plugin.pytest_collection_modifyitems(config, tests)  # type: ignore[arg-type]
    assert len(tests) == 2 and marks == ["compiled_whole"] * 2


def test_rows_of_a_program_that_fails_are_told() -> None:
    every = [(row, op_table.forward(row)) for row in ROWS[:5]]

    def check(rows: Any) -> None:
        if {row.name for row, _ in rows} & {ROWS[1].name, ROWS[3].name}:
            raise ValueError("no tiles")
        raise NothingRuns

    with pytest.raises(AssertionError, match=f"^{ROWS[1].name}: no tiles\n{ROWS[3].name}: no tiles$"):
        op_table.compile_together(check, every)
    with pytest.raises(NothingRuns):
        op_table.compile_together(check, every[::2])


def test_the_table_of_ops_is_in_all_dtypes() -> None:
    dtypes = {sample.operands[0].dtype.name for row in ROWS if row.name == "add" for sample in op_table.forward(row)}
    assert dtypes == {"float32", "float16", "bfloat16"}
    assert all(map(op_table.forward, ROWS)) and all(map(op_table.gradient, op_table.DIFFERENTIABLE))


def test_the_page() -> None:
    how = {"part": "1/9", "thorough": False, "day": "2031-02-03"}
    good = {"programs": 7, "tests": 9, "reached": 6, "failed": {}, "seconds": 3.2} | how
    bad = good | {"failed": {"a": "ValueError: at 0x7f00 %add.3 | no", "b": "ValueError: at 0x8f11 %add.4 | no"}}
    whole = good | {"part": "", "thorough": True}
    text = command.page({("ops", "tpu v5e"): good, ("ops", "gpu h100"): bad, ("loops", "tpu v5e"): whole})
    of_ops = "7 programs of 9 tests (part 1/9; 2031-02-03)"
    assert f"| ops | {of_ops} | {of_ops.replace(' (', ', **2 failed** (')} |" in text
    assert "| loops | 7 programs of 9 tests (all, thorough; 2031-02-03) | – |" in text
    assert "Not compiled for tpu v5e: op-tests, collectives, variables" in text
    assert "Not compiled for gpu h100: op-tests, collectives, variables, conditionals, loops" in text
    assert "What failed for gpu h100:\n\n| tests | |\n|---|---|\n| 2 | ValueError: at … … \\| no |\n" in text
