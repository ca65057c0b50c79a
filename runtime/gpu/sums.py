"""Sums along rows, in a form that XLA compiles to one kernel for GPUs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.ops.kernels import sums
from popxl.ops.kernels.sums import largest

LONGEST = 16384
"""Longest row that fits into a block of threads. Longer rows take several kernels in any form."""

SHORT = 64
"""Longest row that the plain form reads once, too, in kernels that include operations around a softmax: four
transformer blocks of 16 to 64 positions then have 8 kernels fewer; from 96 positions on, 4 more."""


def softmax_gradient(g: Array, out: Array, axis: int) -> Array:
    """`popxl.ops.kernels.sums.softmax_gradient` with a single read of each row.

    If a reduction of a row is combined with the row itself, as in a softmax, XLA keeps the row in a thread block, and
    fuses later operations into that kernel. Here the sum is of products, and is not combined with a factor alone.
    """
    if 0 < out.shape[axis] <= LONGEST:
        out = _clip_by_max(out, axis)
    return sums.softmax_gradient.plain(g, out, axis)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _clip_by_max(t: Array, axis: int) -> Array:
    """The unchanged array, clipped by its rows' maxima."""
    return jnp.minimum(t, largest(t, (axis,), keepdims=True))


@_clip_by_max.defjvp
def _clip_by_max_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _clip_by_max(*primals, axis), tangents[0]


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def exponentials(t: Array, axis: int, may_see_none: bool = False) -> tuple[Array, Array]:
    """`popxl.ops.kernels.sums.exponentials` with a single read of each row."""
    axis %= t.ndim
    if t.shape[axis] <= SHORT:
        return sums.exponentials.plain(t, axis, may_see_none)
    start = jnp.asarray(-math.inf, t.dtype), jnp.zeros((), t.dtype)
    statistics = lax.reduce((t, jnp.ones_like(t)), start, _combined, (axis,))
    top, total = (lax.expand_dims(number, (axis,)) for number in statistics)
    has_none = top == -math.inf
    if may_see_none:
        return jnp.where(has_none, 0, top), jnp.where(has_none, 0, total)
    return top, jnp.where(has_none, math.nan, total)


@exponentials.defjvp
def _exponentials_jvp(axis: int, may_see_none: bool, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda t: sums.exponentials.plain(t, axis, may_see_none), primals, tangents)


def _combined(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Combine two partial softmax statistics: maximum, and sum of exponentials."""
    (a, sum_a), (b, sum_b) = one, other
    top = jnp.maximum(a, b)
    is_none = top == -math.inf
    return top, jnp.where(is_none, sum_a + sum_b, sum_a * jnp.exp(a - top) + sum_b * jnp.exp(b - top))
