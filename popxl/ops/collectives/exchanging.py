"""`CollectiveBackend`: a group whose members exchange arrays, and the operands of each exchange.

The exchanges are defined only here: the runtime carries them out, and `popxl.analysis.communication` lists them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.ops.collectives.collectives import OP_MAP, share, widen_for_sum
from popxl.ops.collectives.group import Group, chunk_size

LANES = 128
"""Row length of accelerator memory layouts. XLA would all-reduce the whole arrays for chunks that are not whole rows.
"""

BLOCK = 32 * LANES
"""Chunk granularity of reduce-scatters. Other chunks would be padded, and sums shifted between members."""

FEW = 8 * LANES
"""Maximum chunk size without padding to blocks: XLA all-reduces such small arrays whole in any case."""

NEIGHBOURS = 8
"""Maximum group size for direct exchanges of half-precision parts. They take no longer than a reduce-scatter in float32
on one node of GPUs or a torus of as many chips; on two nodes of four GPUs, 1.16 times as long, by published figures."""

_TERMS: dict[str, Callable[[Array], Array]] = {
    "add": widen_for_sum,
    "mean": widen_for_sum,
    "square_add": lambda t: jnp.square(widen_for_sum(t)),
}
"""Reductions that are sums, with the function of each term."""


class CollectiveBackend(Group):
    """A group of several members, built on six exchanges."""

    # Exchanges -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def members(self, t: Array) -> Array:
        """All-gather: the members' values of `t` by rank, along a new first dimension."""

    @abstractmethod
    def summed(self, t: Array) -> Array:
        """The sum of `t` over the members."""

    @abstractmethod
    def extreme(self, t: Array, op: Literal["min", "max"]) -> Array:
        """Smallest or largest value of `t` over members; may miss NaN."""

    @abstractmethod
    def scattered(self, rows: Array) -> Array:
        """Reduce-scatter: own rows of the sum of `rows` over members, with equal row counts."""

    @abstractmethod
    def exchanged(self, t: Array) -> Array:
        """All-to-all: blocks addressed to this member, by sender rank; `t` has one block per receiver along its first
        dimension."""

    @abstractmethod
    def shifted(self, t: Array, distance: int) -> Array:
        """Cyclic shift of `t` over members by a distance."""

    # Combinations of exchanges ----------------------------------------------------------------------------------------

    def combined(self, t: Array, op: str) -> Array:
        if op in _TERMS:
            return self._finished(self.summed(_TERMS[op](t)), op)
        if op == "min" or op == "max":
            return self._extreme(t, "min" if op == "min" else "max")
        return OP_MAP[op](list(self.members(t)))

    def combined_chunk(self, t: Array, op: str) -> Array:
        if op not in _TERMS:
            return super().combined_chunk(t, op)
        length = chunk_size(t.size, self.size)
        is_sent_as_half = self._sums_received_halves(t, op, length)
        rows = self.chunks(t if is_sent_as_half else _TERMS[op](t), length)
        if length > FEW:
            rows = jnp.pad(rows, ((0, 0), (0, -length % BLOCK))).reshape(-1, LANES)
        if is_sent_as_half:
            # Behind a barrier: XLA would add where the result is read, and keep all that was received until then. It is
            # the result itself, so that what waits for its first element reads no more than that.
            received = self.exchanged(rows).reshape(self.size, -1, LANES)
            return lax.optimization_barrier(OP_MAP[op](list(received))).reshape(-1)[:length]
        return self._finished(self.scattered(rows).reshape(-1)[:length], op)

    def _sums_received_halves(self, t: Array, op: str, length: int) -> bool:
        """Whether members send each other halves, and sum in float32 what they receive: half the bytes are sent."""
        is_half = jnp.issubdtype(t.dtype, jnp.floating) and t.dtype.itemsize == 2
        return is_half and op in ("add", "mean") and length > FEW and self.size <= NEIGHBOURS

    def _finished(self, total: Array, op: str) -> Array:
        return share(total, self.size) if op == "mean" else total

    def _extreme(self, t: Array, op: Literal["min", "max"]) -> Array:
        """Minimum or maximum over the members, with NaN handled explicitly, which device reductions may drop."""
        t = widen_for_sum(t)
        if not jnp.issubdtype(t.dtype, jnp.floating):
            return self.extreme(t, op)
        unknown, neutral = jnp.isnan(t), jnp.inf if op == "min" else -jnp.inf
        extreme = self.extreme(jnp.where(unknown, jnp.asarray(neutral, t.dtype), t), op)
        any_unknown = self.extreme(unknown.astype(jnp.int32), "max")
        return jnp.where(any_unknown > 0, jnp.asarray(jnp.nan, t.dtype), extreme)
