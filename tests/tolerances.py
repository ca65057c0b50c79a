"""How near numbers have to be."""

from __future__ import annotations

from typing import Any

import numpy as np


def tolerances(expected: Any, tolerance: float) -> dict[str, float]:
    """The relative and the absolute tolerance for numbers that are sums, as `rtol` and `atol`.

    An element near 0 may be a sum of large numbers, whose rounding it has. So what may be missing is measured by the
    largest element, or by 1. In which order numbers are summed depends on the machine, and on what else it does.

    Args:
        expected: the numbers, an array or a tensor.
        tolerance: what may be missing of 1.
    """
    numbers = np.abs(np.asarray(expected))
    largest = float(numbers[np.isfinite(numbers)].max(initial=1))
    return {"rtol": tolerance, "atol": tolerance * largest}


def assert_near(found: Any, expected: Any, tolerance: float, what: Any = "") -> None:
    """Numbers agree within the tolerances of sums.

    Example:
        >>> assert_near([1000.0, 1e-4], [1000.001, 0.0], 1e-5)
    """
    np.testing.assert_allclose(found, expected, **tolerances(expected, tolerance), err_msg=str(what))
