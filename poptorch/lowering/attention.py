"""Attention: `scaled_dot_product_attention`, and PyTorch's multi-head attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp

import popxl
from poptorch.lowering.emission import next_seed
from poptorch.lowering.linalg import linear
from poptorch.lowering.nn import softmax
from poptorch.lowering.operands import Optional, broadcast, cast_like
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.ops import broadcast_shapes


def _transposed(t: popxl.Tensor) -> popxl.Tensor:
    """A tensor with its last two dimensions exchanged."""
    axes = tuple(range(len(t.shape)))
    return ops.transpose(t, (*axes[:-2], axes[-1], axes[-2]))


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
    own = 3 if enable_gqa else 2  # non-batch dimensions; each key head may serve several query heads
    batch = broadcast_shapes(*(t.shape[:-own] for t in given))
    query, key, value = (t if t.shape[:-own] == batch else broadcast(t, shape=(*batch, *t.shape[-own:])) for t in given)
    return ops.attention(query, key, value, attn_mask, is_causal, scale, dropout_p, _seed(dropout_p))


# Multi-head attention -------------------------------------------------------------------------------------------------


def _batch_first(t: popxl.Tensor) -> popxl.Tensor:
    """Swap `[time, batch, features]` and `[batch, time, features]`."""
    return ops.transpose(t, (1, 0, 2))


def _heads(t: popxl.Tensor, count: int) -> popxl.Tensor:
    """Split `[batch, time, features]` into `[batch, heads, time, features of a head]`."""
    batch, length, width = t.shape
    return ops.transpose(ops.reshape(t, (batch, length, count, width // count)), (0, 2, 1, 3))


def _appended(t: popxl.Tensor, row: popxl.Tensor) -> popxl.Tensor:
    """Keys or values with one extra row appended per head."""
    shape = (*t.shape[:2], 1, t.shape[3])
    return ops.concat([t, broadcast(cast_like(row, t.dtype), shape=shape)], 2)


def _thirds(t: Optional) -> Sequence[Optional]:
    """Split a weight or bias into its rows for query, key and value."""
    return (None, None, None) if t is None else ops.split(t, 3, 0)


@jax_op(title="Pad", gradient=None)
def _widen_mask(mask: Any, *, by: int) -> Any:
    """Widen a mask by `by` unmasked columns; in a boolean mask, true means masked."""
    return jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, by)])


@jax_op(title="LeaveOut", gradient={"scores": lambda g: g})
def _apply_mask(scores: Any, mask: Any) -> Any:
    """Apply a mask to scores: true booleans become minus infinity, numbers are added."""
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
    """Multi-head attention, as `torch.nn.functional.multi_head_attention_forward`; also the attention weights if
    requested.
    """
    given, single = [query, key, value], len(query.shape) == 2
    if single:
        given = [ops.reshape(t, (t.shape[0], 1, t.shape[1])) for t in given]
    # PyTorch's modules have time first here, even with `batch_first`. XLA does not move a transposition past a product
    # to cancel theirs; two transpositions in a row cost nothing.
    batch_first = {t: _batch_first(t) for t in given}
    given = [batch_first[t] for t in given]
    if query is key is value and in_proj_weight is not None:
        q, k, v = _joint_projection(given[0], in_proj_weight, in_proj_bias, num_heads)
    else:
        separate = [q_proj_weight, k_proj_weight, v_proj_weight]
        weights = separate if use_separate_proj_weight else _thirds(in_proj_weight)
        q, k, v = _projections(given, weights, _thirds(in_proj_bias), num_heads)
    if bias_k is not None and bias_v is not None:
        k, v = (_appended(t, _heads(row, num_heads)) for t, row in ((k, bias_k), (v, bias_v)))
    if add_zero_attn:
        k, v = (_appended(t, popxl.constant(0.0, t.dtype)) for t in (k, v))
    masks = _masks(attn_mask, key_padding_mask, (q.shape[0], num_heads), (bias_k is not None) + add_zero_attn)
    dropout_p = dropout_p if training else 0.0
    attention = None
    if need_weights:
        mixed, attention = _attention_with_weights(q, k, v, masks, dropout_p)
    else:
        mixed = ops.attention(q, k, v, _combine_masks(masks), dropout=dropout_p, seed_tensor=_seed(dropout_p))
    out = linear(_merge_heads(mixed), out_proj_weight, out_proj_bias)
    out = ops.reshape(out, out.shape[1:]) if single else _batch_first(out)
    if attention is None:
        return [out]
    if average_attn_weights:
        attention = ops.mean(attention, 1)
    return [out, ops.reshape(attention, attention.shape[1:]) if single else attention]


def _attention_with_weights(
    q: popxl.Tensor, k: popxl.Tensor, v: popxl.Tensor, masks: Sequence[popxl.Tensor], dropout_p: float
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Result of attention, and its weights: NaN for a query that sees no key, as in PyTorch."""
    scores = ops.matmul(q * (1 / math.sqrt(q.shape[-1])), _transposed(k))
    for mask in masks:
        scores = _apply_mask(scores, mask)
    attention = softmax(scores, -1)
    if dropout_p:
        attention = ops.dropout(attention, next_seed(), dropout_p)
    return ops.matmul(attention, v), attention


