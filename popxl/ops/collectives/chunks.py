"""Tensors as collectives see them: flat, in chunks, or with one axis in front; and as bytes, for values only moved."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.values.shapes import one_axis
from popxl.values.spec import brief


def moved(t: Array, move: Callable[[Array], Array]) -> Array:
    """Result of a function that only moves elements. Float8 is moved as bytes, to prevent conversion and rounding."""
    if not jnp.issubdtype(t.dtype, jnp.floating) or t.dtype.itemsize > 1:
        return move(t)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(t, jnp.uint8)), t.dtype)


def normalized_axis(name: str, t: Tensor, axis: int) -> int:
    """Normalize an axis; scalars count as one-dimensional."""
    try:
        return one_axis(axis, max(t.rank, 1))
    except PopxlError as problem:
        raise PopxlError(f"{name}: {problem} Here `t` is {brief(t)}.") from None


def permutations(axis: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Permutation that moves an axis to the front, and its inverse."""
    front = (axis, *(d for d in range(rank) if d != axis))
    return front, tuple(front.index(d) for d in range(rank))
