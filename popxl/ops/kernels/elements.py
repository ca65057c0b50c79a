"""Quotients; and functions of elements, of images and of whole arrays, where computing them takes long."""

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
    """What a function makes of arrays, which takes long and is worth to be computed once for all that reads it."""
    return function(*arrays)


@Kernel
def spatial(function: Callable[..., Any], axes: int, *arrays: Any) -> Any:
    """What a function makes of images that goes over their spatial axes. The batch may be any axis but one of these.

    Args:
        function: of the number of the first spatial axis, and arrays. Gives an array or several, with the other axes as
            they were.
        axes: how many spatial axes there are, the last ones. Those of the batch and the channels, if any, come before.
        *arrays: the images.
    """
    return function(arrays[0].ndim - axes, *arrays)


@Kernel
def of_elements(function: Callable[[Any], Any], t: Any) -> Any:
    """What a function of elements makes of an array, if it takes long."""
    return function(t)


@Kernel
def room(shape: Sequence[int], value: Any, dtype: Any, after: Any) -> Any:
    """An array of equal numbers that is to be filled bit by bit, which begins when another array is there."""
    return jnp.full(shape, value, dtype)


@Kernel
def recompute(t: Any) -> Any:
    """What an op was given, for its gradient, which computes again what the op has: nothing of it is worth keeping."""
    return t