def _joint_projection(t: popxl.Tensor, weight: popxl.Tensor, bias: Optional, heads: int) -> list[popxl.Tensor]:
    """Queries, keys and values of self-attention, split by heads, from one matrix product."""
    joint = linear(t, weight, bias)
    by_head = ops.reshape(joint, (*joint.shape[:2], 3, heads, joint.shape[2] // (3 * heads)))
    return [ops.reshape(t, t.shape[1:]) for t in ops.split(ops.transpose(by_head, (2, 0, 3, 1, 4)), 3, axis=0)]


def _projections(
    inputs: Sequence[popxl.Tensor], weights: Sequence[Any], biases: Sequence[Optional], heads: int
) -> list[popxl.Tensor]:
    """Queries, keys and values, split by heads, from a matrix product each."""
    return [_heads(linear(t, weight, bias), heads) for t, weight, bias in zip(inputs, weights, biases, strict=True)]


def _merge_heads(t: popxl.Tensor) -> popxl.Tensor:
    """Concatenate the results of all heads at each position."""
    by_position = ops.transpose(t, (0, 2, 1, 3))
    return ops.reshape(by_position, (*by_position.shape[:2], -1))


def _masks(mask: Optional, key_mask: Optional, lead: tuple[int, int], extra_keys: int) -> list[popxl.Tensor]:
    """The given masks, reshaped to broadcast with scores.

    Args:
        mask: keys that each query leaves out.
        key_mask: keys that all queries of a batch entry leave out.
        lead: sizes of the batch and of heads.
        extra_keys: number of keys beyond those that masks cover.
    """
    masks = [_widen_mask(each, by=extra_keys) if extra_keys else each for each in (mask, key_mask) if each is not None]
    if mask is not None and len(mask.shape) == 3:
        masks[0] = ops.reshape(masks[0], (*lead, *masks[0].shape[1:]))
    if key_mask is not None:
        masks[-1] = ops.reshape(masks[-1], (lead[0], 1, 1, masks[-1].shape[-1]))
    return masks


def _combine_masks(masks: Sequence[popxl.Tensor]) -> Optional:
    """Combine masks of excluded positions into one mask of attended positions; additive, if any mask is numeric."""
    if all(mask.dtype is popxl.bool for mask in masks):
        return reduce(ops.logical_and, map(ops.logical_not, masks)) if masks else None
    zero, lowest = popxl.constant(0.0), popxl.constant(-math.inf)
    numbers = (ops.where(m, lowest, zero) if m.dtype is popxl.bool else cast_like(m, popxl.float32) for m in masks)
    return reduce(ops.add, numbers)


def _seed(dropout: float) -> Optional:
    return next_seed() if dropout else None
