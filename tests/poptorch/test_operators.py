"""Every lowering, beside PyTorch: results and gradients, in float32 and float16."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.poptorch.operators import Row, check  # noqa: E402  (they need torch)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # by PyTorch, which computes them otherwise

TOGETHER = 12
"""So many rows are one program: compiling each by itself takes several times as long."""

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "rows").glob("*.py"))
ROWS = {family: import_module(f"tests.poptorch.rows.{family}").ROWS for family in FAMILIES}
PARTS = [
    pytest.param(part, id=f"{family}: {part[0].name} … {part[-1].name}")
    for family, rows in ROWS.items()
    for part in (rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER))
]


@pytest.mark.parametrize("rows", PARTS)
def test_float32(rows: list[Row]) -> None:
    check(*((row, torch.float32) for row in rows))


@pytest.mark.parametrize("rows", PARTS)
def test_float16(rows: list[Row]) -> None:
    if halves := [(row, torch.float16) for row in rows if row.half]:
        check(*halves)
