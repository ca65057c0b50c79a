"""Stochastic rounding to float16 and bfloat16."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.ops.kernels.words import words

_BITS = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float16): 13}
"""Bits of float32's mantissa that a dtype does not have."""

_SMALLEST_NORMAL = 2.0**-14
"""The smallest normal number of float16, whose subnormals are multiples of 2⁻²⁴. bfloat16 has float32's exponents."""


def round_stochastically(x: Any, dtype: Any, seed: Any) -> Any:
    """Round each element up or down, with probabilities proportional to the distance from the other neighbour.

    Random bits are added below the last bit that stays, and the rest is cut off: numbers that `dtype` represents are
    unchanged, and so are infinities and NaN. The neighbour above the largest number is infinity, as if there were one
    more exponent; numbers beyond become infinite.

    Args:
        dtype: float16 or bfloat16.
        seed: uint32 array of two words.
    """
    x = x.astype(jnp.float32)
    drawn = words(seed, x.shape)
    dropped = np.uint32(2 ** _BITS[jnp.dtype(dtype)] - 1)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = lax.bitcast_convert_type((bits + (drawn & dropped)) & ~dropped, jnp.float32)
    if dtype == jnp.float16:
        scaled = jnp.abs(x) * np.float32(2**24)
        lower = jnp.floor(scaled)
        goes_up = (drawn >> 8).astype(jnp.float32) * np.float32(2**-24) < scaled - lower
        subnormal = jnp.copysign((lower + goes_up) * np.float32(2**-24), x)
        rounded = jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, rounded)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)
