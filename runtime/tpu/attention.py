"""Attention on TPUs: JAX's Pallas kernel, where it supports the arguments.

It keeps blocks of scores in the core's memory, where the plain implementation leaves their placement to XLA. It
supports whole blocks of queries and keys, neither masks nor dropout, and values as wide as keys.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import flash_attention as kernel

from popxl.base.arrays import Array
from popxl.ops.attention import attended_backward_anew
from popxl.ops.attention import attention_forward as plain

# From the module's private side: separate kernels, as for the ops of a gradient.
_forward: Any = kernel._flash_attention
_keys_gradient: Any = kernel._flash_attention_bwd_dkv
_queries_gradient: Any = kernel._flash_attention_bwd_dq

SMALLEST, LARGEST = 128, 512
"""The sizes of blocks: a power of two in between that divides the length."""

MOST_CHANNELS = 256
"""With more channels, blocks would not fit."""


def attention_forward(
    queries: Array, keys: Array, values: Array, mask: Array, seed: Array, **how: Any
) -> tuple[Array, Array]:
    """`popxl.ops.attention.attention_forward`."""
    if not _takes(queries, keys, values, mask, how):
        return plain.plain(queries, keys, values, mask, seed, **how)
    q, k, v = _by_head(queries, keys, values)
    rows, columns = _block(q), _block(k)
    blocks = kernel.BlockSizes(block_q=rows, block_k_major=columns, block_k=columns, block_b=1)
    with _products(q):
        out, total, top = _forward(q, k, v, None, None, True, how["causal"], how["scale"], blocks, False)
    return out.reshape(queries.shape), (top + jnp.log(total)).reshape(queries.shape[:-1])


def attention_backward(
    g: Array,
    queries: Array,
    keys: Array,
    values: Array,
    out: Array,
    logs: Array,
    mask: Array,
    seed: Array,
    *,
    is_part: bool = False,
    **how: Any,
) -> tuple[Array, Array, Array]:
    """`popxl.ops.attention.attention_backward`."""
    if not _takes(queries, keys, values, mask, how):
        return attended_backward_anew(g, queries, keys, values, out, logs, mask, seed, is_part=is_part, **how)
    # The kernels take each of them 128 times, which XLA would materialise as soon as the forward pass has them.
    g, logs = lax.optimization_barrier((g, logs))
    q, k, v = _by_head(queries, keys, values)
    g, out, logs = (t.reshape(*q.shape[:3], *t.shape[queries.ndim - 1 :]) for t in (g, out, logs))
    shift = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), -1)
    rows, columns = _block(q), _block(k)
    known = (q, k, v, None, None, jnp.ones_like(logs), logs, g.astype(q.dtype), shift)
    sizes = {"block_q_major": rows, "block_k_major": columns, "block_k": columns}
    settings = {
        "sm_scale": how["scale"],
        "causal": how["causal"],
        "mask_value": kernel.DEFAULT_MASK_VALUE,
    }
    with _products(q):
        dk, dv = _keys_gradient(*known, **sizes, block_q=rows, **settings, debug=False)
        dq, _ = _queries_gradient(*known, **sizes, **settings, debug=False)
    return dq.reshape(queries.shape), _of_groups(dk, keys), _of_groups(dv, values)


def _takes(queries: Array, keys: Array, values: Array, mask: Array, how: Any) -> bool:
    """Whether the kernel computes this."""
    return (
        mask is None
        and not how["dropout"]
        and queries.dtype in (jnp.float32, jnp.bfloat16)
        and values.shape == keys.shape
        and keys.shape[-1] <= MOST_CHANNELS
        and math.prod(queries.shape) > 0
        and all(t.shape[-2] % SMALLEST == 0 for t in (queries, keys))
    )


def _by_head(queries: Array, *others: Array) -> tuple[Array, ...]:
    """Repeat key heads for query heads, shape (batch, query heads, length, channels)."""
    batch, heads = math.prod(queries.shape[:-3]), math.prod(queries.shape[-3:-2])
    times = heads // math.prod(others[0].shape[-3:-2])
    wide = (t.reshape(batch, heads // times, *t.shape[-2:]) for t in others)
    return queries.reshape(batch, heads, *queries.shape[-2:]), *(jnp.repeat(t, times, axis=1) for t in wide)


def _of_groups(t: Array, like: Array) -> Array:
    """Sum query-head gradients over each key head's group."""
    heads = math.prod(like.shape[-3:-2])
    grouped = t.reshape(t.shape[0], heads, -1, *t.shape[2:])
    return grouped.astype(jnp.float32).sum(2).reshape(like.shape)


def _block(t: Array) -> int:
    return math.gcd(t.shape[-2], LARGEST)


def _products(t: Array) -> AbstractContextManager[None]:
    """Matmul precision: default for bfloat16, whose products are exact; otherwise unchanged."""
    return jax.default_matmul_precision("default") if t.dtype == jnp.bfloat16 else nullcontext()
