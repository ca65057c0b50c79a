"""Lowerings of poptorch's own ops."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.operands import axis_of, promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops


@lowers(
    "poptorch.nop",
    "poptorch.return_all",
    "poptorch.set_available_memory",
    "poptorch.set_overlap_for_input",
    "poptorch.set_overlap_for_output",
)
def identity(tensor: popxl.Tensor, available_memory_proportion: float = 0) -> popxl.Tensor:
    return ops.identity(tensor)


@lowers("poptorch.ipu_print_tensor")
def ipu_print_tensor(tensor: popxl.Tensor, separator: str, **how: Any) -> popxl.Tensor:
    title = how.pop("title") or None
    # popxl separates elements by one character, followed by a space
    return ops.print_tensor(tensor, title, separator=separator.strip() or " ", **how)


@lowers("poptorch.serializedMatMul")
def serialized_matmul(lhs: popxl.Tensor, rhs: popxl.Tensor, **how: Any) -> popxl.Tensor:
    lhs, rhs = promoted(lhs, rhs)
    return ops.matmul(lhs, rhs)


@lowers("poptorch.dynamic_slice")
def dynamic_slice(tensor: popxl.Tensor, dim: int, start: popxl.Tensor, size: int, step: int) -> popxl.Tensor:
    return _strided(tensor, start, axis=axis_of(tensor, dim), count=math.ceil(size / step), step=step)


@jax_op(title="DynamicStridedSlice")
def _strided(t: Any, start: Any, *, axis: int, count: int, step: int) -> Any:
    places = start.reshape(()) + step * jnp.arange(count)
    return jnp.take(t, places, axis, mode="clip")


@lowers("poptorch.dynamic_update")
def dynamic_update(input: popxl.Tensor, src: popxl.Tensor, dim: int, start: popxl.Tensor, size: int) -> popxl.Tensor:
    return _updated(input, src, start, axis=axis_of(input, dim))


@jax_op(title="DynamicSliceUpdate")
def _updated(t: Any, part: Any, start: Any, *, axis: int) -> Any:
    return lax.dynamic_update_slice_in_dim(t, part, start.reshape(()), axis)
