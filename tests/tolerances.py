"""How near numbers have to be."""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDINGS = 16
"""How many roundings of the sum of all magnitudes a sum of up to a thousand terms may miss: in whatever order they are
summed, most roundings cancel."""


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


def assert_sums_near(found: Any, expected: Any, magnitudes: Any, what: Any = "") -> None:
    """Sums in float32 or float64 agree, but for rounding: it is that of what is summed, not of what comes out.

    Args:
        found: sums, an array or a tensor. Its dtype says how far apart numbers are.
        expected: the same.
        magnitudes: the sums of the absolute values of the same terms: of a product of matrices, `abs(a) @ abs(b)`.
        what: names them, if they do not agree.

    Example:
        >>> terms = np.float32([1e4, -1e4, 0.1])
        >>> assert_sums_near(terms.sum(), 0.1, np.abs(terms).sum())
    """
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, what
    largest = np.maximum(np.abs(np.asarray(magnitudes, np.float64)), np.abs(expected))  # of a largest element, no sum
    allowed = ROUNDINGS * np.finfo(found.dtype).eps * largest
    missing = np.abs(found.astype(np.float64) - expected)
    far = missing > allowed
    assert not far.any(), (
        f"{far.sum()} of {far.size} sums are too far from what is expected: of {expected[far][:3]} "
        f"{missing[far][:3]} are missing, where {allowed[far][:3]} may be. {what}"
    )
