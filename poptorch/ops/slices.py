"""Slices with a dynamic start, given by a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from poptorch.capture.tracer import current
from poptorch.errors import createPoptorchError
from poptorch.ops.declaration import op, tracked_like


@op()
def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Slice of a tensor, with a start read from another tensor.

    Args:
        tensor: the tensor.
        dim: the dimension.
        start: a tensor with one integer.
        size: the length of the slice.
        step: the distance between elements.

    Returns:
        `ceil(size / step)` elements along `dim`: those at start, start + step and so on.

    Raises:
        poptorch.Error: for arguments of other types, a missing `dim`, and a slice longer than the dimension.

    Example:
        >>> poptorch.dynamic_slice(torch.arange(6), 0, torch.tensor(2), 3, 1)
        tensor([2, 3, 4])
    """
    _check_slice("dynamic_slice", {"tensor": tensor}, start, {"dim": dim, "size": size, "step": step})
    if not 0 < size <= tensor.shape[dim] or step < 1:
        raise createPoptorchError(
            f"dynamic_slice: {size} elements with step {step}, of {tensor.shape[dim]} in dimension {dim}. `size` has "
            "to be from 1 to that number, and `step` 1 or more."
        )
    if current() is not None:
        return tensor.narrow(dim, 0, size)[(slice(None),) * (dim % tensor.dim()) + (slice(None, None, step),)].clone()
    places = torch.arange(math.ceil(size / step)) * step + start.reshape(())
    return tensor.index_select(dim, places)


@op()
def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """Copy of a tensor with one slice replaced, at a start read from another tensor.

    Args:
        input: the tensor.
        src: the new slice.
        dim: the dimension.
        start: a tensor with one integer.
        size: the length of the slice.

    Raises:
        poptorch.Error: for arguments of other types, a missing `dim`, and if `src` has another dtype or another shape
            than the slice.

    Example:
        >>> poptorch.dynamic_update(torch.zeros(4), torch.ones(2), 0, torch.tensor(1), 2)
        tensor([0., 1., 1., 0.])
    """
    _check_slice("dynamic_update", {"input": input, "src": src}, start, {"dim": dim, "size": size})
    part = list(input.shape)
    if not 0 < size <= part[dim]:
        raise createPoptorchError(
            f"dynamic_update: {size} elements, of {part[dim]} in dimension {dim}. `size` has to be from 1 to that "
            "number."
        )
    part[dim] = size
    if input.dim() != src.dim():
        raise createPoptorchError(
            f"dynamic_update: input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        )
    if input.dtype is not src.dtype:
        raise createPoptorchError(
            f"dynamic_update: input and src tensor must have same dtype. ({input.dtype} vs {src.dtype})"
        )
    if list(src.shape) != part:
        raise createPoptorchError(
            f"dynamic_update: `src` has the shape {list(src.shape)}; expected that of the part, {part}."
        )
    result = input.clone()
    if current() is not None:
        return tracked_like(result, src)
    result.narrow(dim, int(start), size).copy_(src)
    return result


def _check_slice(name: str, tensors: Mapping[str, Any], start: Any, numbers: Mapping[str, Any]) -> None:
    """Check the arguments of a slice: tensors, the sliced one first, and numbers including `dim`."""
    for argument, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise createPoptorchError(f"{name}: `{argument}` is of type {type(t).__name__}; expected a tensor.")
    if not isinstance(start, torch.Tensor) or start.dtype not in _INTEGERS or start.numel() != 1:
        what = f"{list(start.shape)} of {start.dtype}" if isinstance(start, torch.Tensor) else f"{start!r}"
        raise createPoptorchError(f"{name}: `start` is {what}; expected a tensor with an integer.")
    for argument, number in numbers.items():
        if not isinstance(number, int | numpy.integer) or isinstance(number, bool):
            raise createPoptorchError(
                f"{name}: `{argument}` is {number!r}, a {type(number).__name__}; expected an int. Only `start` may be "
                "a tensor, as shapes are fixed."
            )
    dims = next(iter(tensors.values())).dim()
    if not -dims <= numbers["dim"] < dims:
        raise createPoptorchError(f"{name}: `dim` is {numbers['dim']}, of a tensor with {dims} dimensions.")


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
