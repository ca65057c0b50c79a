"""Test helpers: a program of many replicas compared with the same of one, budgets of costs, and lists of dtypes."""

from __future__ import annotations

from popxl import dtypes
from popxl.dtypes import dtype
from runtime.comparison import Comparison, Difference, compare
from runtime.cost_budgets import assert_costs

__all__ = [
    "Comparison",
    "Difference",
    "assert_costs",
    "compare",
    "get_all_dtypes",
    "get_all_int_dtypes",
    "get_all_supported_dtypes",
]


def get_all_int_dtypes(include_signed: bool = True, include_unsigned: bool = True) -> list[dtype]:
    """The integer dtypes, signed ones first, each by increasing size.

    Example:
        >>> get_all_int_dtypes(include_unsigned=False)
        [popxl.dtypes.int8, popxl.dtypes.int16, popxl.dtypes.int32, popxl.dtypes.int64]
    """
    signed = [dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64]
    unsigned = [dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64]
    return signed * include_signed + unsigned * include_unsigned


def get_all_dtypes() -> list[dtype]:
    """The dtypes of PopXL but `bool`: integers, floats, complex numbers. NumPy knows each by its name, but for those of
    8 bits."""
    return [d for d in get_all_supported_dtypes() if d is not dtypes.bfloat16]


def get_all_supported_dtypes() -> list[dtype]:
    """All supported dtypes except `bool`: those of `get_all_dtypes`, plus `bfloat16`."""
    floats = [dtypes.float8_143, dtypes.float8_152, dtypes.float16, dtypes.bfloat16]
    floats += [dtypes.float32, dtypes.float64]
    return get_all_int_dtypes() + floats + [dtypes.complex64, dtypes.complex128]
