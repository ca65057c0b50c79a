"""Sums along rows, in a form that XLA for TPUs makes one number a row of."""

from __future__ import annotations

from jax import lax

from popxl.base.arrays import Array
from popxl.ops.kernels.sums import summed


def softmax_gradient(g: Array, out: Array, axis: int) -> Array:
    """`popxl.ops.kernels.sums.softmax_gradient`, with row sums behind a barrier.

    Without the barrier, where results are bfloat16, XLA has each element sum its row, as a window, and writes down in
    full what that reads: what there is once a row of the softmax, for each element, and the products in float32.
    """
    return out * (g - lax.optimization_barrier(summed(out * g, (axis,), keepdims=True)))
