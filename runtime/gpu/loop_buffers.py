"""Buffers that loops fill, on GPUs: each is initialised when its loop starts.

XLA schedules the kernel that initialises a constant array first, since it has no dependencies. The buffers of all loops
would then be live from the start.
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
