"""Every lowering, beside PyTorch: results and gradients, in float32 and float16."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.poptorch.operators import Row, check  # noqa: E402  (they need torch)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # by PyTorch, which computes them otherwise

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "rows").glob("*.py"))
ROWS = [(family, row) for family in FAMILIES for row in import_module(f"tests.poptorch.rows.{family}").ROWS]


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{family}: {row.name}") for family, row in ROWS])
def test_float32(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{family}: {row.name}") for family, row in ROWS if row.half])
def test_float16(row: Row) -> None:
    check(row, torch.float16)
