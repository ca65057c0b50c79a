"""Sums in forms that XLA for TPUs compiles to fewer and faster kernels."""

from __future__ import annotations

from typing import Any

from jax import lax

from popxl.base.arrays import Array
from popxl.ops.kernels.sums import summed


def rounded(found: Array, dtype: Any) -> Array:
    """`popxl.ops.kernels.sums.rounded`, behind a barrier.

    Without the barrier, XLA reduces 16-bit numbers: that takes twice the cycles, and is not fused with the ops that
    compute them.
    """
    return found if found.dtype == dtype else lax.optimization_barrier(found).astype(dtype)


def softmax_gradient(g: Array, out: Array, axis: int) -> Array:
    """`popxl.ops.kernels.sums.softmax_gradient`, with row sums behind a barrier.

    Without the barrier, for bfloat16 results, XLA sums each element's row again, as a window, and materialises its
    operands: the row statistics of the softmax, for each element, and the products in float32.
    """
    return out * (g - lax.optimization_barrier(summed(out * g, (axis,), keepdims=True)))
