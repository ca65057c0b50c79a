"""Attention on TPUs: Pallas kernels for what they support: texts that are not short, values as wide as keys.

They keep blocks of scores in the core's memory, where the plain implementation leaves their placement to XLA. Blocks
that a causal mask hides are neither fetched nor computed.

All arrays have the sequence as last dimension, in memory and in the kernels. The last dimension of an array is padded
to 128 elements, so that heads of 64 channels would need twice their memory; results of products have this order, so
that they need no copies. Scores are transposed, keys by queries: maxima and sums over keys are then rows, one number
for each query, and results and gradients take products without transposing scores. So is the bias that a mask becomes:
of the same keys for all queries, it is a column. Random numbers of dropout are computed in the kernels, too.
Of a block that reaches beyond the end of a sequence, kernels read anything there, and write nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pallas

from popxl.base.arrays import Array
from popxl.ops.attention import attended_backward_anew
from popxl.ops.attention import attention_forward as plain
from popxl.ops.kernels.score_dropout import GROUP, is_kept, quadruples
from runtime.score_bias import ScoreBias

SMALLEST, MOST_QUERIES, MOST_KEYS = 128, 512, 1024
"""The sizes of blocks: multiples of the smallest; half as many keys in float32.

For 1024 keys, the forward kernel takes 0.82 x the bundles of two blocks of 512, and the kernel of gradients 0.84 x (64
channels, on a v5e).
"""

SHORTEST = 65
"""Minimum number of queries and keys: with fewer, padding would more than quadruple the number of scores."""

MOST_CHANNELS = 256
"""With more channels, blocks would not fit."""

MOST_BYTES_OF_CHANNELS = 512
"""The same with a mask: 256 channels of bfloat16, 128 of float32."""

MOST_SUMS = 1 << 22
"""Bytes of the core's memory for the gradients of keys and values: sums in float32, and two buffers of each result."""

ZERO = np.int32(0)
"""Kernels have no numbers of 64 bits, which literals of index maps are in a program that has them."""

HIDDEN = -(2.0**100)
"""Bias of hidden scores: a power of two, which all dtypes have."""

Ref = Any
"""A block of an array, or scratch memory, as a kernel reads and writes it."""


