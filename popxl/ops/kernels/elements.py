"""Quotients; and expensive functions of elements, of images and of whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from popxl.ops.kernels.kernel import Kernel


@Kernel
def quotient(lhs: Any, rhs: Any) -> Any:
    """lhs / rhs of floats, rounded once."""
    return jnp.true_divide(lhs, rhs)


@Kernel
def materialize(function: Callable[..., Any], *arrays: Any) -> Any:
    """Compute an expensive function once and materialize the result for all consumers."""
    return function(*arrays)


@Kernel
def spatial(function: Callable[..., Any], axes: int, *arrays: Any) -> Any:
    """Apply a function over spatial axes of images. Any other axis may hold the batch.

    Args:
        function: function of the number of the first spatial axis, and arrays. It returns an array or several, with the
            other axes unchanged.
        axes: number of trailing spatial axes. Axes of the batch and the channels, if any, come first.
    """
    return function(arrays[0].ndim - axes, *arrays)


@Kernel
def of_elements(function: Callable[[Any], Any], t: Any) -> Any:
    """Apply an expensive elementwise function."""
    return function(t)


@Kernel
def full_after(shape: Sequence[int], value: Any, dtype: Any, after: Any) -> Any:
    """A constant-filled buffer for incremental updates, allocated after another array."""
    return jnp.full(shape, value, dtype)


@Kernel
def recompute(t: Any) -> Any:
    """An operand saved for a gradient that recomputes the op; prevents sharing of intermediates."""
    return t
