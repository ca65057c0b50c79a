"""Random words, and seeds derived from seeds, from JAX's Threefry generator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