class _Blocks(NamedTuple):
    """Blocks of scores: their numbers of queries and keys, and which of them a causal mask leaves visible.

    Attributes:
        length, keys_length: numbers of queries and keys of a head, of which the last block may lack some.
    """

    queries: int
    keys: int
    causal: bool
    scale: float
    dropout: float
    length: int
    keys_length: int

    @classmethod
    def of(cls, q: Array, k: Array, mask: Array | None, how: dict[str, Any]) -> _Blocks:
        """The blocks for queries and keys as given.

        A single block of more keys than queries would hide nothing of a causal mask.
        """
        # Products of float32 hold further copies of their operands, and so large is a block of a mask of float32.
        most_keys = MOST_KEYS * 2 // max(k.dtype.itemsize, 0 if mask is None else mask.dtype.itemsize)
        length, keys_length = (t.shape[-2] for t in (q, k))
        queries, keys = _block(length, MOST_QUERIES), _block(keys_length, most_keys)
        if how["causal"] and keys >= keys_length:
            keys = min(keys, queries)
        return cls(queries, keys, length=length, keys_length=keys_length, **how)

    def visible(self, i: Array, j: Array) -> Array:
        """The block of keys `j`, or the last one that the block of queries `i` sees."""
        return jnp.minimum(j, lax.div((i + 1) * self.queries - 1, np.int32(self.keys))) if self.causal else j

    def first_seeing(self, j: Array) -> Array:
        """The first block of queries that sees the block of keys `j`."""
        return lax.div(j * self.keys, np.int32(self.queries)) if self.causal else 0 * j

    def scores(self, q: Array, k: Array, bias: Ref | None, i: Array, j: Array) -> Array:
        """Scores, keys by queries, in units of log 2: powers of two cost less than those of e."""
        scores = _product(k, q, 0, 0) * (self.scale / math.log(2))
        if bias is not None:
            scores = scores + bias[...].astype(jnp.float32) * (1 / math.log(2))
        key, query = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
        if self.keys_length % self.keys:
            scores = jnp.where(key < self.keys_length - j * self.keys, scores, -jnp.inf)
        if self.causal:
            scores = jnp.where(key - query <= i * self.queries - j * self.keys, scores, -jnp.inf)
        return scores

    def of_queries(self, t: Array, i: Array) -> Array:
        """A block of per-query values, with zeros beyond the last query."""
        return _cleared(t, self.length - i * self.queries) if self.length % self.queries else t

    def of_keys(self, t: Array, j: Array) -> Array:
        """A block of per-key values, with zeros beyond the last key."""
        return _cleared(t, self.keys_length - j * self.keys) if self.keys_length % self.keys else t

    def dropped(self, seed: Ref | None, head: Array, i: Array, j: Array, *weights: Array) -> tuple[Array, ...]:
        """Apply dropout to weights, keys by queries."""
        if seed is None:
            return weights
        shape = self.keys // 4, self.queries
        place, query = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        row = head * self.length + i * self.queries
        numbers = quadruples(seed, row + query, j * (self.keys // 4) + place)
        groups = [each.reshape(-1, GROUP, self.queries) for each in numbers]
        kept = is_kept(jnp.stack(groups, 1).reshape(self.keys, self.queries), self.dropout)
        return tuple(jnp.where(kept, t * (1 / (1 - self.dropout)), jnp.zeros_like(t)) for t in weights)


class _Bias(NamedTuple):
    """The bias of scores, keys by queries, as an operand of kernels.

    Attributes:
        array: of shape (one for each text, head, both or neither, keys, queries or 1).
        texts, heads: whether it has numbers for each of them.
        heads_of_text: number of heads of the queries.
    """

    array: Array
    texts: bool
    heads: bool
    heads_of_text: int

    @classmethod
    def of(cls, values: Array, queries: Array) -> _Bias:
        """The bias with these values, of shape (texts or 1, heads or 1, queries or 1, keys)."""
        texts, heads, *scores = values.shape
        array = values.reshape(-1, *scores).mT
        return cls(array, texts > 1, heads > 1, queries.shape[-3] if queries.ndim > 2 else 1)

    def spec(self, blocks: _Blocks, place: Callable[..., tuple[Array, Array, Array]]) -> pl.BlockSpec:
        """Its blocks, by a function from the numbers of a block to those of the head of queries, keys and queries."""
        count, is_column = np.int32(self.heads_of_text), self.array.shape[-1] == 1

        def index(*numbers: Array) -> tuple[Any, ...]:
            h, j, i = place(*numbers)
            text = lax.div(h, count) if self.texts else ZERO
            row = text * count + lax.rem(h, count) if self.heads else text
            return row, j, ZERO if is_column else i

        return pl.BlockSpec((None, blocks.keys, 1 if is_column else blocks.queries), index)


class _Optional(NamedTuple):
    """Operands of kernels that not all attention has, `None` where it has none.

    Attributes:
        bias: that of scores.
        seed: two words, of dropout.
    """

    bias: _Bias | None
    seed: Array | None

    @classmethod
    def of(cls, bias: ScoreBias, seed: Array | None, queries: Array, dropout: float) -> _Optional:
        """The operands for a mask and a probability of dropout."""
        return cls(None if bias.values is None else _Bias.of(bias.values, queries), seed if dropout else None)

    @property
    def arrays(self) -> tuple[Array | None, Array | None]:
        return self.bias and self.bias.array, self.seed

    def specs(self, blocks: _Blocks, place: Callable[..., tuple[Array, Array, Array]]) -> list[pl.BlockSpec | None]:
        """Their blocks; `place` as in `_Bias.spec`."""
        words = None if self.seed is None else pl.BlockSpec((2,), lambda *_: (ZERO,), memory_space=pallas.SMEM)
        return [self.bias and self.bias.spec(blocks, place), words]


def _forward_kernel(
    blocks: _Blocks,
    bias: Ref | None,
    seed: Ref | None,
    q: Ref,
    k: Ref,
    v: Ref,
    out: Ref,
    logs: Ref,
    mixed: Ref,
    top: Ref,
    total: Ref,
) -> None:
    """Attention of a block of queries: online softmax over blocks of keys."""
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def begin() -> None:
        mixed[...], total[...] = jnp.zeros_like(mixed), jnp.zeros_like(total)
        top[...] = jnp.full_like(top, -jnp.inf)

    @pl.when(blocks.visible(i, j) == j)
    def add() -> None:
        scores = blocks.scores(q[...], k[...], bias, i, j)
        higher = jnp.maximum(top[...], jnp.max(scores, 0, keepdims=True))
        weights, shrunk = jnp.exp2(scores - higher), jnp.exp2(top[...] - higher)
        (kept,) = blocks.dropped(seed, pl.program_id(0), i, j, weights)
        mixed[...] = mixed[...] * shrunk + _product(blocks.of_keys(v[...], j), kept.astype(v.dtype), 1, 0)
        total[...] = total[...] * shrunk + jnp.sum(weights, 0, keepdims=True)
        top[...] = higher

    @pl.when(j == pl.num_programs(2) - 1)
    def end() -> None:
        out[...] = (mixed[...] / total[...]).astype(out.dtype)
        logs[...] = top[...] * math.log(2) + jnp.log(total[...])


def attention_forward(
    queries: Array, keys: Array, values: Array, mask: Array, seed: Array, **how: Any
) -> tuple[Array, Array]:
    """`popxl.ops.attention.attention_forward`."""
    if not _takes(queries, keys, values, mask, how):
        return plain.plain(queries, keys, values, mask, seed, **how)
    q, k, v = (_by_head(t) for t in (queries, keys, values))
    (heads, channels, length), shared = q.shape, q.shape[0] // k.shape[0]
    blocks, masked = _Blocks.of(queries, keys, mask, how), ScoreBias.of(mask, queries, keys, how["causal"], HIDDEN)
    optional = _Optional.of(masked, seed, queries, blocks.dropout)

    def of_queries(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, blocks.queries), lambda h, i, j: (h, ZERO, i))

    of_keys = pl.BlockSpec(
        (None, channels, blocks.keys), lambda h, i, j: (lax.div(h, np.int32(shared)), ZERO, blocks.visible(i, j))
    )
    with _products(q):
        out, logs = pl.pallas_call(
            partial(_forward_kernel, blocks),
            grid=(heads, pl.cdiv(length, blocks.queries), pl.cdiv(k.shape[-1], blocks.keys)),
            in_specs=[
                *optional.specs(blocks, lambda h, i, j: (h, blocks.visible(i, j), i)),
                *(of_queries(channels), of_keys, of_keys),
            ],
            out_specs=[of_queries(channels), of_queries(1)],
            out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((heads, 1, length), jnp.float32)],
            scratch_shapes=[pallas.VMEM((rows, blocks.queries), jnp.float32) for rows in (channels, 1, 1)],
            compiler_params=pallas.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            name="attention",
        )(*optional.arrays, q, k, v)
    return masked.fill_results(_as_given(out, queries), logs.reshape(queries.shape[:-1]))


