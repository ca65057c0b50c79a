"""Lists of dtypes, for tests that go through all of them."""

from __future__ import annotations

from popxl import dtypes
from popxl.dtypes import dtype

__all__ = ["get_all_dtypes", "get_all_int_dtypes"]


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
    """All dtypes but `bool`: integers, floats, complex numbers."""
    floats = [dtypes.float8_143, dtypes.float8_152, dtypes.float16, dtypes.bfloat16]
    floats += [dtypes.float32, dtypes.float64]
    return get_all_int_dtypes() + floats + [dtypes.complex64, dtypes.complex128]
