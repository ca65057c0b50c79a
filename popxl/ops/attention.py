"""Attention: for each query, the mean of the values, weighted by the softmax of its scores with the keys.

The matrix of scores, of each query and each key, is never in memory as a whole: it is computed block by block. The
gradient recomputes it from two residuals of each query: its result and one number. So memory grows with the length of
the sequence instead of its square. A sequence of one block has all its scores at once, in the form that compilers
recognise: the softmax of the scores, also in the gradient, so that both share it within one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.recording import Op, not_a_tensor
from popxl.core.tensor import Tensor
from popxl.core.traits import REFUSED, Drops, ShardingRule
from popxl.errors import PopxlError
from popxl.ops.kernels.elements import full_after
from popxl.ops.kernels.kernel import Kernel
from popxl.ops.kernels.score_dropout import kept_weights
from popxl.ops.kernels.sums import exponentials, largest, summed
from popxl.ops.precision import wide_dtype
from popxl.ops.random import check_seed, probability
from popxl.values.shapes import broadcast_shapes, flag, like_first, number, same_dtype
from popxl.values.spec import TensorSpec

BLOCK = 512
"""Maximum numbers of queries and of keys in a block."""

# Arrays, block by block ----------------------------------------------------------------------------------------------


class _Blocks:
    """Attention operands, split into blocks.

    Queries have the shape (batch, heads of the keys, heads of the queries for each, length, channels), keys and values
    lack the third dimension, and the mask has the shape of the scores, with 1 for broadcast dimensions.
    """

    def __init__(
        self, queries: Any, keys: Any, values: Any, mask: Any, seed: Any, causal: bool, scale: float, dropout: float
    ) -> None:
        self.wide = wide_dtype(queries)
        self.batch = queries.shape[:-3]
        heads = math.prod(keys.shape[-3:-2])
        self.lead = (math.prod(self.batch), heads, math.prod(queries.shape[-3:-2]) // heads)
        self.length, self.keys_length = queries.shape[-2], keys.shape[-2]
        self.rows, self.columns = _block(self.length), _block(self.keys_length)
        self.q, self.k, self.v = self.of_rows(queries), self.of_columns(keys), self.of_columns(values)
        self.mask: Any = None if mask is None else self._folded(mask)
        self.seed, self.causal, self.scale, self.dropout = seed, causal, scale, dropout
        pairs = [
            (i, j) for i in range(-(-self.length // self.rows)) for j in range(-(-self.keys_length // self.columns))
        ]
        self.pairs = [(i, j) for i, j in pairs if not causal or j * self.columns < (i + 1) * self.rows]

    def of_rows(self, t: Any, fill: float = 0) -> Any:
        """Per-query values in block layout."""
        return _padded(t.reshape(*self.lead, *t.shape[-2:]), 3, self.rows, fill)

    def of_columns(self, t: Any) -> Any:
        """Per-key values in block layout."""
        return _padded(t.reshape(*self.lead[:2], *t.shape[-2:]), 2, self.columns)

    def _folded(self, mask: Any) -> Any:
        shape = (1,) * (len(self.batch) + 3 - mask.ndim) + mask.shape
        mask = mask.reshape(shape)
        if any(size > 1 for size in shape[:-3]):
            mask = jnp.broadcast_to(mask, (*self.batch, *shape[-3:]))
        heads = self.lead[1:] if shape[-3] > 1 else (1, 1)
        mask = mask.reshape(-1, *heads, *shape[-2:])
        return _padded(_padded(mask, 3, self.rows), 4, self.columns)

    def row(self, t: Any, i: Any) -> Any:
        """One block of per-query values."""
        return _get_block(t, 3, i, self.rows)

    def column(self, t: Any, j: Any) -> Any:
        """One block of per-key values."""
        return _get_block(t, 2, j, self.columns)

    def scores(self, i: Any, j: Any) -> Any:
        """How much queries agree with keys; minus infinity, where they do not see them."""
        s = self.product("bhgqd,bhkd->bhgqk", self.row(self.q, i), self.column(self.k, j)) * self.scale
        if self.mask is not None:
            mask = _get_block(self.row(self.mask, i), 4, j, self.columns)
            s = jnp.where(mask, s, -jnp.inf) if mask.dtype == jnp.bool_ else s + mask.astype(s.dtype)
        place = j * self.columns + jnp.arange(self.columns)
        if self.causal:
            s = jnp.where(place <= (i * self.rows + jnp.arange(self.rows))[:, None], s, -jnp.inf)
        return s if self.keys_length % self.columns == 0 else jnp.where(place < self.keys_length, s, -jnp.inf)

    def dropped(self, i: Any, j: Any, *weights: Any) -> tuple[Any, ...]:
        """Apply dropout to weights, with a repeatable mask."""
        if not self.dropout:
            return weights

        heads = jnp.arange(math.prod(self.lead)).reshape(*self.lead, 1, 1)
        rows = heads * self.length + (i * self.rows + jnp.arange(self.rows))[:, None]
        kept = kept_weights(self.seed, rows, j * self.columns + jnp.arange(self.columns), self.dropout)
        return tuple(jnp.where(kept, w / (1 - self.dropout), 0) for w in weights)

    def product(self, subscripts: str, a: Any, b: Any) -> Any:
        """Sum products in float32, with factors in the dtype of queries."""
        a, b = a.astype(self.q.dtype), b.astype(self.q.dtype)
        return jnp.einsum(subscripts, a, b, preferred_element_type=self.wide)

    @property
    def is_single_block(self) -> bool:
        """Whether one pair of blocks covers all queries and keys."""
        return (self.q.shape[3], self.k.shape[2]) == (self.rows, self.columns)

    def softmax(self) -> tuple[Any, Any]:
        """Softmax over a single pair of blocks: weights, and log-sum-exp of scores."""
        scores = self.scores(0, 0)
        top, total = exponentials(scores, 4, may_see_none=self.mask is not None)
        weights = jnp.exp(scores - top)
        if self.mask is None:
            return weights / total, top + jnp.log(total)
        return weights / jnp.where(total == 0, 1, total), jnp.where(total == 0, jnp.inf, top + jnp.log(total))

    def over(self, step: Callable[[Any, Any, Any], Any], state: Any) -> Any:
        """Fold a step function over all relevant pairs of blocks."""
        if len(self.pairs) < 2:
            return step(state, 0, 0) if self.pairs else state
        places = jnp.asarray(self.pairs, jnp.int32)
        return lax.scan(lambda state, pair: (step(state, pair[0], pair[1]), None), state, places)[0]

    def filled_rows(self, channels: int, value: float = 0) -> Any:
        """`channels` equal numbers for each query, in the form that blocks are put into."""
        return full_after((*self.lead, self.q.shape[3], channels), value, self.wide, after=self.q)


def _block(length: int) -> int:
    """The size of blocks, of which the last lacks little."""
    return max(-(-length // max(-(-length // BLOCK), 1)), 1)


def _padded(t: Any, axis: int, block: int, fill: float = 0) -> Any:
    more = -t.shape[axis] % block if t.shape[axis] > 1 else 0
    return jnp.pad(t, [(0, more if d == axis else 0) for d in range(t.ndim)], constant_values=fill) if more else t


def _get_block(t: Any, axis: int, i: Any, block: int) -> Any:
    return t if t.shape[axis] in (1, block) else lax.dynamic_slice_in_dim(t, i * block, block, axis)


def _set_block(t: Any, block: Any, axis: int, i: Any) -> Any:
    size = block.shape[axis]
    return block if t.shape[axis] == size else lax.dynamic_update_slice_in_dim(t, block, i * size, axis)


@Kernel
def attention_forward(queries: Any, keys: Any, values: Any, mask: Any, seed: Any, **how: Any) -> tuple[Any, Any]:
    """Attention output per query, and log-sum-exp of its scores; see `ops.attention`."""
    blocks = _Blocks(queries, keys, values, mask, seed, **how)
    if blocks.is_single_block:
        weights, logs = blocks.softmax()
        (some,) = blocks.dropped(0, 0, weights)
        out = blocks.product("bhgqk,bhkv->bhgqv", some, blocks.v)
        return out.reshape(*queries.shape[:-1], values.shape[-1]), logs.reshape(queries.shape[:-1])

    def step(state: tuple[Any, Any, Any], i: Any, j: Any) -> tuple[Any, Any, Any]:
        mixed, top, total = (blocks.row(t, i) for t in state)
        scores = blocks.scores(i, j)
        higher = jnp.maximum(top, largest(scores, (4,), keepdims=True))
        base = jnp.where(jnp.isneginf(higher), 0, higher)  # of queries that have seen no key yet
        weights, shrunk = jnp.exp(scores - base), jnp.exp(top - base)
        (some,) = blocks.dropped(i, j, weights)
        more = blocks.product("bhgqk,bhkv->bhgqv", some, blocks.column(blocks.v, j))
        news = mixed * shrunk + more, higher, total * shrunk + summed(weights, (4,), keepdims=True)
        return tuple(_set_block(t, new, 3, i) for t, new in zip(state, news, strict=True))

    start = blocks.filled_rows(values.shape[-1]), blocks.filled_rows(1, -math.inf), blocks.filled_rows(1)
    mixed, top, total = (t[..., : blocks.length, :] for t in blocks.over(step, start))
    sees_none = total == 0
    out = jnp.where(sees_none, 0, mixed / total)
    logs = jnp.where(sees_none, jnp.inf, top + jnp.log(total))
    return out.reshape(*queries.shape[:-1], values.shape[-1]), logs.reshape(queries.shape[:-1])


@Kernel
def attention_backward(
    g: Any,
    queries: Any,
    keys: Any,
    values: Any,
    out: Any,
    logs: Any,
    mask: Any,
    seed: Any,
    *,
    is_part: bool = False,
    **how: Any,
) -> tuple[Any, Any, Any]:
    """Gradients of queries, keys and values; with `out` and `logs` over more keys, a share of query gradients."""
    blocks = _Blocks(queries, keys, values, mask, seed, **how)
    slopes = _slopes(blocks, g, out, logs, is_part)

    def step(state: tuple[Any, Any, Any], i: Any, j: Any) -> tuple[Any, Any, Any]:
        dq, dk, dv = state
        some, ds, g_i = slopes(i, j)
        ds = ds * blocks.scale
        to_q = blocks.product("bhgqk,bhkd->bhgqd", ds, blocks.column(blocks.k, j))
        to_k = blocks.product("bhgqk,bhgqd->bhkd", ds, blocks.row(blocks.q, i))
        to_v = blocks.product("bhgqk,bhgqv->bhkv", some, g_i)
        dq = _set_block(dq, blocks.row(dq, i) + to_q, 3, i)
        return dq, *(_set_block(t, blocks.column(t, j) + more, 2, j) for t, more in ((dk, to_k), (dv, to_v)))

    start = tuple(full_after(t.shape, 0, blocks.wide, after=g) for t in (blocks.q, blocks.k, blocks.v))
    dq, dk, dv = blocks.over(step, start)
    dk, dv = (t[:, :, : blocks.keys_length] for t in (dk, dv))
    return dq[..., : blocks.length, :].reshape(queries.shape), dk.reshape(keys.shape), dv.reshape(values.shape)


def attended_backward_anew(*known: Any, is_part: bool = False, **how: Any) -> tuple[Any, Any, Any]:
    """Recompute everything for `attention_backward`, sharing only cheap values with the forward pass.

    XLA would keep common values of both: all scores of a block, in float32, and the unrounded result. Behind a barrier
    it keeps only the program's residuals, and waits for the incoming gradient too.
    """
    _, queries, keys, values, out, logs, *_ = known
    operands = sum(t.size * t.dtype.itemsize for t in (queries, keys, values, out))
    if 2 * 4 * logs.size * keys.shape[-2] > operands:
        known, is_part = lax.optimization_barrier(known), True
    return attention_backward.plain(*known, is_part=is_part, **how)


def _slopes(
    blocks: _Blocks, g: Any, out: Any, logs: Any, is_part: bool = False
) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """For a pair of blocks: weights, score gradients, incoming gradient."""
    if blocks.is_single_block and not is_part:

        def single_block_slopes(i: Any, j: Any) -> tuple[Any, Any, Any]:
            (weights, _), g_i = blocks.softmax(), blocks.of_rows(g)
            slope = blocks.product("bhgqv,bhkv->bhgqk", g_i, blocks.v)
            some, slope = blocks.dropped(i, j, weights, slope)
            return some, weights * (slope - summed(weights * slope, (4,), keepdims=True)), g_i

        return single_block_slopes
    shift = blocks.of_rows(summed(g.astype(blocks.wide) * out.astype(blocks.wide), (g.ndim - 1,), keepdims=True))
    g, logs = blocks.of_rows(g), blocks.of_rows(logs[..., None], fill=math.inf)

    def block_slopes(i: Any, j: Any) -> tuple[Any, Any, Any]:
        weights = jnp.exp(blocks.scores(i, j) - blocks.row(logs, i))
        g_i = blocks.row(g, i)
        slope = blocks.product("bhgqv,bhkv->bhgqk", g_i, blocks.column(blocks.v, j))
        some, slope = blocks.dropped(i, j, weights, slope)
        return some, weights * (slope - blocks.row(shift, i)), g_i

    return block_slopes


def _mask_pullback(
    g: Any, queries: Any, keys: Any, values: Any, out: Any, logs: Any, mask: Any, seed_tensor: Any = None, **how: Any
) -> Any:
    """Gradient of an additive mask: score gradients, summed over broadcast axes."""
    blocks = _Blocks(queries, keys, values, mask, seed_tensor, **how)
    slopes = _slopes(blocks, g, out, logs)
    alike = tuple(d for d in range(5) if blocks.mask.shape[d] == 1)

    def step(dm: Any, i: Any, j: Any) -> Any:
        rows = blocks.row(dm, i)
        more = summed(slopes(i, j)[1], alike, keepdims=True)
        return _set_block(dm, _set_block(rows, _get_block(rows, 4, j, blocks.columns) + more, 4, j), 3, i)

    dm = blocks.over(step, full_after(blocks.mask.shape, 0, blocks.wide, after=g))
    shape = (1,) * (len(blocks.batch) + 3 - mask.ndim) + mask.shape
    dm = dm[:, :, :, : shape[-2], : shape[-1]]
    if dm.shape[0] > 1:
        dm = dm.reshape(*blocks.batch, *shape[-3:])
        dm = dm.sum([d for d, size in enumerate(shape[:-3]) if size == 1], keepdims=True)
    return dm.reshape(mask.shape)


# The op -------------------------------------------------------------------------------------------------------------


def attention_specs(
    queries: Any, keys: Any, values: Any, mask: Any = None, seed_tensor: Any = None, *, dropout: float, **how: Any
) -> tuple[TensorSpec, TensorSpec]:
    """Result specs of attention: output and log-sum-exp.

    Raises:
        PopxlError, ValueError: if the operands do not fit.
    """
    same_dtype(queries, keys, values)
    if queries.dtype.is_float8 or not queries.dtype.is_floating_point:
        raise PopxlError(f"queries, keys and values are floats of 16 bits or more; these are {queries.dtype.name}.")
    rank = len(queries.shape)
    if rank < 2 or {len(keys.shape), len(values.shape)} != {rank}:
        raise PopxlError("expected queries, keys and values of one rank, 2 or more: (..., heads, length, channels).")
    if keys.shape[:-1] != values.shape[:-1] or queries.shape[-1] != keys.shape[-1]:
        raise PopxlError("expected a value for each key, and keys with as many channels as the queries.")
    if queries.shape[:-3] != keys.shape[:-3] or (rank > 2 and queries.shape[-3] % max(keys.shape[-3], 1)):
        raise PopxlError("expected keys with the batch of the queries, and a number of heads that divides theirs.")
    scores = (*queries.shape[:-1], keys.shape[-2])
    if mask is not None:
        if not (mask.dtype is dtypes.bool or mask.dtype.is_floating_point):
            raise PopxlError(f"a mask is of bools, or of floats to add to the scores; this is of {mask.dtype.name}.")
        if broadcast_shapes(mask.shape, scores) != scores:
            raise PopxlError(f"expected a mask whose shape broadcasts to that of the scores, {scores}.")
    if seed_tensor is not None:
        check_seed(seed_tensor, any_integers=True)
    elif dropout:
        raise ValueError("dropout draws at random: say its `seed_tensor`, a uint32 tensor of shape (2,).")
    wide = dtypes.float32 if queries.dtype.is_half else queries.dtype
    return TensorSpec((*queries.shape[:-1], values.shape[-1]), queries.dtype), TensorSpec(queries.shape[:-1], wide)


def _gradient(forward: Any, gs: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """One op makes those of queries, keys and values."""
    op, (g, _) = forward.op, gs
    if g is None:
        return {}
    known = op.attributes | {name: forward.read(t) for name, t in zip(op.operand_names(), op.inputs, strict=True)}
    q, k, v, mask, seed = (known.pop(name, None) for name in ("queries", "keys", "values", "mask", "seed_tensor"))
    out, logs = forward.read_in_last_layout(op.outputs[0]), forward.read(op.outputs[1])
    kept = (g, q, k, v, out, logs, mask, seed)
    found = {}
    if any(forward.wants(i) for i in range(3)):
        found = {i: dt for i, dt in enumerate(_attention_grad(*kept, **known)) if forward.wants(i)}
    if isinstance(mask, Tensor) and mask.dtype.is_floating_point and forward.wants(3):
        found[3] = _attention_mask_grad(*kept, **known)
    return found


_attention = OpKind(
    "Attention",
    lambda queries, keys, values, mask=None, seed_tensor=None, *, causal, scale, dropout: attention_forward(
        queries, keys, values, mask, seed_tensor, causal=causal, scale=scale, dropout=dropout
    ),
    shape=attention_specs,
    result=("attention_out", "attention_logs"),
    gradient=_gradient,
    traits=[
        Drops("seed_tensor", "dropout"),
        ShardingRule("...__,...__,...__,...__,_->...__,..._", ("values",)),
    ],
)
_attention_grad = OpKind(
    "AttentionGrad",
    lambda g, queries, keys, values, out, logs, mask=None, seed_tensor=None, *, causal, scale, dropout: (
        attention_backward(
            g, queries, keys, values, out, logs, mask, seed_tensor, causal=causal, scale=scale, dropout=dropout
        )
    ),
    shape=lambda g, queries, keys, values, *others, **how: tuple(map(like_first, (queries, keys, values))),
    result=("attention_queries_grad", "attention_keys_grad", "attention_values_grad"),
    gradient=REFUSED,
    traits=[
        ShardingRule("...__,...__,...__,...__,...__,..._,...__,_->...__,...__,...__", ("g",)),
    ],
)
_attention_mask_grad = OpKind(
    "AttentionMaskGrad",
    lambda g, queries, keys, values, out, logs, mask, seed_tensor=None, *, causal, scale, dropout: _mask_pullback(
        g, queries, keys, values, out, logs, mask, seed_tensor, causal=causal, scale=scale, dropout=dropout
    ),
    shape=lambda g, queries, keys, values, out, logs, mask, *others, **how: like_first(mask),
    gradient=REFUSED,
)


def is_attention(op: Op) -> bool:
    """Whether an op is attention, or the gradient of attention."""
    return op.kind in (_attention, _attention_grad, _attention_mask_grad)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed_tensor: Tensor | None = None,
) -> Tensor:
    """Compute `softmax(queries @ keys.T * scale) @ values` per head, holding the scores of one block only.

    Blocks have at most 512 queries and 512 keys. So memory grows with the length of the text, not with its square; the
    gradient recomputes the scores. Sums are in float32. A query without keys gets zeros.

    On TPUs, texts of float32 or bfloat16 go through Pallas kernels, unless there are fewer than 65 queries or keys, or
    more than 256 channels. On NVIDIA GPUs, texts of float16 or bfloat16 go through cuDNN's kernels, unless
    there is dropout, fewer than 64 queries or keys, or more than 256 channels (128 on GPUs older than the Hopper
    generation). So do those with most masks (docs/targets.md). All else is computed in blocks of plain JAX.

    Args:
        queries: tensor of shape `(..., heads, length, channels)`, or without heads `(length, channels)`.
        keys: tensor of shape `(..., key heads, key length, channels)`. The number of heads divides that of the queries:
            each serves the same number of query heads (grouped queries).
        values: tensor of shape `(..., key heads, key length, value channels)`.
        mask: keys that each query attends to: a bool tensor, or a float tensor that is added to the scores, whose shape
            broadcasts to `(..., heads, length, key length)`. A gradient flows to a float one.
        causal: each query sees the keys up to its own place, counted from the first.
        scale: scale of the scores, 1 / √channels by default.
        dropout: probability that a key is dropped for a query, to the nearest 2⁻¹⁶; the other keys are scaled up
            accordingly.
        seed_tensor: seed of the dropout: uint32 tensor of shape `(2,)`. The same seed drops the same keys.

    Returns:
        A new tensor of shape `(..., heads, length, value channels)`.

    Raises:
        PopxlError: if the shapes do not fit, or the dtypes differ.
        ValueError: for a `dropout` that is not a probability below 1, or without a seed.
        TypeError: if `scale` or `dropout` is not a number.

    See also: `torch.nn.functional.scaled_dot_product_attention`, `jax.nn.dot_product_attention`.

    Example:
        >>> y = ops.attention(x, x, x, causal=True)
    """
    for name, operand in (("mask", mask), ("seed_tensor", seed_tensor)):
        if not (operand is None or isinstance(operand, Tensor)):
            raise not_a_tensor("attention", name, operand)
    if scale is None:
        channels = queries.shape[-1] if isinstance(queries, Tensor) and queries.shape else 1
        scale = 1 / math.sqrt(max(channels, 1))
    how: dict[str, Any] = {
        "causal": flag(causal, "attention: `causal`"),
        "scale": float(number(scale, "attention: `scale`")),
        "dropout": probability(dropout, "attention: `dropout`"),
    }
    out, _ = _attention(queries, keys, values, mask, seed_tensor, **how)
    return out
