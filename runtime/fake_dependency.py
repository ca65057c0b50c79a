"""Fake data dependencies, which order operations for XLA.

XLA has no control dependencies for users: it reorders independent operations freely, also across barriers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array

_BITS = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}
"""The integer dtype for each size of a float, in bytes."""


def supports_fake_dependency(value: Array) -> bool:
    """Whether a value's dtype supports fake dependencies."""
    return jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize in (2, 4)


def with_fake_dependency(value: Array, number: Array) -> Array:
    """Add a fake dependency on an integer or boolean; the value stays unchanged.

    A bit that is computed from the number, and always zero, is added. The code generator sees that; XLA does not.
    """
    if jnp.iscomplexobj(value):
        return lax.complex(with_fake_dependency(value.real, number), value.imag)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        some = number.astype(value.dtype)
        return value | (some & ~some)
    bits = _BITS[value.dtype.itemsize]
    some = number.astype(bits)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, bits) | (some & ~some), value.dtype)


def computed_after(value: Array, others: Iterable[Array]) -> Array:
    """Add a fake dependency of `value` on the first elements of `others`, if any."""
    firsts = [other[(0,) * other.ndim] != 0 for other in others if other.size]
    return with_fake_dependency(value, reduce(operator.or_, firsts)) if value.size and firsts else value
