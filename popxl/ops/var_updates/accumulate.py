"""Running sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl.errors import PopxlError
from popxl.op import OpKind
from popxl.shapes import like_first
from popxl.spec import TensorSpec
from popxl.tensor import Tensor


def _same_shape(t: Any, X: Any, f: Any = None) -> TensorSpec:
    if t.shape != X.shape:
        raise PopxlError("`t` and `X` have to have the same shape; nothing is broadcast.")
    return like_first(t)


def _accumulated(t: Any, X: Any, f: Any = None) -> Any:
    if isinstance(f, float | int) and f == 0:
        return t  # whatever X is, NaN too
    if f is None and jnp.issubdtype(t.dtype, jnp.integer):
        return t + X.astype(t.dtype)
    wide = jnp.promote_types(t.dtype, jnp.float32)
    step = X.astype(wide)
    return t.astype(wide) + (step if f is None else jnp.asarray(f, wide).reshape(()) * step)


_accumulate = OpKind(
    "Accumulate", _accumulated, shape=_same_shape, result="accumulate__{t}", modifies=("t",), gradient=None
)


def accumulate_(t: Tensor, X: Tensor, f: float | Tensor | None = None) -> Tensor:
    """Add `f` times `X` to `t`, in place; computed in float32 and rounded once.

    Args:
        t: the accumulator.
        X: what to add: of the shape of `t`; its dtype may differ.
        f: a number, or a tensor of one element; 1 by default.

    Returns:
        An alias of `t`.

    Raises:
        PopxlError: if the shapes differ.

    Example:
        >>> ops.var_updates.accumulate_(gradient_sum, gradient)
    """
    return _accumulate(t, X, f)
