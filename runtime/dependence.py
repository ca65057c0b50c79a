"""What XLA is to believe that a value depends on.

XLA has no word for "not before": it moves what does not depend on each other as it sees fit, also through barriers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any

_BITS = {2: jnp.int16, 4: jnp.int32}
"""Integers of as many bytes as a float has."""


def can_seem(value: Array) -> bool:
    """Whether there is a form of this value that seems to depend on another one."""
    return jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize in _BITS


def seemingly_of(value: Array, number: Array) -> Array:
    """The same value, of which XLA believes that it depends on an integer, or truth value, as well.

    It gets a bit that is computed of the number, and is zero. What makes machine code sees that; XLA does not.
    """
    bits = _BITS[value.dtype.itemsize]
    some = number.astype(bits)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, bits) | (some & ~some), value.dtype)
