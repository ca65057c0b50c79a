"""Validation of optimisers' arguments, before any op is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import popxl
from popxl.dtypes import check_dtype
from popxl.extend.arguments import number


def check_floating(dtype: Any, what: str) -> popxl.dtype:
    """Check an update dtype. Raises `ValueError` for integer and complex types."""
    check_dtype(dtype, what)
    if not dtype.is_floating_point:
        raise ValueError(
            f"{what} is {dtype.name}; expected a floating point type, as a step changes numbers by parts of them."
        )
    return dtype


def numbers(optimizer: str, **values: Any) -> dict[str, float]:
    """Check named hyperparameters. Raises `TypeError` for non-numbers."""
    return {name: float(number(value, f"{optimizer}: `{name}`")) for name, value in values.items()}


def weight_decays(optimizer: str, weight_decay: Any, decays: Any) -> Callable[[str], float]:
    """Weight decay by variable name."""
    decay = numbers(optimizer, weight_decay=weight_decay)["weight_decay"]
    if not callable(decays):
        raise TypeError(
            f'{optimizer}: `decays` must be a function of a variable\'s name, such as `lambda name: "norm" not in '
            f"name`; got {decays!r} ({type(decays).__name__})."
        )
    return lambda name: decay if decays(name) else 0.0
