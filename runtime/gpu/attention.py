"""Attention by cuDNN's kernels, on NVIDIA GPUs of this machine.

cuDNN makes the kernels, and decides on their workspace, where it is: programs that are compiled for absent GPUs compute
attention in blocks of plain JAX (docs/targets.md). Scores stay within the kernels, which read and write no more than
operands and results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from popxl.base.arrays import Array
from popxl.ops.attention import attended_backward_anew
from popxl.ops.attention import attention_backward as of_backward
from popxl.ops.attention import attention_forward as of_forward
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from runtime import jax_private

OLDEST = 90000
"""Version of cuDNN: 9.0."""

MOST_CHANNELS = 128

SHORTEST = 64
"""Queries and keys of a text: with fewer there is little to gain, and cuDNN has no kernels for one."""


def overrides(device: jax.Device) -> Mapping[Kernel, KernelImpl]:
    """Kernels of attention for a local GPU: none without cuDNN, or for GPUs older than those of the Ampere generation,
    whose units for products have no bfloat16."""
    generation = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    if not generation.isdecimal() or int(generation) < 8 or jax_private.cudnn_version() < OLDEST:
        return {}
    return {of_forward: attention_forward, of_backward: attention_backward}


def _is_supported(queries: Array, keys: Array, values: Array, mask: Any, dropout: float) -> bool:
    """Whether cuDNN has kernels for these operands. Masks and dropout, whose seed is an operand, have none here."""
    channels = queries.shape[-1]
    return (
        mask is None
        and not dropout
        and queries.dtype in (jnp.bfloat16, jnp.float16)
        and values.shape[-1] == channels
        and channels % 8 == 0
        and channels <= MOST_CHANNELS
        and min(queries.shape[-2], keys.shape[-2]) >= SHORTEST
        and 0 not in (*queries.shape, *keys.shape)
    )


def attention_forward(
    queries: Array, keys: Array, values: Array, mask: Any, seed: Any, *, causal: bool, scale: float, dropout: float
) -> tuple[Array, Array]:
    """`popxl.ops.attention.attention_forward`."""
    if not _is_supported(queries, keys, values, mask, dropout):
        how = {"causal": causal, "scale": scale, "dropout": dropout}
        return of_forward.plain(queries, keys, values, mask, seed, **how)
    forward = _per_batch(partial(jax_private.cudnn_attention, causal=causal, scale=scale))
    out, logs = forward(*map(_of_four, (queries, keys, values)))
    return out.reshape(queries.shape), logs.reshape(queries.shape[:-1])


def attention_backward(
    g: Array,
    queries: Array,
    keys: Array,
    values: Array,
    out: Array,
    logs: Array,
    mask: Any,
    seed: Any,
    *,
    is_part: bool = False,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[Array, Array, Array]:
    """`popxl.ops.attention.attention_backward`. Results over more keys, with their sums, make it a part."""
    if not _is_supported(queries, keys, values, mask, dropout):
        how = {"causal": causal, "scale": scale, "dropout": dropout}
        return attended_backward_anew(g, queries, keys, values, out, logs, mask, seed, is_part=is_part, **how)
    backward = _per_batch(partial(jax_private.cudnn_attention_gradients, causal=causal, scale=scale))
    given = map(_of_four, (g.astype(queries.dtype), queries, keys, values, out.astype(queries.dtype)))
    dq, dk, dv = backward(*given, logs.reshape(_of_four(queries).shape[:-1]))
    return dq.reshape(queries.shape), dk.reshape(keys.shape), dv.reshape(values.shape)


def _of_four(t: Array) -> Array:
    """An operand of shape (batch, heads, length, channels)."""
    heads = t.shape[-3] if t.ndim > 2 else 1
    return t.reshape(math.prod(t.shape[:-3]), heads, *t.shape[-2:])


def _per_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays with a batch, also within `jax.vmap`, as replicas on one device are: of a larger batch.

    JAX's rule for its primitives is part of what divides them among devices, which replicas' ops are already.
    """
    batched = custom_vmap(function)

    @batched.def_vmap
    def of_several(size: int, is_batched: list[bool], *operands: Array) -> tuple[Any, Any]:
        whole = (
            t if known else jnp.broadcast_to(t, (size, *t.shape)) for t, known in zip(operands, is_batched, strict=True)
        )
        results = batched(*(t.reshape(-1, *t.shape[2:]) for t in whole))
        return tuple(t.reshape(size, -1, *t.shape[1:]) for t in results), (True,) * len(results)

    return batched
