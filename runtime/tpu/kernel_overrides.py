"""Kernel overrides for TPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import lax

from popxl.base.arrays import Array
from popxl.ops.attention import attention_backward, attention_forward
from popxl.ops.kernels import convolutions
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from popxl.ops.kernels.sums import rounded, softmax_gradient, summed
from popxl.ops.kernels.windows import first_largest, first_largest_gradient
from runtime import memory_spaces
from runtime.tpu import attention as of_attention
from runtime.tpu import convolutions as of_convolutions
from runtime.tpu import windows as of_windows


def _rounded(found: Array, dtype: Any) -> Array:
    """`popxl.ops.kernels.sums.rounded`, behind a barrier.

    Without the barrier, XLA reduces 16-bit numbers: that takes twice the cycles, and is not fused with the ops that
    compute them.
    """
    return found if found.dtype == dtype else lax.optimization_barrier(found).astype(dtype)


def _softmax_gradient(g: Array, out: Array, axis: int) -> Array:
    """`popxl.ops.kernels.sums.softmax_gradient`, with row sums behind a barrier.

    Without the barrier, for bfloat16 results, XLA sums each element's row again, as a window, and materialises its
    operands: the row statistics of the softmax, for each element, and the products in float32.
    """
    return out * (g - lax.optimization_barrier(summed(out * g, (axis,), keepdims=True)))


OVERRIDES: Mapping[Kernel, KernelImpl] = {
    **memory_spaces.OVERRIDES,
    attention_forward: of_attention.attention_forward,
    attention_backward: of_attention.attention_backward,
    first_largest: of_windows.first_largest,
    first_largest_gradient: of_windows.first_largest_gradient,
    convolutions.convolved: convolutions.convolved_halves,
    rounded: _rounded,
    softmax_gradient: _softmax_gradient,
    convolutions.weights_gradient: of_convolutions.weights_gradient,
}
