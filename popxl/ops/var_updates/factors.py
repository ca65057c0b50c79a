"""Factors of updates: plain numbers, which become part of an op, and tensors of one element, read when it runs.

The first three functions check while an op is added, the others compute when it runs.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import jax.numpy as jnp

from popxl.core.recording import not_a_tensor
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError


def factor(value: Any, what: str, optional: bool = False) -> Any:
    """Check a factor argument: number, tensor, or `None` if optional. `what` names it in error messages."""
    if isinstance(value, Tensor) or (optional and value is None):
        return value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"{what} must be a number{', None' if optional else ''} or a Tensor of one element; got {value!r} "
        f"({type(value).__name__})."
    )


def optional_tensor(op: str, **operands: Any) -> None:
    """Check for tensors or `None`; op declarations alone would accept plain values."""
    for name, operand in operands.items():
        if operand is not None and not isinstance(operand, Tensor):
            raise not_a_tensor(op, name, operand)


def one_number(*factors: Any) -> None:
    """Check, in a shape rule, that factors which are tensors have one element."""
    for f in factors:
        if isinstance(f, Tensor) and f.nelms != 1:
            raise PopxlError(f"expected a number or a tensor of one element; `{f.name}` has the shape {f.shape}.")


def number(f: Any, dtype: Any) -> Any:
    """Factor value for computation: a scalar array, plain number, or `None`."""
    return f if f is None or isinstance(f, float) else f.astype(dtype).reshape(())


def product(f: Any, *terms: Any) -> Any:
    """f times the terms; the terms alone if `f` is `None`.

    The plain number 0 takes nothing of them, not even their infinities and NaN.
    """
    if isinstance(f, float) and f == 0:
        return jnp.zeros_like(terms[0])
    return math.prod(terms if f is None else (f, *terms))
