"""Calls that XLA keeps, and what follows from them on CPUs.

Other calls it inlines: it compiles the function anew for each, and makes what is in it part of whatever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


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


def once_of_images(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of elements that takes long: of images it is `computed_once`, as convolutions read each several times.

    Of rows, which products of matrices read, it is quicker among what comes before and after it.
    """
    once = computed_once(function)
    return lambda t: once(t) if t.ndim >= 4 else function(t)
