"""Integers of 64 bits, by the table in `rows`. Programs that have some are compiled differently: JAX has to be told."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops
from tests.popxl.evaluate import evaluate
from tests.popxl.ops.rows import ROWS
from tests.popxl.ops.rows.random import RANDOM
from tests.popxl.ops.rows.schema import Array, Sample, distinct
from tests.popxl.ops.test_rows import arrays_of, assert_close, flat, meant, nested

WIDE = {np.dtype(np.int32): np.dtype(np.int64), np.dtype(np.uint32): np.dtype(np.uint64)}


def widen(array: Array) -> Array:
    """The same numbers in 64 bits, but for the limits, which become those of 64 bits."""
    narrow, wide = np.iinfo(array.dtype), np.iinfo(WIDE[array.dtype])
    result = array.astype(wide.dtype)
    result[array == narrow.max] = wide.max
    result[array == narrow.min] = wide.min
    return result


def samples() -> list[tuple[Any, Sample]]:
    """The samples of integers, for the ops that change nothing in place. Seeds are of 32 bits."""
    found = []
    for row in ROWS:
        for sample in distinct(row.samples) if not (row.build or row.overwrites or row in RANDOM) else []:
            arrays = arrays_of(sample.operands)
            if arrays and sample.expect is None and all(a.dtype in WIDE for a in arrays):
                operands = nested(lambda *operands, **attributes: list(operands), sample, tuple(map(widen, arrays)))
                found.append((row, Sample(tuple(operands), sample.attributes, None, sample.dtype)))
    return found


def test_numbers() -> None:
    """Of all ops, in one program."""
    cases = samples()

    def build() -> list[popxl.Tensor]:
        results: list[popxl.Tensor] = []
        for row, sample in cases:
            tensors = tuple(popxl.variable(a, downcast=False) for a in arrays_of(sample.operands))
            results += flat(nested(row.op, sample, tensors))
        return results

    results = iter(evaluate(build))
    for row, sample in cases:
        for expected in meant(row, sample):
            assert_close(next(results), expected, row.tolerance, (row, sample))
    assert next(results, None) is None
    assert len({row.name for row, _ in cases}) > 30


def test_numbers_do_not_depend_on_what_else_is_in_the_program() -> None:
    """Means of integers wrap at 32 bits, with a tensor of 64 bits beside them or without."""
    numbers, unsigned = np.full(5, 2**30, np.int32), np.full(3, 2**31, np.uint32)

    def build(beside: bool) -> list[popxl.Tensor]:
        results = [ops.mean(popxl.variable(numbers)), ops.mean(popxl.variable(unsigned))]
        return results + [ops.identity(popxl.variable(np.int64(1), downcast=False))] * beside

    for beside in (False, True):
        results = evaluate(lambda: build(beside))  # noqa: B023  # called at once
        assert [r.item() for r in results[:2]] == [2**30 // 5, 2**31 // 3]