def _backward_kernel(
    blocks: _Blocks,
    wanted: str,
    bias: Ref | None,
    seed: Ref | None,
    g: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    out: Ref,
    logs: Ref,
    *others: Ref,
) -> None:
    """Gradients, summed over blocks: those of queries over keys, those of keys and values over queries and heads."""
    results, (shift, *sums) = dict(zip(wanted, others, strict=False)), others[len(wanted) :]
    total = dict(zip(wanted, sums, strict=True))
    key_head, chunk, head, i, j = (pl.program_id(d) for d in range(5))
    last_head, last_i, last_j = (pl.num_programs(d) - 1 for d in range(2, 5))
    at = chunk * (last_j + 1) + j

    def clear(names: str) -> None:
        for name in set(names).intersection(wanted):
            total[name][...] = jnp.zeros_like(total[name])

    def write(names: str) -> None:
        for name in set(names).intersection(wanted):
            scale = 1.0 if name == "v" else blocks.scale
            results[name][...] = (total[name][...] * scale).astype(results[name].dtype)

    pl.when((head == 0) & (i == 0) & (j == 0))(lambda: clear("kv"))

    @pl.when(j == 0)
    def begin() -> None:
        clear("q")
        products = out[...].astype(jnp.float32) * g[...].astype(jnp.float32)
        shift[...] = blocks.of_queries(jnp.sum(products, 0, keepdims=True), i)

    @pl.when(blocks.visible(i, at) == at)
    def add() -> None:
        queries, slopes = blocks.of_queries(q[...], i), blocks.of_queries(g[...].astype(q.dtype), i)
        keys, values = blocks.of_keys(k[...], at), blocks.of_keys(v[...], at)
        scores = blocks.scores(queries, keys, bias, i, at)
        weights = blocks.of_queries(jnp.exp2(scores - logs[...] * (1 / math.log(2))), i)
        of_weights = _product(values, slopes, 0, 0)
        kept, of_weights = blocks.dropped(seed, key_head * (last_head + 1) + head, i, at, weights, of_weights)
        of_scores = (weights * (of_weights - shift[...])).astype(q.dtype)
        if "q" in wanted:
            total["q"][...] += _product(keys, of_scores, 1, 0)
        if "k" in wanted:
            place = pl.ds(pl.multiple_of(j * blocks.keys, blocks.keys), blocks.keys)
            total["v"][:, place] += _product(slopes, kept.astype(q.dtype), 1, 1)
            total["k"][:, place] += _product(queries, of_scores, 1, 1)

    pl.when(j == last_j)(lambda: write("q"))
    pl.when((head == last_head) & (i == last_i) & (j == last_j))(lambda: write("kv"))


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
    masked = ScoreBias.of(mask, queries, keys, how["causal"], HIDDEN)
    optional = _Optional.of(masked, seed, queries, how["dropout"])
    g, logs = masked.clear_gradients(g, logs)
    operands = [_by_head(t) for t in (g, queries, keys, values, out, logs[..., None])]
    _, q, k, *_ = operands
    blocks, length = _Blocks.of(queries, keys, mask, how), k.shape[-1]
    # As many keys at once as sums have room for: with all keys, one kernel computes the scores once for all gradients.
    most = MOST_SUMS // (k.shape[1] * (2 * 4 + 4 * k.dtype.itemsize))
    columns = pl.cdiv(length, blocks.keys)
    chunk = blocks.keys * max(n for n in range(1, max(most // blocks.keys, 1) + 1) if columns % n == 0)
    if chunk >= length:
        gradients = _gradients(blocks, optional, "qkv", chunk, *operands)
    else:
        gradients = _gradients(blocks, optional, "q", columns * blocks.keys, *operands) + _gradients(
            blocks, optional, "kv", chunk, *operands
        )
    dq, dk, dv = (_as_given(dt, t) for dt, t in zip(gradients, (queries, keys, values), strict=True))
    return dq, dk, dv


def _gradients(blocks: _Blocks, optional: _Optional, wanted: str, chunk: int, *operands: Array) -> list[Array]:
    """The gradients of queries (`"q"`), of keys and values (`"kv"`), or all, with the sums of `chunk` keys at once."""
    _, q, k, v, *_ = operands
    channels, shared, columns = q.shape[1], q.shape[0] // k.shape[0], chunk // blocks.keys
    rows = pl.cdiv(q.shape[-1], blocks.queries)

    def place_of_queries(h: Array, c: Array, head: Array, i: Array, j: Array) -> tuple[Any, ...]:
        first = jnp.minimum(blocks.first_seeing(c * columns), rows - 1)
        return h * shared + head, ZERO, jnp.maximum(i, first)

    def place_of_keys(h: Array, c: Array, head: Array, i: Array, j: Array) -> tuple[Any, ...]:
        return h, ZERO, jnp.maximum(blocks.visible(i, c * columns + j), c * columns)

    def place_of_scores(*numbers: Array) -> tuple[Any, ...]:
        head, _, i = place_of_queries(*numbers)
        return head, place_of_keys(*numbers)[2], i

    of_queries, of_logs = (pl.BlockSpec((None, n, blocks.queries), place_of_queries) for n in (channels, 1))
    of_keys = pl.BlockSpec((None, channels, blocks.keys), place_of_keys)
    of_chunk = pl.BlockSpec((None, channels, chunk), lambda h, c, head, i, j: (h, ZERO, c))
    like = {"q": (q, of_queries, blocks.queries), "k": (k, of_chunk, chunk), "v": (v, of_chunk, chunk)}
    arrays, specs, lengths = zip(*(like[name] for name in wanted), strict=True)
    sums = [(1, blocks.queries), *((channels, length) for length in lengths)]
    with _products(q):
        return pl.pallas_call(
            partial(_backward_kernel, blocks, wanted),
            grid=(k.shape[0], pl.cdiv(k.shape[-1], chunk), shared, rows, columns),
            in_specs=[
                *optional.specs(blocks, place_of_scores),
                *(of_queries, of_queries, of_keys, of_keys, of_queries, of_logs),
            ],
            out_specs=list(specs),
            out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arrays],
            scratch_shapes=[pallas.VMEM(shape, jnp.float32) for shape in sums],
            compiler_params=pallas.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary")
            ),
            name=f"attention_gradients_{wanted}",
        )(*optional.arrays, *operands)


def _takes(queries: Array, keys: Array, values: Array, mask: Array, how: Any) -> bool:
    """Whether the kernel computes this."""
    return (
        (mask is None or _takes_mask(mask, queries, keys, values))
        and queries.dtype in (jnp.float32, jnp.bfloat16)
        and values.shape == keys.shape
        and keys.shape[-1] <= MOST_CHANNELS
        and math.prod(queries.shape) * math.prod(keys.shape) > 0
        and min(queries.shape[-2], keys.shape[-2]) >= SHORTEST
    )


def _takes_mask(mask: Array, queries: Array, keys: Array, values: Array) -> bool:
    """Whether the kernel takes the bias of a mask: of a dtype that it loads, no larger than the operands, and with room
    for its blocks beside theirs."""
    has_room = queries.shape[-1] * queries.dtype.itemsize <= MOST_BYTES_OF_CHANNELS
    is_known = mask.dtype in (jnp.bool_, jnp.float32, jnp.bfloat16)
    return has_room and is_known and ScoreBias.is_small(mask, queries, keys, values)


def _block(length: int, most: int) -> int:
    """Size of the largest blocks that divide a sequence without more padding than the smallest blocks need."""
    smallest = pl.cdiv(length, SMALLEST)
    return SMALLEST * max(n for n in range(1, max(most // SMALLEST, 1) + 1) if smallest % n == 0)


def _cleared(t: Array, count: Array) -> Array:
    """An array with zeros in place of all but the first `count` columns."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, t.shape, 1) < count, t, jnp.zeros_like(t))


def _by_head(t: Array) -> Array:
    """All heads of all samples in one dimension, channels by sequence: consecutive query heads share a key head."""
    length, channels = t.shape[-2:]
    return t.mT.reshape(-1, channels, length)


def _as_given(t: Array, like: Array) -> Array:
    """The inverse of `_by_head`. XLA drops both transposes, as the arrays around have this order."""
    return t.reshape(*like.shape[:-2], *t.shape[1:]).mT


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """The product of matrices over dimension `of_a` of the first and `of_b` of the second, in float32."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _products(t: Array) -> AbstractContextManager[None]:
    """Matmul precision: default for bfloat16, whose products are exact; otherwise unchanged."""
    return jax.default_matmul_precision("default") if t.dtype == jnp.bfloat16 else nullcontext()
