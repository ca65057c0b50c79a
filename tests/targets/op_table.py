"""The table of ops as programs to compile: each row in each dtype, forward, in place, and its gradient.

It is for `python -m tests.targets`, where sessions are for a target. Many rows are one program. If one fails, its rows
are compiled one by one, and those that fail are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from popxl.dtypes import kind_of
from runtime.machine import NothingRuns
from tests.popxl.ops.rows import ROWS
from tests.popxl.ops.rows.schema import FLOATS, Row, Sample
from tests.popxl.ops.test_rows import (
    DIFFERENTIABLE,
    arrays_of,
    check_gradients,
    check_numbers,
    other_gradients,
    telling_gradients,
)

Every = list[tuple[Row, list[Sample]]]

TOGETHER = 16
"""So many rows are one program."""


def in_each_dtype(samples: list[Sample]) -> list[Sample]:
    """The first sample of each dtype that floats have; the first of all, if none has floats."""
    found: dict[str, Sample] = {}
    for sample in samples:
        dtypes = [a.dtype.name for a in arrays_of(sample.operands) if kind_of(a.dtype) == "f"]
        found.setdefault(dtypes[0] if dtypes else "", sample)
    return [found[dtype] for dtype in FLOATS.split() if dtype in found] or samples[:1]


def forward(row: Row) -> list[Sample]:
    return in_each_dtype(row.samples)


def gradient(row: Row) -> list[Sample]:
    return in_each_dtype(telling_gradients(row) + other_gradients(row))


def programs(rows: list[Row]) -> Any:
    """The parameter `batch`: the rows of a program."""
    parts = [rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER)]
    return pytest.mark.parametrize("batch", parts, ids=lambda part: f"{part[0]} to {part[-1]}")


def compile_together(check: Callable[[Every], None], every: Every) -> None:
    """Compile rows as one program; if that fails, each by itself.

    Raises:
        NothingRuns: if all is well: the program would be run.
    """
    try:
        check(every)
    except Exception as problem:
        failed = []
        for one in every:
            try:
                check([one])
            except NothingRuns:
                continue
            except Exception as of_one:
                failed.append(f"{one[0]}: {of_one}")
        raise AssertionError("\n".join(failed) or f"The rows fail together only: {problem}") from None


@pytest.mark.filterwarnings("ignore::popxl.errors.RepeatedSeedWarning")  # of rows that train nothing
@programs(ROWS)
def test_forward(batch: list[Row]) -> None:
    compile_together(check_numbers, [(row, forward(row)) for row in batch])


@programs(DIFFERENTIABLE)
def test_gradient(batch: list[Row]) -> None:
    compile_together(check_gradients, [(row, gradient(row)) for row in batch])
