"""Rows of arrays that iterations of a loop read."""

from __future__ import annotations

import jax.numpy as jnp

from popxl.base.arrays import Array
from runtime.fake_dependency import with_fake_dependency


def invariant_row(row: Array, number: Array) -> Array:
    """A loop-invariant row, converted to bfloat16 inside the iteration that reads it.

    Products of float32 in default precision are of bfloat16. XLA hoists the rounding of loop-invariant arrays: of the
    weights of all layers, which takes half as much memory again, and time.

    Args:
        number: number of the row, which differs by iteration.
    """
    is_factor = row.dtype == jnp.float32 and row.ndim > 1
    return with_fake_dependency(row, number) if is_factor else row
