"""Sums and maxima.

XLA reduces element by element, to keep the order of additions, and recomputes the operand for each reduction of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from runtime.cpu.platform_dependent import LANES, if_platform_cpu

ROWS = range(16, 1025)
"""Maximum number of rows for which a product pays. With more, sequential addition, as in a product, is less exact."""

FEW = 16
"""Numbers of a row that are reduced sequentially. Fewer are hardly faster, and compile more slowly."""


class _Reduction(NamedTuple):
    """A reduction of arrays, and its binary function."""

    plain: Callable[..., Any]
    of_two: Callable[[Any, Any], Any]


_SUM, _MAX = _Reduction(jnp.sum, jnp.add), _Reduction(jnp.max, jnp.maximum)


def reduce_sum(t: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
    """Sum an array along ascending axes, as `jnp.sum`.

    Those along the leading axes, as gradients of biases and scales are, become products with ones. For those of
    images, of which the sums over a few channels are taken, the batch becomes the last axis, as in their convolutions.
    """
    axes = tuple(axes)
    whole = partial(jnp.sum, axis=axes, keepdims=keepdims)
    are_images = t.ndim > 2 and axes == (0, *range(2, t.ndim))
    if are_images and t.shape[1] <= FEW and len(t) >= LANES and t.dtype == jnp.float32:

        def batch_last(t: Any) -> Any:
            sums = _by_halves(_SUM, jnp.moveaxis(t, 0, -1), range(1, t.ndim), keepdims=False)
            return sums.reshape(1, -1, *(1,) * (t.ndim - 2)) if keepdims else sums

        return if_platform_cpu(batch_last, whole)(t)

    rows = math.prod(t.shape[: len(axes)])
    is_leading = axes == tuple(range(len(axes))) and len(axes) < t.ndim
    if not is_leading or rows not in ROWS or t.dtype != jnp.float32:
        return _reduce(_SUM, t, axes, keepdims)

    def by_product(t: Any) -> Any:
        total = lax.dot(jnp.ones(rows, t.dtype), t.reshape(rows, -1), precision=lax.Precision.HIGHEST)
        return total.reshape((1,) * len(axes) * keepdims + t.shape[len(axes) :])

    return if_platform_cpu(by_product, whole)(t)


def reduce_max(t: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
    """Maximum of an array along ascending axes, as `jnp.max`."""
    return _reduce(_MAX, t, tuple(axes), keepdims)


def _reduce(reduction: _Reduction, t: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Reduce an array; trailing axes by halves."""
    columns = math.prod(t.shape[d] for d in axes)
    is_trailing = bool(axes) and axes == tuple(range(t.ndim - len(axes), t.ndim))
    if not is_trailing or columns % 2 or columns <= FEW or t.dtype != jnp.float32:
        return reduction.plain(t, axis=axes, keepdims=keepdims)
    by_halves = partial(_by_halves, reduction, axes=axes, keepdims=keepdims)
    return if_platform_cpu(by_halves, partial(reduction.plain, axis=axes, keepdims=keepdims))(t)


def _by_halves(reduction: _Reduction, t: Any, axes: Sequence[int], keepdims: bool) -> Any:
    """Reduce axes by elementwise combination of halves, which uses vector instructions."""
    columns = math.prod(t.shape[axis] for axis in axes)
    for axis in axes:
        while columns > FEW and t.shape[axis] % 2 == 0:
            t, columns = reduction.of_two(*jnp.split(t, 2, axis)), columns // 2
    return reduction.plain(t, axis=axes, keepdims=keepdims)
