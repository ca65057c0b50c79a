"""The order of collectives on CPUs: program order, also between collectives inside and outside of loops.

XLA for CPUs (jaxlib 0.10.2) may run a collective in a loop, a branch or a noinline call concurrently with independent
collectives outside of it. Devices then wait in different collectives, because all have the same number: they deadlock,
or exchange the wrong numbers. So a token, a number that depends on all collectives so far, is passed into such a
computation and out of it, and operands of collectives depend on the token. Within one computation, XLA keeps the order
of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import jax.numpy as jnp

from popxl.base.arrays import Array


def after_token(operand: Array, token: Array) -> Array:
    """Make a collective's operand depend on the token."""
    return jnp.where((token & ~token) == 0, operand, jnp.zeros_like(operand))


def next_token(token: Array | None, results: Iterable[Array]) -> Array:
    """Combine the token, `None` for the first one, with the results of collectives."""
    nonempty = (result for result in results if result.size)
    first = jnp.int32(0) if token is None else token
    return reduce(lambda token, result: token | (result.ravel()[0] != 0).astype(jnp.int32), nonempty, first)
