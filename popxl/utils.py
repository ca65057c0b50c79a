"""`to_numpy`, the conversion of host data in all functions that take them; and small helpers that programs import."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from popxl import dtypes
from popxl.dtypes import torch_imported as torch_imported
from popxl.fp8_utils import as_array, to_host
from popxl.fp8_utils import host_pow2scale_cast_to_fp8 as host_pow2scale_cast_to_fp8

HW_DEVICE_CONNECTION_TIMEOUT = 10_000
"""Seconds to wait for a device that is in use."""

downcast_np_dtypes: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
}


def to_numpy(
    x: Any,
    dtype: dtypes.dtype | None = None,
    downcast: bool = True,
    copy: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> NDArray[Any]:
    """Convert host data to a C-contiguous array, as every function that accepts host data does.

    Args:
        x: a scalar, nested sequence, NumPy, JAX or torch array. A `np.memmap` is returned unchanged if not `copy`; a
            conversion, which would detach it from its file, is refused.
        dtype: the type of the result, to which values are cast without a word about those that do not fit. For a
            float8 type `x` must be a wider float, or hold float8 already. If `None`, NumPy infers it.
        downcast: whether 64-bit integers and floats are narrowed to 32 bits where `dtype` is `None`.
        copy: if false, share memory with `x` where nothing needs to be converted.
        log2_scale: exponent of the scale for float8: `2**log2_scale`, applied before rounding (default 0).
        nan_on_overflow: whether overflow of float8 becomes NaN (default) or the largest number.

    Returns:
        The array. It is of dtype `object` where NumPy has no better idea, and for data without elements whose type
        cannot be known; looking up the popxl dtype of such an array fails.

    Raises:
        TypeError: if float8 is asked for and `x` is neither a wider float nor of the same float8 type; or a real type
            other than bool, and `x` is complex.
        ValueError: for `None`, if nested sequences are ragged, or a memory-mapped array would have to be converted.
        RuntimeError: if `log2_scale` or `nan_on_overflow` is given without a float8 `dtype`.

    Example:
        >>> to_numpy([1, 2.5])
        array([1. , 2.5], dtype=float32)
        >>> to_numpy(1.7, popxl.int32)
        array(1, dtype=int32)
    """
    scaled = log2_scale is not None or nan_on_overflow is not None
    # The usual case in session.run, with nothing to convert, which keeps a run cheap.
    as_is = dtype is None and not copy and not scaled
    if as_is and type(x) is np.ndarray and x.flags.c_contiguous and not (downcast and x.dtype in downcast_np_dtypes):
        return x

    if x is None:  # to NumPy it would be NaN, and false
        raise ValueError("to_numpy: the data is None; expected a number, a sequence of numbers or an array.")
    if not isinstance(dtype, dtypes.dtype | None):
        raise TypeError(
            f"to_numpy: `dtype` is {dtype!r}. Expected a popxl.dtype such as popxl.float32, or None; "
            "popxl.dtype.as_dtype finds the one that belongs to a NumPy or torch type."
        )
    if scaled and not (dtype is not None and dtype.is_float8):
        raise RuntimeError(
            f"to_numpy: `log2_scale` is {log2_scale} and `nan_on_overflow` is {nan_on_overflow}, but `dtype` is "
            f"{dtype!r}. Expected None for both, or popxl.float8_143 or popxl.float8_152 for `dtype`."
        )
    if isinstance(x, np.memmap) and not copy:
        _check_memmap(x, dtype)
        return x

    try:
        array = as_array(x)
    except ValueError as problem:  # rows of several lengths
        raise ValueError(f"to_numpy: the data is no array of numbers: {x!r:.100}. NumPy says: {problem}") from None
    if dtype is None:
        is_unknown = array.size == 0 and not hasattr(x, "dtype")  # NumPy would invent float64 for an empty list
        inferred = downcast_np_dtypes.get(array.dtype, array.dtype) if downcast else array.dtype
        target = np.dtype(object) if is_unknown else inferred
    elif dtype.is_float8:
        return _to_float8(array, dtype, log2_scale or 0, nan_on_overflow is None or nan_on_overflow, copy)
    else:
        target = dtype.as_numpy()
        _check_numbers(array, dtype)
    # Infer first and cast then: given a dtype, NumPy would refuse Python integers that do not fit.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(target, order="C", copy=copy)


def _to_float8(
    array: NDArray[Any], dtype: dtypes.dtype, log2_scale: int, nan_on_overflow: bool, copy: bool
) -> NDArray[Any]:
    """Cast wider floats to a float8 dtype with a scale; arrays that hold it already stay as they are."""
    if array.dtype == dtype.as_jax():
        array = to_host(array, dtype)
    if array.dtype.name in ("float16", "bfloat16", "float32", "float64"):
        return host_pow2scale_cast_to_fp8(array, dtype, log2_scale, nan_on_overflow)
    if array.dtype != dtype.as_numpy():
        raise TypeError(
            f"to_numpy: `dtype` is {dtype!r}, but the data is of dtype {array.dtype}. Expected data of a "
            "wider float, or of the structured dtype of this float8. Write 1.0 instead of 1 for whole numbers."
        )
    return array.astype(dtype.as_numpy(), order="C", copy=copy)


def _check_numbers(array: NDArray[Any], dtype: dtypes.dtype) -> None:
    """Raise `TypeError` for what NumPy would cast: text, `None` (to NaN), and complex numbers for a real dtype."""
    if array.dtype.kind == "c" and not (dtype.is_complex or dtype is dtypes.bool):
        raise TypeError(
            f"to_numpy: the data is complex, and `dtype` is {dtype!r}, which has no imaginary part. Expected a "
            "complex dtype, or real data such as `x.real`."
        )
    if array.dtype.kind in "OSU":
        for value in array.flat:
            if not isinstance(value, Number | np.generic) or isinstance(value, str | bytes):
                raise TypeError(f"to_numpy: the data holds {value!r} ({type(value).__name__}); expected numbers.")


def narrowed(array: NDArray[Any], target: np.dtype[Any], what: str) -> NDArray[Any]:
    """Narrow a wide array to a smaller dtype of the same kind, if every number fits.

    Floats are rounded, and infinities remain infinite.

    Args:
        what: name of the array, at the beginning of the error message.

    Raises:
        ValueError: if a finite number would become infinite, or an integer another one; the message has the first such
            number and its position.

    Example:
        >>> narrowed(np.array([1.0, 2.5]), np.dtype(np.float32), "The rates").dtype
        dtype('float32')
    """
    of_floats = dtypes.kind_of(target) == "f"
    try:
        with np.errstate(over="raise", under="ignore", invalid="ignore"):  # which costs less than to look at the result
            result = array.astype(target, order="C")
        if target.kind == "f" or (not of_floats and not (result != array).any()):
            return result
    except FloatingPointError:
        with np.errstate(over="ignore", invalid="ignore"):
            result = array.astype(target)
    lost = np.isinf(result) & np.isfinite(array) if of_floats else result != array
    if not lost.any():  # bfloat16 does not tell NumPy that a number was too large
        return result
    place = tuple(np.argwhere(lost)[0].tolist())
    at = f", at {list(place)}," if place else ""
    raise ValueError(
        f"{what}: {array[place]}{at} does not fit {target}, where it is {result[place]}. Use numbers that fit, or a "
        "wider dtype."
    )


def _check_memmap(array: np.memmap[Any, Any], dtype: dtypes.dtype | None) -> None:
    # The array is used in place: a converted copy would be cut off from the file.
    start = "When passing a memory-mapped NumPy array,"
    if dtype is not None and dtype.as_numpy() != array.dtype:
        raise ValueError(
            f"{start} the `dtype` parameter must be None or match the array, because no copy is made. "
            f"Here `dtype` is {dtype!r} and the array's is {array.dtype}: leave out `dtype`, or convert the file."
        )
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(
            f"{start} it must already be in C-ordered, aligned memory, because no copy is made. This one, of shape "
            f"{array.shape}, has strides {array.strides}: store the file in C order, or pass np.array(x)."
        )
    if array.dtype in downcast_np_dtypes:
        raise ValueError(
            f"{start} the dtype {dtype} is not supported, as it requires downcasting, and no copy is made. The array's "
            f"is {array.dtype}: store the file as {downcast_np_dtypes[array.dtype]}, or pass np.array(x)."
        )


def table_to_string(rows: Iterable[Sequence[Any]], delimiter: str = " | ", header: bool = True) -> str:
    """Format rows of cells as text, each column as wide as its widest cell.

    Args:
        rows: the rows; cells are formatted by `str`.
        delimiter: text between two cells.
        header: whether to draw a line below the first row, if there are more.

    Example:
        >>> table_to_string([["op", "n"], ["add", 12]]).splitlines()
        ['op  | n ', '---------', 'add | 12']
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = [delimiter.join(map(str.ljust, row, widths)) + "\n" for row in cells]
    if header and len(lines) > 1:
        lines.insert(1, "-" * len(lines[0]) + "\n")
    return "".join(lines)
