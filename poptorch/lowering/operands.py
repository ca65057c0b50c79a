"""Shared helpers for lowerings: dtype promotion, axis normalisation, shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import torch

import popxl
from poptorch.base.dtypes import to_device_dtype, to_numpy
from popxl import OpKind, ops
from popxl.context import get_current_context

Number = bool | int | float
Optional = popxl.Tensor | None
"""Optional operand."""

broadcast = OpKind(
    "Expand",
    lambda t, *, shape: jnp.broadcast_to(t, shape),
    key="poptorch.Expand",
    gradient={"t": lambda g: g},  # autodiff sums it, with float16 and bfloat16 in float32
)
"""A tensor in a larger shape, by the rules of broadcasting."""


def promoted(
    *operands: popxl.Tensor | Number | complex, are_bounds: bool = False, of_floats: bool = False
) -> tuple[popxl.Tensor, ...]:
    """Operands as tensors of one dtype, by PyTorch's promotion rules. At least one operand must be a tensor.

    A number counts less than any tensor: only one of a higher category (an integer beside bools, a float beside
    integers) has a say. That a tensor without dimensions counts less, too, shows in the dtype of the result alone,
    which is not decided here.

    Args:
        are_bounds: whether numbers are only compared with: one that does not fit becomes the nearest that does.
        of_floats: whether integers become float32: each separately, as a number may not fit the tensors' dtype.
    """
    tensors = [each for each in operands if isinstance(each, popxl.Tensor)]
    wanted = tensors[0].dtype.as_numpy()
    for t in tensors[1:]:
        if t.dtype is not tensors[0].dtype:
            wanted = jnp.promote_types(wanted, t.dtype.as_numpy())
    for number in operands:
        if not isinstance(number, popxl.Tensor):
            wanted = jnp.result_type(jnp.zeros((), wanted), number) if _counts(number, wanted) else wanted
    if of_floats and not jnp.issubdtype(wanted, jnp.inexact):
        wanted = jnp.float32
    dtype = popxl.dtype.as_dtype(jnp.dtype(wanted))
    if are_bounds and dtype is popxl.int32:
        operands = tuple(_nearest(each) if isinstance(each, int) else each for each in operands)
    return tuple(cast_like(each, dtype) for each in operands)


def _nearest(number: int) -> int:
    """The nearest 32-bit integer."""
    return min(max(number, -(2**31)), 2**31 - 1)


def _counts(number: Number | complex, dtype: Any) -> bool:
    """Whether a number has a higher type category than a dtype."""
    if isinstance(number, complex):
        return not jnp.issubdtype(dtype, jnp.complexfloating)
    if isinstance(number, bool) or jnp.issubdtype(dtype, jnp.inexact):
        return False
    return isinstance(number, float) or dtype == jnp.bool_


def cast_like(operand: popxl.Tensor | Number | complex, dtype: popxl.dtype) -> popxl.Tensor:
    """Convert an operand to a tensor with the given dtype."""
    if isinstance(operand, popxl.Tensor):
        return operand if operand.dtype == dtype else ops.cast(operand, dtype)
    if dtype is popxl.int32 and isinstance(operand, int) and operand != _nearest(operand):
        return constant_of(torch.tensor(operand))
    return popxl.constant(operand, dtype)


def constant_of(numbers: torch.Tensor) -> popxl.Tensor:
    """A constant from a PyTorch tensor, in its device dtype."""
    record = get_current_context().debug_record
    where = f"{record.api} at {record.location}" if record is not None else "The program"
    return popxl.constant(to_numpy(to_device_dtype(numbers, where)))


def axis_of(t: popxl.Tensor, dim: int) -> int:
    """Nonnegative axis number. Scalars count as having one axis."""
    return dim % max(len(t.shape), 1)


def axes_of(t: popxl.Tensor, dim: int | Iterable[int] | None) -> tuple[int, ...]:
    """Nonnegative axis numbers; all axes if unspecified."""
    named = (dim,) if isinstance(dim, int) else tuple(dim or ())
    axes = tuple(range(len(t.shape)))
    return tuple(axis_of(t, d) for d in named if axes) or axes


def at_least_1d(t: popxl.Tensor) -> popxl.Tensor:
    """A tensor with at least one axis; scalars become single-element vectors."""
    return t if t.shape else ops.reshape(t, (1,))
