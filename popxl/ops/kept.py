"""Calls that XLA keeps, and what follows from them on CPUs.

Other calls it inlines: it compiles the function anew for each, and makes what is in it part of whatever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

LANES = 8
"""So many numbers fill the vector instructions of most CPUs."""


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls are kept. Those that it makes itself, of functions of JAX among them, are inlined."""

    @wraps(function)
    def body(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # or all calls that are traced inside would be kept
            return function(*arguments)

    compiled = jax.jit(body)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*arguments)

    return call


def quick_on_cpus(quick: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that is computed as `quick` on CPUs, and as `plain` elsewhere.

    JAX differentiates `plain`: of the many operations of `quick` the derivatives would be as many again.
    """

    @jax.custom_jvp
    def call(*arguments: Any) -> Any:
        return lax.platform_dependent(*arguments, cpu=quick, default=plain)

    @call.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return jax.jvp(plain, primals, tangents)

    return call


def computed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays whose results XLA computes once, on CPUs.

    It computes what is made of elements anew for each op that reads it, which is quicker for a few operations, and not
    for many.
    """
    compiled = kept(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return lax.platform_dependent(*arguments, cpu=compiled, default=function)

    return call


def over_images(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """A function that goes over the spatial axes of images, which is computed once, on CPUs.

    There the batch becomes the last axis, if it is long enough to fill vector instructions: what is shifted along a
    spatial axis, or strided, then stays whole.

    Args:
        function: of the number of the first spatial axis, and arrays. Gives an array or several, with the other axes as
            they were.
        axes: how many spatial axes there are. Those of the batch and the channels, if any, come before them.
    """

    def as_they_are(*arrays: Any) -> Any:
        return function(arrays[0].ndim - axes, *arrays)

    def on_cpu(*arrays: Any) -> Any:
        shape = arrays[0].shape
        if len(shape) <= axes or shape[0] < LANES:
            return kept(as_they_are)(*arrays)
        turned = kept(partial(function, len(shape) - axes - 1))(*(jnp.moveaxis(t, 0, -1) for t in arrays))
        return jax.tree.map(lambda t: jnp.moveaxis(t, -1, 0), turned)

    return lambda *arrays: lax.platform_dependent(*arrays, cpu=on_cpu, default=as_they_are)


def once_of_images(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of elements that takes long: of images it is `computed_once`, as convolutions read each several times.

    Of rows, which products of matrices read, it is quicker among what comes before and after it.
    """
    once = computed_once(function)
    return lambda t: once(t) if t.ndim >= 4 else function(t)
