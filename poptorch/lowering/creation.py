"""Tensors that are made of plain numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

import popxl
from poptorch.dtypes import to_numpy
from poptorch.lowering.emission import emission
from poptorch.lowering.operands import Number, broadcast
from poptorch.lowering.registry import jax_op, lowers

# One number everywhere ------------------------------------------------------------------------------------------------


def filled(value: Number) -> popxl.Tensor:
    """A number, in the shape and dtype that is wanted."""
    (wanted,) = emission().wanted
    t = popxl.constant(value, wanted.dtype)
    return broadcast(t, shape=wanted.shape) if wanted.shape else t


def _constant_fill(value: Number, *names: str) -> None:
    lowers(*(f"aten.{name}" for name in names))(lambda **given: filled(value))


_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_constant_fill(0, "zeros", "zeros_like", "new_zeros", "zero", "zero_", *_EMPTY)
_constant_fill(1, "ones", "ones_like", "new_ones")


@lowers("aten.full", "aten.full_like", "aten.new_full")
def full(fill_value: Number, **shape: Any) -> popxl.Tensor:
    return filled(fill_value)


@lowers("aten.fill", "aten.fill_")
def fill(value: Number | popxl.Tensor, input: popxl.Tensor | None = None) -> popxl.Tensor:
    return value if isinstance(value, popxl.Tensor) else filled(value)


@lowers("aten.scalar_tensor")
def scalar_tensor(s: Number, dtype: popxl.dtype | None = None) -> popxl.Tensor:
    return filled(s)


# Sequences ------------------------------------------------------------------------------------------------------------


def _sequence(name: str) -> None:
    """A function of numbers alone: PyTorch computes it, once, and it is a constant."""

    @lowers(f"aten.{name}")
    def lowering(dtype: popxl.dtype | None = None, **numbers: Any) -> popxl.Tensor:
        (wanted,) = emission().wanted
        t = getattr(torch, name)(**numbers, dtype=getattr(torch, wanted.dtype.name))
        return popxl.constant(to_numpy(t), wanted.dtype)


for _name in ("arange", "linspace", "logspace", "tril_indices", "triu_indices"):
    _sequence(_name)
for _name in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
    _sequence(f"{_name}_window")


@lowers("aten.eye")
def eye(n: int, m: int | None = None, dtype: popxl.dtype | None = None) -> popxl.Tensor:
    (wanted,) = emission().wanted
    return _eye(rows=n, columns=n if m is None else m, dtype=wanted.dtype)


@jax_op(title="Eye", gradient=None)
def _eye(*, rows: int, columns: int, dtype: popxl.dtype) -> Any:
    return jnp.eye(rows, columns, dtype=dtype.as_jax())
