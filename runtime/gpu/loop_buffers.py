"""Arrays that loops fill, on GPUs: each is written when its loop begins.

Of arrays of equal numbers XLA makes one kernel, and as it waits for nothing, it is the first of the program: those of
all loops would be there from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array


def full_after(shape: Sequence[int], value: Any, dtype: Any, after: Array) -> Array:
    """`popxl.ops.kernels.elements.full_after`."""
    number, _ = lax.optimization_barrier((jnp.asarray(value, dtype), after))
    return jnp.broadcast_to(number, shape)
