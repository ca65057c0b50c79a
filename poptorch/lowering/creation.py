"""Creation ops: tensors from plain numbers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import popxl
from poptorch.base.dtypes import to_numpy
from poptorch.lowering.emission import wanted
from poptorch.lowering.operands import Number, broadcast, cast_like, constant_of
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops

# Constant fills -------------------------------------------------------------------------------------------------------


def fill_like_node(value: Number | complex) -> popxl.Tensor:
    """Fill a tensor of the expected shape and dtype with a number."""
    spec = wanted()
    t = cast_like(value, spec.dtype)
    return broadcast(t, shape=spec.shape) if spec.shape else t


def _declare_fill(value: Number, *names: str) -> None:
    """Declare ops that fill a tensor with a constant."""
    lowers(*(f"aten.{name}" for name in names))(lambda **given: fill_like_node(value))


_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_declare_fill(0, "zeros", "zeros_like", "new_zeros", "zero_", *_EMPTY)
_declare_fill(1, "ones", "ones_like", "new_ones")


@lowers("aten.full", "aten.full_like", "aten.new_full")
def full(fill_value: Number | complex, **shape: Any) -> popxl.Tensor:
    return fill_like_node(fill_value)


@lowers("aten.fill", "aten.fill_")
def fill(value: Number | popxl.Tensor, input: popxl.Tensor | None = None) -> popxl.Tensor:
    return value if isinstance(value, popxl.Tensor) else fill_like_node(value)


@lowers("aten.scalar_tensor")
def scalar_tensor(s: Number, dtype: popxl.dtype | None = None) -> popxl.Tensor:
    return fill_like_node(s)


# Sequences ------------------------------------------------------------------------------------------------------------


@lowers("aten.arange")
def arange(start: Number = 0, step: Number = 1, **given: Any) -> popxl.Tensor:
    spec = wanted()
    kind = float if spec.dtype.is_floating_point else int
    numbers = kind(start) + kind(step) * np.arange(*spec.shape)
    return cast_like(constant_of(torch.from_numpy(numbers)), spec.dtype)


def _declare_constant(name: str) -> None:
    """Declare an op on plain numbers, whose result PyTorch computes as a constant of the program."""
    function = attrgetter(name.replace("fft_", "fft."))(torch)

    @lowers(f"aten.{name}")
    def lowering(dtype: popxl.dtype | None = None, **numbers: Any) -> popxl.Tensor:
        t = function(**numbers, dtype=getattr(torch, wanted().dtype.name))
        return popxl.constant(to_numpy(t), wanted().dtype)


for _name in ("linspace", "logspace", "tril_indices", "triu_indices", "fft_fftfreq", "fft_rfftfreq"):
    _declare_constant(_name)
for _name in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
    _declare_constant(f"{_name}_window")


def _evenly_spaced(start: Number | popxl.Tensor, end: Number | popxl.Tensor, steps: int) -> popxl.Tensor:
    """`steps` evenly spaced numbers between `start` and `end`, inclusive; at least one endpoint is a tensor."""
    fraction = popxl.constant(np.linspace(0, 1, steps), popxl.float32)
    first, last = (cast_like(each, popxl.float32) for each in (start, end))
    return first * (1 - fraction) + last * fraction


_TENSOR_OVERLOADS = ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")


@lowers(*(f"aten.linspace.{overload}" for overload in _TENSOR_OVERLOADS))
def linspace(
    start: Number | popxl.Tensor, end: Number | popxl.Tensor, steps: int, dtype: popxl.dtype | None = None
) -> popxl.Tensor:
    return _evenly_spaced(start, end, steps)


@lowers(*(f"aten.logspace.{overload}" for overload in _TENSOR_OVERLOADS))
def logspace(
    start: Number | popxl.Tensor,
    end: Number | popxl.Tensor,
    steps: int,
    base: float = 10,
    dtype: popxl.dtype | None = None,
) -> popxl.Tensor:
    exponents = _evenly_spaced(start, end, steps)
    return ops.pow(popxl.constant(base, popxl.float32), exponents)


@lowers("aten.eye")
def eye(n: int, m: int | None = None, dtype: popxl.dtype | None = None) -> popxl.Tensor:
    return _eye(rows=n, columns=n if m is None else m, dtype=wanted().dtype)


@jax_op(title="Eye", gradient=None)
def _eye(*, rows: int, columns: int, dtype: popxl.dtype) -> Any:
    return jnp.eye(rows, columns, dtype=dtype.as_jax())
