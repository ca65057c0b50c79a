"""Test whether a function of arrays is elementwise, so that it does the same to shards as to the whole array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

_ELEMENTWISE = frozenset(
    "add sub mul div rem neg abs sign max min pow integer_pow square sqrt rsqrt cbrt exp exp2 log expm1 log1p logistic "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc erf_inv lgamma digamma floor ceil "
    "round nextafter clamp add_any eq ne lt le gt ge and or xor not is_finite select_n convert_element_type "
    "reduce_precision copy copy_p stop_gradient real imag conj complex".split()
)
"""Elementwise primitives of JAX."""


def non_elementwise_primitives(function: Callable[..., Any], *args: Any) -> list[str]:
    """Primitives that may combine elements, such as sums and matrix products, found by tracing.

    Args:
        args: trees of arrays, or of `jax.ShapeDtypeStruct`.

    Example:
        >>> import jax.numpy as jnp
        >>> non_elementwise_primitives(lambda x: jnp.exp(x) * 2, jnp.ones(3))
        []
        >>> non_elementwise_primitives(lambda x: x / jnp.sum(x), jnp.ones(3))
        ['reduce_sum']
    """
    return sorted(set(_non_elementwise(jax.make_jaxpr(function)(*args).jaxpr)))


def _non_elementwise(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [*jaxprs_in_params(equation.params)]
        if inner:
            for each in inner:
                yield from _non_elementwise(each)
        elif equation.primitive.name not in _ELEMENTWISE and not _keeps_shapes(equation):
            yield equation.primitive.name


def _keeps_shapes(equation: Any) -> bool:
    """Whether all operands are scalars, or a shape op leaves the shape unchanged."""
    shapes = [value.aval.shape for value in equation.invars]
    if equation.primitive.name in ("broadcast_in_dim", "reshape", "squeeze"):
        return all(shape in ((), equation.outvars[0].aval.shape) for shape in shapes)
    return not any(shapes)
