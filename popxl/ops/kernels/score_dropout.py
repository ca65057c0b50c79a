"""Dropout of attention weights: random numbers of queries and keys by a seed and their places.

Each pair of a query and a key has a number of its own, whatever the blocks in which attention is computed. So a kernel
draws the numbers of a block in the core's memory, and its gradient draws them again in blocks of another size.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.ops.kernels.words import threefry

GROUP = 32
"""Number of consecutive keys of which each takes the same number of a quadruple; the next as many take the next one."""


def quadruples(seed: Any, rows: Any, places: Any) -> tuple[Any, Any, Any, Any]:
    """Four random numbers of 16 bits for each row and place, in words.

    Args:
        seed: two words.
        rows: numbers of queries, counted through all heads.
        places: numbers of keys, `GROUP` of each 4 x `GROUP`.
    """
    key = seed[0].astype(jnp.uint32), seed[1].astype(jnp.uint32)
    first, second = threefry(key, (rows.astype(jnp.uint32), places.astype(jnp.uint32)))
    low, bits = np.uint32(0xFFFF), np.uint32(16)
    return first & low, first >> bits, second & low, second >> bits


def is_kept(numbers: Any, probability: float) -> Any:
    """Whether weights with these numbers are kept."""
    return numbers >= np.uint32(min(round(probability * 2**16), 2**16 - 1))


def kept_weights(seed: Any, rows: Any, keys: Any, probability: float) -> Any:
    """Whether the weights of keys are kept, for numbers of queries and keys whose shapes broadcast."""
    group, place = jnp.divmod(keys.astype(jnp.uint32), np.uint32(GROUP))
    chunk, part = jnp.divmod(group, np.uint32(4))
    numbers = quadruples(seed, rows, chunk * np.uint32(GROUP) + place)
    return is_kept(jnp.select([part == np.uint32(i) for i in range(3)], numbers[:3], numbers[3]), probability)
