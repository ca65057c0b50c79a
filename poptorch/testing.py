"""Comparison of model outputs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]


def allclose(expected: Any, actual: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether two results agree within rounding tolerance: `torch.allclose` on nested tuples and lists.

    Args:
        expected, actual: tensors, or tuples or lists of them.
        rtol, atol: tolerances: `|actual - expected| <= atol + rtol * |expected|`.
        equal_nan: whether NaN equals NaN.

    Raises:
        AssertionError: if they differ in type, in length or in shape.

    Example:
        >>> poptorch.testing.allclose([torch.ones(2)], [torch.ones(2) + 1e-9])
        True
    """
    if isinstance(expected, tuple | list):
        assert isinstance(actual, type(expected)) and len(actual) == len(expected), (
            f"allclose: expected a {type(expected).__name__} of {len(expected)}; got {actual!r}."
        )
        return all(allclose(e, a, rtol, atol, equal_nan) for e, a in zip(expected, actual, strict=True))
    assert isinstance(actual, torch.Tensor) and actual.shape == expected.shape, (
        f"allclose: expected a tensor of {list(expected.shape)}; got {actual!r}."
    )
    return torch.allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)
