"""Attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import popxl
from poptorch.lowering.emission import emission
from poptorch.lowering.linalg import linear
from poptorch.lowering.nn import masked_softmax, softmax
from poptorch.lowering.operands import broadcast, together
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.values.shapes import broadcast_shapes

Optional = popxl.Tensor | None


def _transposed(t: popxl.Tensor) -> popxl.Tensor:
    """A tensor with its last two dimensions exchanged."""
    axes = tuple(range(len(t.shape)))
    return ops.transpose(t, (*axes[:-2], axes[-1], axes[-2]))


def _dropped(t: popxl.Tensor, p: float) -> popxl.Tensor:
    return ops.dropout(t, emission().seed(), p) if p else t


@lowers("torch.scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: popxl.Tensor,
    key: popxl.Tensor,
    value: popxl.Tensor,
    attn_mask: Optional = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> popxl.Tensor:
    given = [query, key, value]
    own = 3 if enable_gqa else 2  # dimensions that are not those of the batch; each head of keys may serve several
    batch = broadcast_shapes(*(t.shape[:-own] for t in given))
    query, key, value = (t if t.shape[:-own] == batch else broadcast(t, shape=(*batch, *t.shape[-own:])) for t in given)
    seed = emission().seed() if dropout_p else None
    return ops.attention(query, key, value, attn_mask, is_causal, scale, dropout_p, seed)


# Several heads --------------------------------------------------------------------------------------------------------


def _heads(t: popxl.Tensor, count: int) -> popxl.Tensor:
    """`[time, batch, features]` as `[batch, heads, time, features of a head]`."""
    length, batch, width = t.shape
    return ops.transpose(ops.reshape(t, (length, batch, count, width // count)), (1, 2, 0, 3))


def _appended(t: popxl.Tensor, row: popxl.Tensor, axis: int) -> popxl.Tensor:
    shape = (*t.shape[:axis], 1, *t.shape[axis + 1 :])
    return ops.concat([t, broadcast(together(row, t.dtype), shape=shape)], axis)


def _thirds(t: Optional) -> Sequence[Optional]:
    """The rows of a weight, or a bias, that are for query, key and value."""
    return (None, None, None) if t is None else ops.split(t, 3, 0)


@jax_op(title="Pad", gradient=None)
def _wider(mask: Any, *, by: int) -> Any:
    """A mask with columns more, in which nothing is masked; bools say what is left out."""
    return jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, by)])


@jax_op(title="LeaveOut", gradient={"scores": lambda g: g})
def _left_out(scores: Any, mask: Any) -> Any:
    """Scores, without those at which a mask of bools is true; or plus a mask of numbers."""
    return jnp.where(mask, -jnp.inf, scores) if mask.dtype == jnp.bool_ else scores + mask.astype(scores.dtype)


@lowers("torch.multi_head_attention_forward")
def multi_head_attention_forward(
    query: popxl.Tensor,
    key: popxl.Tensor,
    value: popxl.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Optional,
    in_proj_bias: Optional,
    bias_k: Optional,
    bias_v: Optional,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: popxl.Tensor,
    out_proj_bias: Optional,
    training: bool = True,
    key_padding_mask: Optional = None,
    need_weights: bool = True,
    attn_mask: Optional = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Optional = None,
    k_proj_weight: Optional = None,
    v_proj_weight: Optional = None,
    static_k: None = None,
    static_v: None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> list[popxl.Tensor]:
    given, single = [query, key, value], len(query.shape) == 2
    if single:
        given = [ops.reshape(t, (t.shape[0], 1, t.shape[1])) for t in given]
    if query is key is value and in_proj_weight is not None:  # one product for all
        q, k, v = ops.split(linear(given[0], in_proj_weight, in_proj_bias), 3, axis=2)
    else:
        own = [q_proj_weight, k_proj_weight, v_proj_weight]
        weights = own if use_separate_proj_weight else _thirds(in_proj_weight)
        projected = zip(given, weights, _thirds(in_proj_bias), strict=True)
        q, k, v = (linear(t, weight, bias) for t, weight, bias in projected)  # type: ignore[arg-type]
    if bias_k is not None and bias_v is not None:
        k, v = _appended(k, bias_k, 0), _appended(v, bias_v, 0)
    length, batch, width = q.shape
    q, k, v = (_heads(t, num_heads) for t in (q, k, v))
    if add_zero_attn:
        k, v = (_appended(t, popxl.constant(0.0, t.dtype), 2) for t in (k, v))
    more = (bias_k is not None) + add_zero_attn
    scores = ops.matmul(q * (1 / math.sqrt(width // num_heads)), _transposed(k))
    if attn_mask is not None:
        mask = _wider(attn_mask, by=more) if more else attn_mask
        if len(mask.shape) == 3:
            mask = ops.reshape(mask, (batch, num_heads, *mask.shape[1:]))
        scores = _left_out(scores, mask)
    if key_padding_mask is not None:
        mask = _wider(key_padding_mask, by=more) if more else key_padding_mask
        scores = _left_out(scores, ops.reshape(mask, (batch, 1, 1, mask.shape[-1])))
    masked = attn_mask is not None or key_padding_mask is not None
    # PyTorch computes weights that are asked for otherwise: those of a query that sees no key are NaN.
    attention = masked_softmax(scores, axis=3) if masked and not need_weights else softmax(scores, -1)
    attention = _dropped(attention, dropout_p if training else 0)
    mixed = ops.transpose(ops.matmul(attention, v), (2, 0, 1, 3))
    out = linear(ops.reshape(mixed, (length, batch, width)), out_proj_weight, out_proj_bias)
    if average_attn_weights:
        attention = ops.mean(attention, 1)
    results = [out, attention] if need_weights else [out]
    if single:
        results = [ops.reshape(out, (length, width)), ops.reshape(attention, attention.shape[1:])][: len(results)]
    return results
