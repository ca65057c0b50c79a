"""Kernel overrides for GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.ops.attention import attended_backward_anew, attention_backward
from popxl.ops.float8 import as_convolved
from popxl.ops.kernels import convolutions, memory, products
from popxl.ops.kernels.elements import full_after, recompute
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from popxl.ops.kernels.sums import exponentials, softmax_gradient
from runtime import memory_spaces
from runtime.fake_dependency import computed_after
from runtime.gpu import sums as of_sums


def _full_after(shape: Sequence[int], value: Any, dtype: Any, after: Array) -> Array:
    """`popxl.ops.kernels.elements.full_after`, for buffers that loops fill: each is initialised when its loop starts.

    XLA schedules the kernel that initialises a constant array first, since it has no dependencies. The buffers of all
    loops would then be live from the start.
    """
    number, _ = lax.optimization_barrier((jnp.asarray(value, dtype), after))
    return jnp.broadcast_to(number, shape)


OVERRIDES: Mapping[Kernel, KernelImpl] = {
    **memory_spaces.OVERRIDES,
    memory.scheduled_together: memory_spaces.available_together,
    memory.prefetched_after: lambda value, other: computed_after(value, [other]),
    attention_backward: attended_backward_anew,
    **products.OF_HALVES,
    convolutions.convolved: convolutions.convolved_halves,
    as_convolved: lambda t: lax.optimization_barrier(as_convolved.plain(t)),
    recompute: lax.optimization_barrier,
    full_after: _full_after,
    exponentials: of_sums.exponentials,
    softmax_gradient: of_sums.softmax_gradient,
}
"""Kernel implementations for GPUs, by kernel: recomputation is scheduled after all gradients of the next layer, because
XLA would postpone those of weights and keep their operands. (On TPUs, such a barrier only prevents fusion of products
with weight updates.) Gathers of weights run at most one layer ahead: XLA would gather those of many layers, and keep
them. Gradients are behind a barrier: otherwise XLA would keep the tanh or erf of each element, in float32, from the
forward pass on. Buffers are written when they are needed. Float8 is decoded before a convolution, because XLA otherwise
hands it to cuDNN, which lacks these formats. Sums along rows have a form that XLA compiles to one kernel."""
