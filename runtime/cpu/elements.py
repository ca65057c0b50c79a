"""What is computed element by element, or along the spatial axes of images, once for all that reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from runtime.cpu.platform_dependent import LANES
from runtime.noinline import noinline


def quotient(lhs: Any, rhs: Any) -> Any:
    """A quotient that is rounded once: XLA multiplies by the inverse of what is a constant or broadcast.

    On accelerators it does: the divisors would have to be in memory.
    """

    def exact(lhs: Any, rhs: Any) -> Any:
        return lhs / lax.optimization_barrier(jnp.broadcast_to(rhs, jnp.broadcast_shapes(lhs.shape, rhs.shape)))

    return lax.platform_dependent(lhs, rhs, cpu=exact, default=jnp.true_divide)


def materialize(function: Callable[..., Any], *arrays: Any) -> Any:
    """XLA computes what is made of elements anew for each op that reads it, which is quicker for a few operations, and
    not for many."""
    return lax.platform_dependent(*arrays, cpu=noinline(function), default=function)


def spatial(function: Callable[..., Any], axes: int, *arrays: Any) -> Any:
    """The batch becomes the last axis, if it is long enough to fill vector instructions: what is shifted along a
    spatial axis, or strided, then stays whole."""

    def as_they_are(*arrays: Any) -> Any:
        return function(arrays[0].ndim - axes, *arrays)

    def on_cpu(*arrays: Any) -> Any:
        shape = arrays[0].shape
        if len(shape) <= axes or shape[0] < LANES:
            return noinline(as_they_are)(*arrays)
        turned = noinline(partial(function, len(shape) - axes - 1))(*(jnp.moveaxis(t, 0, -1) for t in arrays))
        return jax.tree.map(lambda t: jnp.moveaxis(t, -1, 0), turned)

    return lax.platform_dependent(*arrays, cpu=on_cpu, default=as_they_are)


def of_elements(function: Callable[[Any], Any], t: Any) -> Any:
    """Of images it is computed once, as convolutions read each element several times. Of rows, which products of
    matrices read, it is quicker among what comes before and after it."""
    return materialize(function, t) if t.ndim >= 4 else function(t)
