"""Test for elementwise functions of arrays, which treat shards like whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from popxl.extend.graphs import ELEMENTWISE_PRIMITIVES, leaf_equations


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
    equations = leaf_equations(jax.make_jaxpr(function)(*args).jaxpr)
    others = (each for each in equations if each.primitive.name not in ELEMENTWISE_PRIMITIVES)
    return sorted({each.primitive.name for each in others if not _keeps_shapes(each)})


def _keeps_shapes(equation: Any) -> bool:
    """Whether all operands are scalars, or a shape op leaves the shape unchanged."""
    shapes = [value.aval.shape for value in equation.invars]
    if equation.primitive.name in ("broadcast_in_dim", "reshape", "squeeze"):
        return all(shape in ((), equation.outvars[0].aval.shape) for shape in shapes)
    return not any(shapes)
