"""In which order XLA computes what does not depend on each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl.kept import quick_on_cpus

Array = Any

LARGE = 2**14
"""An array of so many elements takes long to copy."""

_BITS = {2: jnp.int16, 4: jnp.int32}
"""Integers of as many bytes as a float has."""


def after(value: Array, earlier: Array | None) -> Array:
    """The same value, computed after another one.

    XLA overwrites an array in place where all that reads it comes before. On CPUs it knows no order but that of what
    depends on each other, and copies weights that are updated, for the gradient that they are multiplied with as well.
    So the new value gets a bit that depends on that gradient, and is zero. What makes machine code of it sees that; XLA
    does not.

    Args:
        value: what an array is overwritten with.
        earlier: what was last computed from the array, if that is known.
    """
    if (
        earlier is None
        or not isinstance(value, jax.core.Tracer)
        or value.size < LARGE
        or not earlier.size
        or not jnp.issubdtype(value.dtype, jnp.floating)
        or value.dtype.itemsize not in _BITS
    ):
        return value
    bits = _BITS[value.dtype.itemsize]

    def on_cpu(value: Array, earlier: Array) -> Array:
        some = (earlier[(0,) * earlier.ndim] != 0).astype(bits)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(value, bits) | (some & ~some), value.dtype)

    return quick_on_cpus(on_cpu, lambda value, earlier: value)(value, earlier)
