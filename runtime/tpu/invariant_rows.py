"""Rows of arrays that turns of a loop read."""

from __future__ import annotations

import jax.numpy as jnp

from popxl.base.arrays import Array
from runtime.fake_dependency import with_fake_dependency


def invariant_row(row: Array, number: Array) -> Array:
    """A loop-invariant row, converted to bfloat16 inside the iteration that reads it.

    Products of float32 in default precision are of bfloat16. XLA rounds what does not change before the loop: the
    weights of all layers, which takes half as much memory again, and time.

    Args:
        row: what a turn reads.
        number: what differs from turn to turn: where the row lies.
    """
    is_factor = row.dtype == jnp.float32 and row.ndim > 1
    return with_fake_dependency(row, number) if is_factor else row
