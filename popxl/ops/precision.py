"""What is computed wider than it is stored: float16 in float32, rounded once, to what the op declares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax.numpy as jnp

F = TypeVar("F", bound=Callable[..., Any])


def wide_dtype(*arrays: Any) -> Any:
    """The dtype that sums and updates are computed in: float32, or float64 where that is what there is."""
    return functools.reduce(jnp.promote_types, (array.dtype for array in arrays), jnp.float32)


def widened(t: Any) -> Any:
    """The array; float16 as float32."""
    return t.astype(jnp.float32) if t.dtype == jnp.float16 else t


def rounded_once(function: F) -> F:
    """The function with float16 computed as float32."""

    @functools.wraps(function)
    def widely(*arrays: Any, **attributes: Any) -> Any:
        return function(*map(widened, arrays), **attributes)

    return cast(F, widely)
