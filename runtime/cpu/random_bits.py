"""Random words.

On CPUs, JAX encrypts counters in a loop of five iterations, which is a dozen kernels for each array of words. Its 20
rounds unrolled are one kernel, which takes half the time to compile and half the time to run. They are a noinline call:
otherwise XLA would inline them into each kernel that reads the words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.ops.kernels import words as kernels
from runtime.noinline import noinline

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def random_bits(seed: Any, shape: tuple[int, ...]) -> Any:
    """Random 32-bit words, if 32 bits count them."""
    plain = partial(kernels.words.plain, shape=shape)
    if math.prod(shape) >= 2**32:
        return plain(seed)
    return lax.platform_dependent(seed, cpu=_random_bits(shape), default=plain)


def fold_in(seed: Any, number: Any) -> Any:
    """Fold a number into a seed."""
    return lax.platform_dependent(seed, jnp.asarray(number), cpu=_fold_in, default=kernels.fold_in.plain)


@cache  # so that it is traced once for all draws of this shape
def _random_bits(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    @noinline
    def unrolled(seed: Any) -> Any:
        low = lax.iota(jnp.uint32, math.prod(shape))
        first, second = _threefry(seed, jnp.zeros_like(low), low)
        return (first ^ second).reshape(shape)

    return unrolled


@noinline
def _fold_in(seed: Any, number: Any) -> Any:
    return jnp.stack(_threefry(seed, jnp.uint32(0), number.astype(jnp.uint32)))


def _threefry(seed: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Encrypt two-word counters by Threefry-2x32 with 20 rounds."""
    first, second = seed.astype(jnp.uint32)
    keys = (first, second, first ^ second ^ PARITY)
    x, y = high + keys[0], low + keys[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            x = x + y
            y = (y << np.uint32(bits) | y >> np.uint32(32 - bits)) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y
