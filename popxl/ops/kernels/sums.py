"""Sums, maxima and functions of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl.ops.kernels.kernel import Kernel


@Kernel
def summed(t: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
    """The sum of an array along some axes, ascending."""
    return jnp.sum(t, tuple(axes), keepdims=keepdims)


@Kernel
def rounded(found: Any, dtype: Any) -> Any:
    """A reduced array in the dtype of its operand, which may be narrower."""
    return found.astype(dtype)


@Kernel
def largest(t: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
    """The largest element of an array along some axes, ascending."""
    return jnp.max(t, tuple(axes), keepdims=keepdims)


@Kernel
def exponentials(t: Any, axis: int, may_see_none: bool = False) -> tuple[Any, Any]:
    """The statistics of a softmax along an axis: the largest element, and the sum of the exponentials of the
    distances from it. Where rows may have nothing but minus infinity, they have 0 and 0."""
    top = largest(t, (axis,), keepdims=True)
    if may_see_none:
        top = jnp.where(jnp.isneginf(top), 0, top)
    return top, summed(jnp.exp(t - top), (axis,), keepdims=True)


def softmax(t: Any, axis: int) -> Any:
    """`jax.nn.softmax`."""
    if not t.size:
        return jax.nn.softmax(t, axis)
    powers = jnp.exp(t - lax.stop_gradient(largest(t, (axis,), keepdims=True)))
    return powers / summed(powers, (axis,), keepdims=True)


@Kernel
def softmax_gradient(g: Any, out: Any, axis: int) -> Any:
    """Operand gradient of `softmax`, given result and result gradient."""
    return out * (g - summed(out * g, (axis,), keepdims=True))


def log_softmax(t: Any, axis: int) -> Any:
    """`jax.nn.log_softmax`."""
    if not t.size:
        return jax.nn.log_softmax(t, axis)
    t = t - lax.stop_gradient(largest(t, (axis,), keepdims=True))
    return t - jnp.log(summed(jnp.exp(t), (axis,), keepdims=True))
