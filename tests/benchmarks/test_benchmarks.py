"""The rows of the performance table run, and their parties compute the same; how fast they are is not tested.

Slow rows are left out: they are others with larger sizes.
"""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.benchmarks import curves, network, run, variants
from tests.benchmarks.harness import OURS, Result, Row, Size, Target, measure, seconds, times


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.thorough] * (file is not network), id=file.__name__)
        for file in run.FILES
        if file.ROWS
    ],
)
def test_rows(file):
    """Those of a file at once, as they share what is compiled. Rows that differ by a size are the same when tiny."""
    for row in {re.sub(r"\d", "", row.name): row for row in file.ROWS if not row.slow}.values():
        result = measure(row, Size.TINY)  # checks on the way that the numbers agree
        assert OURS in result.measures, row.name
        values = [value for values in result.measures.values() for value in values]
        assert all(math.isfinite(value) and value > 0 for value in values), row.name
        assert all(len(line) == len(run.HEADER) for line in result.lines()), row.name
        json.dumps(result.raw())


@pytest.mark.thorough
def test_variants():
    """A line for each, all with the same loss. (Of all variants: tests/popxl_addons/test_addons_gpt.py.)"""
    names = ("plain", "accumulated", "phased")
    lines = variants.table(replace(variants.TINY, layers=1), names).splitlines()[2:]
    found, losses = zip(*(line.split(" | ")[:2] for line in lines), strict=True)
    assert tuple(name.strip() for name in found) == names
    np.testing.assert_allclose([float(loss) for loss in losses], float(losses[0]), rtol=1e-5)


def test_curves(tmp_path):
    """Of two sizes, and a party that was not measured everywhere."""
    measures = {OURS: [1.0, 3.0, 2.0], "JAX": [4.0]}
    rows = [{"row": f"blocks{n}_{what}", "measures": measures} for n in (4, 16) for what in curves.PANELS]
    rows += [{"row": "blocks64_run", "measures": {OURS: [5.0]}}, {"row": "import", "measures": measures}]
    assert curves.curves(rows)["run"] == {OURS: {4: 2.0, 16: 2.0, 64: 5.0}, "JAX": {4: 4.0, 16: 4.0}}
    curves.draw(rows, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "</svg>" in text


def test_names_are_unique():
    names = [row.name for row in run.ROWS]
    assert len(names) == len(set(names))


def result_of(target: Target, ours: list[float], theirs: list[float]) -> Result:
    return Result(Row("row", lambda size: {}, (target,)), {OURS: ours, "JAX": theirs})


def test_only_numbers_of_one_round_are_compared():
    result = result_of(times(1), ours=[1.0, 10.0, 2.0], theirs=[2.0, 20.0, 4.0])
    assert result.quartiles(times(1)) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("limit", "verdict"), [(1.5, "met"), (2.5, "not met"), (None, "")])
def test_verdict(limit, verdict):
    (line,) = result_of(times(limit), ours=[1.0], theirs=[2.0]).lines()
    assert line[-1] == verdict


def test_rivals_that_are_not_there_are_left_out():
    assert result_of(times(1, "torch"), ours=[1.0], theirs=[1.0]).lines() == []


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.0025, "2.5 ms"), (2.5e-6, "2.5 µs"), (-0.5, "-500 ms")])
def test_seconds(value, text):
    assert seconds(value) == text
