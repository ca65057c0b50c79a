"""The pages that are made of the code: they say what it is now, and no operator is missing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from poptorch.options import options_page  # noqa: E402  (it needs torch)
from tests.poptorch import operator_table  # noqa: E402

PACKAGE = Path(__file__).parent.parent.parent / "poptorch"


def same(page: str, text: str, command: str) -> None:
    path = PACKAGE / page
    made_by = f"python -m {command} > poptorch/{page}"
    assert path.exists(), f"There is no {path}. Make it: {made_by}"
    assert path.read_text(encoding="utf-8") == text, f"{path} is out of date. Make it again: {made_by}"


@pytest.mark.thorough
def test_operators() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LSTM with projections")  # by PyTorch, which computes them otherwise
        found = operator_table.lines()
    assert operator_table.missing(found) == [], "lowerings without a row in tests/poptorch/rows"
    same("OPERATORS.md", operator_table.table(found), "tests.poptorch.operator_table")


def test_options() -> None:
    same("OPTIONS.md", options_page(), "poptorch options")
