"""Functions of elements, or along the spatial axes of images, that are computed once for all readers."""

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
    """Division with a single rounding: XLA multiplies by the reciprocal of constant or broadcast divisors.

    Accelerators keep XLA's form: for the exact one, the divisors would have to be in memory.
    """

    def exact(lhs: Any, rhs: Any) -> Any:
        return lhs / lax.optimization_barrier(jnp.broadcast_to(rhs, jnp.broadcast_shapes(lhs.shape, rhs.shape)))

    return lax.platform_dependent(lhs, rhs, cpu=exact, default=jnp.true_divide)


def materialize(function: Callable[..., Any], *arrays: Any) -> Any:
    """Materialize the result: XLA recomputes elementwise expressions for each user, which is slower for long ones."""
    return lax.platform_dependent(*arrays, cpu=noinline(function), default=function)


def spatial(function: Callable[..., Any], axes: int, *arrays: Any) -> Any:
    """Move the batch to the last axis, if it fills vector registers: shifts and strides along spatial axes then keep
    vectors whole."""

    def batch_first(*arrays: Any) -> Any:
        return function(arrays[0].ndim - axes, *arrays)

    def on_cpu(*arrays: Any) -> Any:
        shape = arrays[0].shape
        if len(shape) <= axes or shape[0] < LANES:
            return noinline(batch_first)(*arrays)
        turned = noinline(partial(function, len(shape) - axes - 1))(*(jnp.moveaxis(t, 0, -1) for t in arrays))
        return jax.tree.map(lambda t: jnp.moveaxis(t, -1, 0), turned)

    return lax.platform_dependent(*arrays, cpu=on_cpu, default=batch_first)


def of_elements(function: Callable[[Any], Any], t: Any) -> Any:
    """Materialize elementwise results of images, because convolutions read each element several times; fuse others."""
    return materialize(function, t) if t.ndim >= 4 else function(t)
