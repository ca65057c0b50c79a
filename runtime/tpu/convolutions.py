"""Gradients of the weights of small convolutions, on TPUs.

Such a gradient is a convolution whose kernel is an image. XLA unrolls each position of a kernel that fits on the chip,
and a float32 product is six products there. With few channels on both sides, compilation takes minutes, or does not
end. This implementation does not convolve along one axis: the elements under each of its windows are materialised, with
their positions as channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.ops.kernels import convolutions
from popxl.ops.kernels.convolutions import under_places
from popxl.ops.windows import Windows

FEW_CHANNELS, FEW_FILTERS = 8, 32
"""Numbers of channels and filters below which XLA compiles a float32 gradient slowly."""


def weights_gradient(name: str, g: Any, t: Any, shape: Sequence[int], windows: Sequence[Windows], groups: int) -> Any:
    """`popxl.ops.kernels.convolutions.weights_gradient`, without a convolution along the last axis if XLA is slow."""
    filters, depth, *kernel = shape
    is_slow = depth < FEW_CHANNELS and filters < FEW_FILTERS and t.dtype == jnp.float32
    if groups > 1 or len(windows) < 2 or not is_slow:
        return convolutions.weights_gradient.plain(name, g, t, shape, windows, groups)
    *others, last = windows
    batch = len(t)

    under = jnp.stack([_under(t, last, place) for place in range(kernel[-1])])  # [place, N, C, d, ..., positions]
    axes = range(3, under.ndim - 1)
    turned = under.transpose(2, 0, 1, under.ndim - 1, *axes)
    images = turned.reshape(depth * kernel[-1], batch * last.count, *t.shape[2:-1])
    kernels = jnp.moveaxis(g, (1, -1), (0, 2)).reshape(filters, batch * last.count, *g.shape[2:-1])
    over = [under_places(w, k) for w, k in zip(others, kernel, strict=False)]
    gradient = convolutions.convolved.plain(name, images, kernels, over, 1)
    return jnp.moveaxis(gradient.reshape(depth, kernel[-1], filters, *kernel[:-1]), (2, 1), (0, -1))


def _under(t: Any, windows: Windows, place: int) -> Any:
    """Elements under one kernel position along the last axis, for all windows."""
    begin = windows.begin - place * windows.dilation
    end = windows.stride * (windows.count - 1) + 1 - windows.size - begin
    padded = lax.pad(t, jnp.zeros((), t.dtype), [(0, 0, 0)] * (t.ndim - 1) + [(begin, end, 0)])
    return lax.slice_in_dim(padded, 0, None, windows.stride, -1)
