"""Device dtypes, and conversion between torch tensors and arrays.

64-bit numbers are narrowed on the way to the device. Results keep their device type: results that are int64 in torch
are int32. Arrays of bfloat16 have the type of `ml_dtypes`, as NumPy has none.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

import popxl
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError
from popxl.fp8_utils import as_array

_DEVICE_DTYPES = {
    dtype: dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int8, torch.uint8)
} | {
    torch.bool: torch.bool,
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex64,
}


def device_dtype(dtype: torch.dtype) -> torch.dtype:
    """Device dtype corresponding to a torch dtype.

    Returns:
        int32 for int64, float32 for float64, complex64 for complex128, else the same type.

    Raises:
        Error: for a type without a counterpart there, such as complex32.

    Example:
        >>> device_dtype(torch.int64)
        torch.int32
    """
    try:
        return _DEVICE_DTYPES[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DEVICE_DTYPES)
        raise createPoptorchError(
            f"Unsupported dtype {dtype}: tensors of a wrapped model can be {known}. Convert it with `tensor.to(...)`."
        ) from None


def to_device_dtype(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Convert a model's int64 constants to 32 bits, as on the device; return other tensors unchanged.

    The largest and the smallest int64 represent infinity: they become those of int32. Numbers that fit in unsigned 32
    bits keep their bits, which hash functions need, with a warning.

    Args:
        what: name of the tensor, to begin a sentence.

    Raises:
        Error: for any other number that does not fit.

    Example:
        >>> to_device_dtype(torch.tensor([7, torch.iinfo(torch.int64).max]), "The buffer limits")
        tensor([         7, 2147483647], dtype=torch.int32)
    """
    narrow, wide = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
    if tensor.dtype is not torch.int64 or not ((tensor < narrow.min) | (tensor > narrow.max)).any():
        return tensor
    tensor = torch.where(tensor <= -wide.max, narrow.min, torch.where(tensor == wide.max, narrow.max, tensor))
    smallest, largest = map(int, tensor.aminmax())
    if smallest < narrow.min or largest >= 2**32:
        number = smallest if smallest < narrow.min else largest
        raise createPoptorchError(
            f"{what} has the number {number}, which does not fit in int32, which int64 is on the device. Use a smaller "
            "one; for one that is larger than all others, `torch.iinfo(torch.int64).max`."
        )
    if largest > narrow.max:
        _warn_of_bits(what, largest)
    return tensor.to(torch.int32)


@cache
def _warn_of_bits(what: str, number: int) -> None:
    """Warn once about a number whose value changes on the device."""
    logger.warning(
        "%s has the number %d, which does not fit in int32, which int64 is on the device. It keeps its 32 bits, so it "
        "is %d there.",
        what,
        number,
        number - 2**32,
    )


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to an array in its device dtype, sharing memory unless conversion is necessary.

    Integers that do not fit in 32 bits wrap around; see `to_device_dtype`.

    Raises:
        Error: if its dtype has no counterpart on the device.

    Example:
        >>> to_numpy(torch.tensor([1, 2])).dtype
        dtype('int32')
    """
    wanted = _DEVICE_DTYPES.get(tensor.dtype) or device_dtype(tensor.dtype)
    tensor = tensor if tensor.dtype is wanted else tensor.detach().to(wanted)
    return as_array(tensor.resolve_conj().resolve_neg())  # which PyTorch may have put off, and NumPy does not know


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Convert a device array to a tensor, sharing memory.

    Example:
        >>> from_numpy(to_numpy(torch.ones(2, dtype=torch.bfloat16))).dtype
        torch.bfloat16
    """
    if array.dtype == popxl.bfloat16.as_numpy():
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
