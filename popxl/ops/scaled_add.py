"""`a X + b Y`, and the same over X: the update of plain gradient descent."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl.errors import PopxlError
from popxl.op import OpKind
from popxl.shapes import like_first
from popxl.tensor import Tensor


def _lowering(X: Any, Y: Any, a: Any = 1.0, b: Any = 1.0) -> Any:
    if X.shape != Y.shape:  # programs that are only built may say so
        raise PopxlError(f"scaled_add: `X` and `Y` have the shapes {X.shape} and {Y.shape}; nothing is broadcast.")
    plain = isinstance(a, float | int) and isinstance(b, float | int)
    if plain and a == b == 1 and jnp.issubdtype(X.dtype, jnp.integer):
        return X + Y  # exactly
    wide = jnp.promote_types(X.dtype, jnp.float32)
    terms = (_factor(f, wide) * t.astype(wide) for f, t in ((a, X), (b, Y)))
    return sum(terms, start=jnp.zeros((), wide))


def _factor(f: Any, dtype: Any) -> Any:
    return jnp.asarray(f, dtype).reshape(())


_scaled_add = OpKind("ScaledAdd", _lowering, shape=like_first, gradient=None)
_scaled_add_ = _scaled_add.inplace("ScaledAddLhsInplace", "scaled_add__{X}")


def scaled_add(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """a X + b Y, evaluated in float32 and rounded once. No gradient flows.

    Args:
        X, Y: tensors of one shape (nothing is broadcast); of float dtypes that may differ, or both integers.
        a, b: numbers, or tensors of one element.

    Returns:
        A new tensor with the dtype of `X`.

    Example:
        >>> y = ops.scaled_add(x, dx, b=-0.1)
    """
    return _scaled_add(X, Y, a, b)


def scaled_add_(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """`scaled_add`, written over `X`. Returns an alias of `X`.

    Example: a step of gradient descent.
        >>> ops.scaled_add_(weight, gradient, b=-learning_rate)
    """
    return _scaled_add_(X, Y, a, b)
