"""`a X + b Y`, and the same written to X: the update of plain gradient descent."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import ShardingRule
from popxl.ops.precision import wide_dtype
from popxl.ops.var_updates.factors import factor, number, one_number
from popxl.values.shapes import keeps_parts, meta_shape_of
from popxl.values.spec import TensorSpec


def _spec(X: Any, Y: Any, a: Any = 1.0, b: Any = 1.0) -> TensorSpec:
    keeps_parts(X, Y)
    one_number(a, b)
    return TensorSpec(X.shape, X.dtype, meta_shape_of(X, Y))


def _lowering(X: Any, Y: Any, a: Any = 1.0, b: Any = 1.0) -> Any:
    if X.shape != Y.shape:  # programs that are only built may have such shapes
        raise ValueError(f"`X` and `Y` have the shapes {X.shape} and {Y.shape}; nothing is broadcast")
    whole = all(isinstance(f, float) and f.is_integer() for f in (a, b))
    if whole and jnp.issubdtype(X.dtype, jnp.integer) and X.dtype == Y.dtype:  # exactly
        return _multiple(X, int(a)) + _multiple(Y, int(b))
    dtype = wide_dtype(X)
    return number(a, dtype) * X.astype(dtype) + number(b, dtype) * Y.astype(dtype)


def _multiple(t: Any, n: int) -> Any:
    """n · t for integers, wrapping around as their product does."""
    bits = 8 * t.dtype.itemsize
    return np.asarray(n % 2**bits, f"uint{bits}").astype(t.dtype) * t


_scaled_add = OpKind("ScaledAdd", _lowering, shape=_spec, gradient=None, traits=[ShardingRule(linear=("X Y",))])
_scaled_add_ = _scaled_add.inplace("ScaledAddLhsInplace", "scaled_add__{X}", shape=_spec)


def scaled_add(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """a X + b Y, evaluated in float32 and rounded once. No gradient flows.

    Args:
        X, Y: tensors of one shape (nothing is broadcast); of float dtypes that may differ, or both integers.
            Multiples of integers by whole numbers are exact.
        a, b: numbers, or float tensors of one element.

    Returns:
        A new tensor with the dtype of `X`.

    Raises:
        TypeError: if a factor is neither a number nor a tensor.
        PopxlError: if a factor has several elements; by `Session`, if the shapes of `X` and `Y` differ.

    Example:
        >>> y = ops.scaled_add(x, dx, b=-0.1)
    """
    return _scaled_add(X, Y, factor(a, "scaled_add: `a`"), factor(b, "scaled_add: `b`"))


def scaled_add_(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """`scaled_add`, written over `X`. Returns an alias of `X`.

    Example:
        A step of gradient descent.

        >>> ops.scaled_add_(w, gradient, b=-learning_rate)
    """
    return _scaled_add_(X, Y, factor(a, "scaled_add_: `a`"), factor(b, "scaled_add_: `b`"))
