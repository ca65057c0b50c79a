"""`ScoreBias`: an attention mask as kernels take it, numbers to add to scores."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from popxl.base.arrays import Array


class ScoreBias(NamedTuple):
    """A bias of attention scores. Kernels of attention know no queries without keys: these are treated around them.

    Attributes:
        values: of shape (batch or 1, heads or 1, queries or 1, keys); `None` without a mask.
        sees: for each query, whether it sees any key, of a shape that broadcasts to that of the queries without their
            channels; `None` without a mask, where all do.
    """

    values: Array | None = None
    sees: Array | None = None

    @classmethod
    def of(cls, mask: Array | None, queries: Array, keys: Array, causal: bool, hidden: float) -> ScoreBias:
        """The bias of a mask of `ops.attention`.

        Args:
            hidden: bias of hidden scores, finite: kernels subtract such scores from each other. No bias is below it.
        """
        if mask is None:
            return cls()
        if mask.dtype == jnp.bool_:
            seen, values = mask, jnp.where(mask, 0, jnp.asarray(hidden, queries.dtype))
        else:
            seen, values = ~jnp.isneginf(mask), jnp.maximum(mask, hidden)
        if causal:
            seen = seen & jnp.tri(queries.shape[-2], keys.shape[-2], dtype=bool)
        shape = (1,) * (max(3, queries.ndim) - mask.ndim) + mask.shape
        if any(size > 1 for size in shape[:-3]):
            shape = (*queries.shape[:-3], *shape[-3:])
        shape = (*shape[:-1], keys.shape[-2])
        return cls(jnp.broadcast_to(values, shape).reshape(-1, *shape[-3:]), jnp.any(seen, -1))

    @staticmethod
    def is_small(count: int, queries: Array, keys: Array, values: Array) -> bool:
        """Whether a bias of `count` numbers is no larger than the operands and the result of attention."""
        return count <= 2 * queries.size + keys.size + values.size

    def hide(self, out: Array, logs: Array) -> tuple[Array, Array]:
        """Results of a kernel, and its log-sum-exp of scores: of queries that see no key, as in `ops.attention`."""
        if self.sees is None:
            return out, logs
        return jnp.where(self.sees[..., None], out, 0), jnp.where(self.sees, logs, jnp.inf)

    def show(self, g: Array, logs: Array) -> tuple[Array, Array]:
        """The inverse for a kernel of gradients: such queries pass none on."""
        if self.sees is None:
            return g, logs
        return jnp.where(self.sees[..., None], g, 0), jnp.where(self.sees, logs, 0)
