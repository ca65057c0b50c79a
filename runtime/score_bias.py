"""`ScoreBias`: an attention mask as kernels take it, numbers to add to scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from popxl.base.arrays import Array


class ScoreBias(NamedTuple):
    """A bias of attention scores, for kernels that know no queries without keys: their values are set around them.

    Attributes:
        values: of shape (batch or 1, heads or 1, queries or 1, keys); `None` without a mask.
        sees: for each query, whether it sees any key, of a shape that broadcasts to that of the queries without their
            channels; `None` without a mask, where all do.
        far_keys: for each query that sees far keys alone, their number; 0 for others. `None` where there are none.
        distant: bias of far keys, whose scores are lost beside it.
    """

    values: Array | None = None
    sees: Array | None = None
    far_keys: Array | None = None
    distant: float = 0.0

    @classmethod
    def of(
        cls, mask: Array | None, queries: Array, keys: Array, causal: bool, hidden: float, each_query: bool = False
    ) -> ScoreBias:
        """Bias for a mask of `ops.attention`.

        Args:
            hidden: bias of hidden scores, finite, because kernels subtract such scores from each other. Half of it is
                the least for others, such as the least number of a dtype: keys that are hidden only if there are more.
            each_query: whether the bias has numbers for each query, also if they are the same.
        """
        if mask is None:
            return cls()
        mask = mask.reshape((1,) * (queries.ndim - mask.ndim) + mask.shape)
        is_flag, far = mask.dtype == jnp.bool_, hidden / 2
        seen = mask if is_flag else ~jnp.isneginf(mask)
        values = jnp.zeros_like(mask, queries.dtype) if is_flag else jnp.maximum(mask, far)
        whole = jnp.broadcast_to(jnp.where(seen, values, hidden), _unfolded_shape(mask, queries, keys, each_query))
        whole = whole.reshape(-1, *whole.shape[-3:])
        seen = jnp.broadcast_to(seen, (*seen.shape[:-1], keys.shape[-2]))
        if causal:
            seen = seen & jnp.tri(queries.shape[-2], keys.shape[-2], dtype=bool)
        sees = jnp.any(seen, -1)
        if is_flag or far > _LOSES_SCORES:
            return cls(whole, sees)
        is_far = ~jnp.any(seen & (values > far), -1)
        return cls(whole, sees, jnp.where(is_far, jnp.sum(seen, -1), 0), far)

    @property
    def operands(self) -> tuple[Array, ...]:
        """The values as operands of a kernel: none without a mask."""
        return () if self.values is None else (self.values,)

    @staticmethod
    def is_small(mask: Array, queries: Array, keys: Array, values: Array, each_query: bool = False) -> bool:
        """Whether a mask's bias is no larger than operands and result of attention."""
        numbers = math.prod(_unfolded_shape(mask, queries, keys, each_query))
        return numbers <= 2 * queries.size + keys.size + values.size

    def fill_results(self, out: Array, logs: Array) -> tuple[Array, Array]:
        """Results of a kernel, and its log-sum-exp of scores, with those of queries without keys: 0 and infinity."""
        if self.sees is None:
            return out, logs
        return jnp.where(self.sees[..., None], out, 0), jnp.where(self.sees, logs, jnp.inf)

    def clear_gradients(self, g: Array, logs: Array) -> tuple[Array, Array]:
        """Gradients of results, and log-sum-exp of scores, as a kernel takes them: 0 for queries without keys.

        Beside far scores, the logarithm of their number is lost, and a kernel takes the weight of each for 1.
        """
        if self.sees is None:
            return g, logs
        g, logs = jnp.where(self.sees[..., None], g, 0), jnp.where(self.sees, logs, 0)
        if self.far_keys is None:
            return g, logs
        is_far, share = self.far_keys > 0, 1 / jnp.maximum(self.far_keys, 1)
        return (g * share[..., None]).astype(g.dtype), jnp.where(is_far, self.distant, logs)


_LOSES_SCORES = -(2.0**32)
"""Beside a number below it, scores are lost in float32. Float16 has none."""


def _unfolded_shape(mask: Array, queries: Array, keys: Array, each_query: bool) -> tuple[int, ...]:
    """Shape of a bias with all dimensions of the batch, or none: (..., heads or 1, queries or 1, keys)."""
    shape = (1,) * (max(3, queries.ndim) - mask.ndim) + mask.shape
    batch = queries.shape[:-3] if any(size > 1 for size in shape[:-3]) else shape[:-3]
    return *batch, shape[-3], queries.shape[-2] if each_query else shape[-2], keys.shape[-2]
