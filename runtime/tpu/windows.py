"""Windows of images on TPUs: XLA has kernels that slide over them, and slices images with strides slowly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.ops.pooling import largest_of
from popxl.ops.precision import widen
from popxl.ops.windows import Windows

BEHIND_ALL = np.int32(2**31 - 1)
"""Position after all others: neutral for the first position."""


def first_largest(function: Callable[[Any], Any], windows: Sequence[Windows], t: Any) -> tuple[Any, Any]:
    """Window maxima by one kernel, positions by another, which XLA eliminates without users."""
    if not _is_supported(windows):
        return function(t)
    sizes = t.shape[-len(windows) :]
    places = jnp.broadcast_to(jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(sizes), t.shape)
    neutral = (np.asarray(largest_of(t.dtype).neutral, t.dtype), BEHIND_ALL)
    return _window_max(t, windows), _reduce_windows((t, places), neutral, _first_of_two, windows)[1]


def first_largest_gradient(function: Callable[[Any, Any], Any], windows: Sequence[Windows], g: Any, t: Any) -> Any:
    """Max-pool gradient by XLA's kernel; undefined positions for windows with NaN."""
    if not _is_supported(windows):
        return function(g, t)
    batch = (1,) * (2 - t.ndim + len(windows))  # XLA requires two axes besides those of the windows
    images, gradients = (widen(x).reshape(*batch, *x.shape) for x in (t, g))
    _, gradient = jax.vjp(lambda images: _window_max(images, windows), images)
    return gradient(gradients)[0].reshape(t.shape).astype(g.dtype)


def _is_supported(windows: Sequence[Windows]) -> bool:
    """Whether XLA's kernels support these windows, forward and backward."""
    return all(along.dilation == 1 for along in windows)


def _window_max(t: Any, windows: Sequence[Windows]) -> Any:
    combining = largest_of(t.dtype)
    return _reduce_windows(t, np.asarray(combining.neutral, t.dtype), combining.of_two, windows)


def _first_of_two(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The larger of two numbers with its position: first of equal ones, NaN over numbers, the last NaN."""
    (a, at), (b, there) = one, other
    is_nan, is_other_nan = a != a, b != b
    takes_other = (b > a) | ((a == b) & (there < at)) | (is_other_nan & (~is_nan | (there > at)))
    return jnp.where(takes_other, b, a), jnp.where(takes_other, there, at)


def _reduce_windows(operands: Any, neutral: Any, of_two: Callable[..., Any], windows: Sequence[Windows]) -> Any:
    """Reduce windows of the last axes."""
    others = (1,) * (jax.tree.leaves(operands)[0].ndim - len(windows))
    reach, stride = (*others, *(w.reach for w in windows)), (*others, *(w.stride for w in windows))
    edges = [(0, 0)] * len(others) + [(w.begin, w.end) for w in windows]
    return lax.reduce_window(operands, neutral, of_two, reach, stride, edges)
