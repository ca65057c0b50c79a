"""Comparisons beyond the table in `rows`."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from tests.popxl.evaluate import evaluate


@pytest.mark.parametrize("compare", [ops.equal, ops.greater])
def test_two_dtypes_are_not_compared(compare) -> None:
    """They may be in a program that is only built; compiling it says no, and where."""
    message = r"at `.*` \(\w+\.py:\d+\), cannot be run: int32 and float32 are not compared; convert one of them"
    with pytest.raises(PopxlError, match=message):
        evaluate(compare, np.int32([1, 2]), np.float32([1, 2]))
    (result,) = evaluate(lambda a, b: compare(ops.cast(a, popxl.float32), b), np.int32([1, 2]), np.float32([1, 1]))
    assert result.dtype == bool
