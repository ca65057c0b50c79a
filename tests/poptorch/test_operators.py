"""Every lowering, beside PyTorch: results and gradients, in float32, float16 and bfloat16.

All rows run in float32; those that only set options of an operator, and five gradients of six, as thorough tests. In
float16, of each family those do that bring an operator which no row before them has: other settings of an operator mean
the same in all dtypes. Three of four are thorough tests. `OPERATORS=all` runs all rows in float16, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402
from runtime.targets.devices import OFFLINE_DEVICE  # noqa: E402
from tests.poptorch.operators import Row, captured, check  # noqa: E402  (they need torch)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # by PyTorch, which computes them otherwise

TOGETHER = 12
"""So many rows are one program: compiling each by itself takes several times as long."""

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "rows").glob("*.py"))
ROWS = {family: import_module(f"tests.poptorch.rows.{family}").ROWS for family in FAMILIES}


def usual(rows: list[Row]) -> list[Row]:
    """The first row of each operator, as its name begins."""
    first = {row.name.split(",")[0].split()[0]: row for row in reversed(rows)}
    return [row for row in rows if row in first.values()]


def thorough(rows: list[Row]) -> list[Row]:
    """The other rows."""
    found = usual(rows)
    return [row for row in rows if row not in found]


def parts(chosen: Callable[[list[Row]], list[Row]]) -> Any:
    """The parameter `rows`: some rows of a family at a time."""
    return pytest.mark.parametrize(
        "rows",
        [
            pytest.param(part, id=f"{family}: {part[0].name} … {part[-1].name}")
            for family, rows in ROWS.items()
            for part in (chosen(rows)[i : i + TOGETHER] for i in range(0, len(chosen(rows)), TOGETHER))
        ],
    )


@parts(usual)
def test_float32(rows: list[Row]) -> None:
    """All results, and gradients of every sixth row."""
    check(*((replace(row, gradient=row.gradient and i % 6 == 0), torch.float32) for i, row in enumerate(rows)))


@pytest.mark.thorough
@parts(usual)
def test_other_gradients_in_float32(rows: list[Row]) -> None:
    if others := [row for i, row in enumerate(rows) if row.gradient and i % 6]:
        check(*((row, torch.float32) for row in others))


@pytest.mark.thorough
@pytest.mark.here
def test_pools_in_the_form_of_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from popxl.ops.kernels import windows
    from runtime.cpu.kernel_overrides import OVERRIDES
    from runtime.tpu import windows as of_tpus

    forms = [Mock(wraps=of_tpus.first_largest), Mock(wraps=of_tpus.first_largest_gradient)]
    for kernel, form in zip((windows.first_largest, windows.first_largest_gradient), forms, strict=True):
        monkeypatch.setitem(cast(dict[Any, Any], OVERRIDES), kernel, form)
    rows = [row for row in ROWS["pooling"] if "max_pool" in row.name and "fractional" not in row.name]
    check(*((row, dtype) for row in rows for dtype in (torch.float32, torch.float16) if row.half))
    assert all(form.called for form in forms)


@pytest.mark.targets
@pytest.mark.here
def test_places_in_pools_compile_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA ends the process over some strided pieces of images."""
    monkeypatch.setenv(OFFLINE_DEVICE, "tpu v5e")
    pool = poptorch.inferenceModel(torch.nn.MaxPool2d(3, 2, 1, return_indices=True))
    pool.compile(torch.ones(9, 2, 7, 6))
    executable: Any = pool._executable
    (text,) = executable.session.hlo().values()
    assert "s32[9,2,4,3]" in text


@pytest.mark.thorough
@parts(thorough)
def test_float32_of_other_rows(rows: list[Row]) -> None:
    check(*((row, torch.float32) for row in rows))


NARROW = ("attention", "elementwise", "linalg", "nn")
"""The families whose lowering asks for float16. In the others, what is wrong in float16 is wrong in float32, too."""


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in (1, 2, 3))])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.thorough] * (family not in NARROW))
        for family, rows in ROWS.items()
        if any(row.half for row in rows)
    ],
)
def test_float16(family: str, part: int) -> None:
    rows = [row for row in ROWS[family] if row.half][part::4]
    check(*((row, torch.float16) for row in (rows if os.environ.get("OPERATORS") == "all" else with_news(rows))))


@pytest.mark.thorough
@pytest.mark.parametrize("family", [family for family, rows in ROWS.items() if any(row.half for row in rows)])
def test_bfloat16(family: str) -> None:
    """As in float16. (PyTorch rounds what it multiplies by a power of ten before it rounds that to decimals.)"""
    rows = [row for row in ROWS[family] if row.half and row.name != "round to decimals"]
    check(*((row, torch.bfloat16) for row in with_news(rows)))


def with_news(rows: list[Row]) -> Iterator[Row]:
    """The rows with an operator, or the gradient of one, that no row before them has."""
    known: set[tuple[str, str, bool]] = set()
    for row in rows:
        operators = {(node.op, node.overload, row.gradient) for node in captured(row)[0].nodes}
        if not operators <= known:
            yield row
        known |= operators
