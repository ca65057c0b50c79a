"""Random words, and seeds derived from seeds, from JAX's Threefry generator; and Threefry itself, for kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl.ops.kernels.kernel import Kernel


def key_of(seed: Any) -> Any:
    """JAX key of a seed, with a fixed generator independent of JAX settings."""
    return jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")


@Kernel
def words(seed: Any, shape: tuple[int, ...]) -> Any:
    """Random words of 32 bits. JAX knows two ways to count through a sequence; this is the one that shards."""
    with jax.threefry_partitionable(True):
        return jax.random.bits(key_of(seed), shape, jnp.uint32)


@Kernel
def fold_in(seed: Any, number: Any) -> Any:
    """Derive a seed from a seed and a number."""
    return jax.random.key_data(jax.random.fold_in(key_of(seed), number))


_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[Any, Any], counters: tuple[Any, Any], rounds: int = 13) -> tuple[Any, Any]:
    """Two random words for each pair of counters, by Threefry-2x32: arithmetic of 32 bits that any kernel can contain.

    Args:
        key: two words.
        counters: arrays of words, whose shapes broadcast.
        rounds: 13 are the least that pass the tests of BigCrush; JAX's generator has 20.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
    """
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    a, b = (counter + word for counter, word in zip(counters, key, strict=True))
    for i in range(rounds):
        left = np.uint32(_ROTATIONS[i % 8])
        a = a + b
        b = a ^ ((b << left) | (b >> np.uint32(32 - left)))
        if i % 4 == 3:
            turn = i // 4 + 1
            a, b = a + keys[turn % 3], b + keys[(turn + 1) % 3] + np.uint32(turn)
    return a, b
