"""Computation in a wider dtype: float16 and bfloat16 in float32, rounded once, to the declared dtype of the op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax.numpy as jnp

F = TypeVar("F", bound=Callable[..., Any])


def wide_dtype(*arrays: Any) -> Any:
    """Accumulation dtype for sums and updates: float32, or float64 for float64 operands."""
    return functools.reduce(jnp.promote_types, (array.dtype for array in arrays), jnp.float32)


def widen(t: Any) -> Any:
    """The array; a half as float32."""
    return t.astype(jnp.float32) if is_half(t) else t


def is_half(t: Any) -> bool:
    """Whether an array is float16 or bfloat16."""
    return t.dtype in (jnp.float16, jnp.bfloat16)


def round_once(function: F) -> F:
    """The function with halves computed as float32."""

    @functools.wraps(function)
    def widely(*arrays: Any, **attributes: Any) -> Any:
        return function(*map(widen, arrays), **attributes)

    return cast(F, widely)
