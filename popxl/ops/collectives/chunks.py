"""Tensors as collectives see them: flat, in chunks, or with one axis in front; and as bytes, for values only moved."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.values.shapes import one_axis
from popxl.values.spec import brief


def as_bytes(t: Array) -> Array:
    """View float8 as bytes, to prevent conversion and rounding; return other arrays unchanged."""
    return lax.bitcast_convert_type(t, jnp.uint8) if _is_float8(t.dtype) else t


def bitcast(dtype: Any, t: Array) -> Array:
    return lax.bitcast_convert_type(t, dtype) if _is_float8(dtype) else t


def _is_float8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


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
