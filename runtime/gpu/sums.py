"""Sums along rows, in a form that XLA makes one kernel of for GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from popxl.base.arrays import Array
from popxl.ops.kernels.sums import largest
from popxl.ops.kernels.sums import softmax_gradient as plain

LONGEST = 16384
"""Longer rows do not fit into a block of threads, and take several kernels in any form."""


def softmax_gradient(g: Array, out: Array, axis: int) -> Array:
    """`popxl.ops.kernels.sums.softmax_gradient` with a single read of each row.

    XLA keeps a row in a block of threads from where a reduction of it meets the row itself, as in a softmax, and takes
    what follows into that kernel. Here the sum is of products, and meets neither of their factors alone.
    """
    if 0 < out.shape[axis] <= LONGEST:
        out = _clip_by_max(out, axis)
    return plain.plain(g, out, axis)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _clip_by_max(t: Array, axis: int) -> Array:
    """The unchanged array, clipped by its rows' maxima."""
    return jnp.minimum(t, largest(t, (axis,), keepdims=True))


@_clip_by_max.defjvp
def _clip_by_max_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _clip_by_max(*primals, axis), tangents[0]
