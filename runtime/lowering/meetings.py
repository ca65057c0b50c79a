"""In which order devices of a CPU meet: in that of the ops, also where some are in loops and others around them.

XLA for CPUs (jaxlib 0.10.2) may begin a collective in a loop, a branch or a kept call, and others around it, at once,
where these do not depend on each other. Devices meet in different ones then, as all have the same number: they wait for
ever, or exchange the wrong numbers. So what is said after a loop depends on what was exchanged in it, and what is said
in it on what was exchanged before.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax.numpy as jnp

Array = Any


class Meetings:
    """The meetings of one computation.

    Args:
        met: depends on all meetings before it; `None` if there are none.
    """

    def __init__(self, met: Array | None = None) -> None:
        self._before = met
        self._results: list[Array] = []

    def said(self, operand: Array) -> Array:
        """What is exchanged, after all meetings before this computation."""
        if self._before is None:
            return operand
        return jnp.where((self._before & ~self._before) == 0, operand, jnp.zeros_like(operand))

    def note(self, result: Array) -> None:
        """Note what was exchanged."""
        if result.size:
            self._results.append(result)

    def met(self) -> Array:
        """A number that depends on all meetings so far."""
        begun = jnp.int32(0) if self._before is None else self._before
        return reduce(lambda met, result: met | (result.ravel()[0] != 0).astype(jnp.int32), self._results, begun)
