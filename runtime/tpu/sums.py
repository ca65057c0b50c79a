"""Sums along rows, in a form that XLA for TPUs compiles to one number a row."""

from __future__ import annotations

from jax import lax

from popxl.base.arrays import Array
from popxl.ops.kernels.sums import summed


def softmax_gradient(g: Array, out: Array, axis: int) -> Array:
    """`popxl.ops.kernels.sums.softmax_gradient`, with row sums behind a barrier.

    Without the barrier, for bfloat16 results, XLA sums each element's row again, as a window, and materialises its
    operands: the row statistics of the softmax, for each element, and the products in float32.
    """
    return out * (g - lax.optimization_barrier(summed(out * g, (axis,), keepdims=True)))
