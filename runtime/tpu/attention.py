"""Attention on TPUs: JAX's Pallas kernels ("splash attention"), where they support the arguments.

They keep blocks of scores in the core's memory, where the plain implementation leaves their placement to XLA. They
support whole blocks of queries and keys, neither masks nor dropout, and values as wide as keys. Blocks that a causal
mask hides are neither fetched nor computed.

The kernels read queries, keys and values with the sequence as last dimension. The last dimension of an array is padded
to 128 elements, so that heads of 64 channels would need twice their memory; and results of products have this order, so
that they need no copies. Within the kernels, transposes take 1 to 3 % more bundles (for blocks of 512, on a v5e).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_blocks

from popxl.base.arrays import Array
from popxl.ops.attention import attended_backward_anew
from popxl.ops.attention import attention_forward as plain

# From the module's private side: separate kernels, as for the ops of a gradient.
_forward: Any = kernel._splash_attention_forward
_keys_gradient: Any = kernel._splash_attention_bwd_dkv
_queries_gradient: Any = kernel._splash_attention_bwd_dq

SMALLEST, MOST_QUERIES, MOST_KEYS = 128, 512, 1024
"""The sizes of blocks: a power of two in between that divides the length.

For 1024 keys, the forward kernel takes 0.77 x the bundles of two blocks of 512, and the kernels of gradients 0.91 x
(64 channels, on a v5e).
"""

LAYOUTS: dict[str, Any] = dict.fromkeys(("q_layout", "k_layout", "v_layout"), kernel.QKVLayout.SEQ_MINOR)

MOST_CHANNELS = 256
"""With more channels, blocks would not fit."""

MOST_BLOCKS = 1 << 16
"""Of more blocks of scores, the kernels compute all: a list of those that a causal mask hides would not fit, either."""


def attention_forward(
    queries: Array, keys: Array, values: Array, mask: Array, seed: Array, **how: Any
) -> tuple[Array, Array]:
    """`popxl.ops.attention.attention_forward`."""
    if not _takes(queries, keys, values, mask, how):
        return plain.plain(queries, keys, values, mask, seed, **how)
    q, k, v = (_by_head(t) for t in (_scaled(queries, how["scale"]), keys, values))
    of_queries, of_keys = _block_sizes(q.shape[1], k.shape[1])
    sizes = kernel.BlockSizes(block_q=of_queries, block_kv=of_keys, **LAYOUTS)
    hidden, function = _hidden_blocks(q.shape[1], k.shape[1], how["causal"], of_keys=False)
    with _products(q):
        out, (logs,) = _forward(
            hidden, q, k, v, None, None, kernel.DEFAULT_MASK_VALUE, False, sizes, None, True, function
        )
    return out.reshape(queries.shape), logs.reshape(queries.shape[:-1])


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
    # The kernels take logs eight times, which XLA could materialise as soon as the forward pass has them.
    g, logs = lax.optimization_barrier((g, logs))
    q, k, v = (_by_head(t) for t in (_scaled(queries, how["scale"]), keys, values))
    g, out = g.reshape(q.shape), out.reshape(q.shape)
    shift = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), -1)
    known = (q, k, v, None, None, logs.reshape(q.shape[:2]), g.astype(q.dtype), shift)
    bq, bkv = _block_sizes(q.shape[1], k.shape[1])

    def settings(of_keys: bool) -> dict[str, Any]:
        hidden, function = _hidden_blocks(q.shape[1], k.shape[1], how["causal"], of_keys=of_keys)
        return {
            "bq": bq,
            "bkv": bkv,
            "is_mqa": False,
            "mask_info": hidden,
            "mask_function": function,
            "mask_value": kernel.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": None,
            **LAYOUTS,
            "interpret": False,
        }

    # One kernel computes the scores once for all gradients, but leaves an array of `dq` for each block of keys.
    is_fused = k.shape[1] == bkv
    with _products(q):
        dq, dk, dv = _keys_gradient(*known, bkv_compute=bkv, use_fused_bwd_kernel=is_fused, **settings(of_keys=True))
        if not is_fused:
            dq = _queries_gradient(*known, **settings(of_keys=False))
    return _scaled(dq, how["scale"]).reshape(queries.shape), dk.reshape(keys.shape), dv.reshape(values.shape)


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


def _by_head(t: Array) -> Array:
    """All heads of all samples in one dimension: consecutive query heads share a key head.

    XLA moves the reshape through this transpose and that of the kernel's layout, and drops both.
    """
    length, channels = t.shape[-2:]
    return t.mT.reshape(-1, channels, length).mT


def _scaled(t: Array, scale: float) -> Array:
    """The kernels do not scale scores. In bfloat16 this rounds once more, unless `scale` is a power of two."""
    return (t.astype(jnp.float32) * scale).astype(t.dtype)


@cache
def _hidden_blocks(queries: int, keys: int, causal: bool, *, of_keys: bool) -> tuple[Any, Any]:
    """Which blocks of scores a causal mask hides, and the mask as a function of positions.

    In units of the smallest block, since the library looks at each element. Within a block the function decides.
    """
    hidden = mask_blocks.MaskInfo(None, None, None, None, None)
    if not causal:
        return hidden, None
    units = masks.CausalMask((queries // SMALLEST, keys // SMALLEST))
    blocks = tuple(size // SMALLEST for size in _block_sizes(queries, keys))
    if math.prod(units.shape) <= MOST_BLOCKS * math.prod(blocks):
        processed = mask_blocks.process_mask_dkv if of_keys else mask_blocks.process_mask
        hidden, _ = processed(masks.MultiHeadMask([units]), blocks)
    return hidden._replace(q_sequence=np.arange(queries, dtype=np.int32)), units.mask_function


def _block_sizes(queries: int, keys: int) -> tuple[int, int]:
    """Numbers of queries and keys in a block of scores."""
    return math.gcd(queries, MOST_QUERIES), math.gcd(keys, MOST_KEYS)


def _products(t: Array) -> AbstractContextManager[None]:
    """Matmul precision: default for bfloat16, whose products are exact; otherwise unchanged."""
    return jax.default_matmul_precision("default") if t.dtype == jnp.bfloat16 else nullcontext()
