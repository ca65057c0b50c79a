"""Sums along axes, in the form that is quick where they are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

ROWS = range(16, 1025)
"""So many rows are worth a product, and not so many that adding them up one by one is less exact."""


def summed(t: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
    """The sum of an array along some axes, ascending: `jnp.sum`.

    On CPUs sums along the leading axes, as gradients of biases and scales are, become products with ones. XLA would
    fuse them with what computes their terms, and compute these anew for each sum, column after column.
    """
    axes = tuple(axes)
    rows = math.prod(t.shape[: len(axes)])
    is_leading = axes == tuple(range(len(axes))) and len(axes) < t.ndim
    if not is_leading or rows not in ROWS or t.dtype != jnp.float32:
        return jnp.sum(t, axis=axes, keepdims=keepdims)

    def by_product(t: Any) -> Any:
        total = lax.dot(jnp.ones(rows, t.dtype), t.reshape(rows, -1), precision=lax.Precision.HIGHEST)
        return total.reshape((1,) * len(axes) * keepdims + t.shape[len(axes) :])

    return lax.platform_dependent(t, cpu=by_product, default=partial(jnp.sum, axis=axes, keepdims=keepdims))
