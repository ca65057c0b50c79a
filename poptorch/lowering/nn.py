"""Other layers: softmax, log-softmax, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import popxl
from poptorch.lowering.norms import renormed
from poptorch.lowering.operands import axis_of, cast_like
from poptorch.lowering.registry import jax_op, lowers
from popxl import OpKind, ops
from popxl.extend.kernels import round_once, sums, widen

# Softmax --------------------------------------------------------------------------------------------------------------


def _along_a_dim(*names: str, kind: OpKind) -> Callable[..., popxl.Tensor]:
    """Declare a lowering of PyTorch ops by one op along an axis."""

    def lowering(
        input: popxl.Tensor,
        dim: int,
        dtype: popxl.dtype | None = None,
        half_to_float: bool = False,
        _stacklevel: int = 3,
    ) -> popxl.Tensor:
        t = ops.reshape(input if dtype is None else cast_like(input, dtype), input.shape or (1,))
        return ops.reshape(kind(t, axis=axis_of(input, dim)), input.shape)

    return lowers(*names)(lowering)


def _softmax_gradient(g: popxl.Tensor, out: popxl.Tensor, axis: int) -> popxl.Tensor:
    weighted = g * out
    return weighted - out * ops.sum(weighted, axis, keepdims=True)


def _log_softmax_gradient(g: popxl.Tensor, out: popxl.Tensor, axis: int) -> popxl.Tensor:
    return g - ops.exp(out) * ops.sum(g, axis, keepdims=True)


softmax = _along_a_dim(
    "torch.softmax",
    "aten._softmax",
    kind=jax_op(title="Softmax", gradient={"input": _softmax_gradient})(
        round_once(lambda input, *, axis: sums.softmax(input, axis))
    ),
)
log_softmax = _along_a_dim(
    "torch.log_softmax",
    "aten._log_softmax",
    kind=jax_op(title="LogSoftmax", gradient={"input": _log_softmax_gradient})(
        round_once(lambda input, *, axis: sums.log_softmax(input, axis))
    ),
)


@jax_op(title="MaskedSoftmax", gradient={"input": _softmax_gradient})
@round_once
def masked_softmax(input: Any, *, axis: int) -> Any:
    """Softmax with zeros for fully masked rows, which contain only negative infinities."""
    hidden = jnp.all(jnp.isneginf(input), axis, keepdims=True)
    return jnp.where(hidden, 0, sums.softmax(input, axis))


_along_a_dim("aten._safe_softmax", kind=masked_softmax)


# Embeddings -----------------------------------------------------------------------------------------------------------

_paced = OpKind("Pace", lambda rows, pace: rows, gradient={"rows": lambda g, pace: g * pace}, key="poptorch.Pace")
"""Identity of rows, with scaled gradients."""


@jax_op(title="EmbeddingPace")
def _pace(indices: Any, *, rows: int, padding_idx: int | None, by_frequency: bool) -> Any:
    """Gradient scale per looked-up row: 0 for padding, inverse frequency if requested."""
    pace = jnp.ones(indices.shape, jnp.float32)
    if by_frequency:
        pace = pace / jnp.bincount(indices.reshape(-1), length=rows)[indices]
    return pace if padding_idx is None else jnp.where(indices == padding_idx, 0, pace)


def _looked_up(
    weight: popxl.Tensor, indices: popxl.Tensor, padding_idx: int | None, by_frequency: bool
) -> popxl.Tensor:
    """Rows of the embedding table. A negative `padding_idx` counts from the end."""
    rows = weight.shape[0]
    out = ops.gather(weight, indices)
    if padding_idx is None and not by_frequency:
        return out
    padding_idx = None if padding_idx is None else padding_idx % rows
    pace = _pace(indices, rows=rows, padding_idx=padding_idx, by_frequency=by_frequency)
    return _paced(out, cast_like(ops.reshape(pace, (*indices.shape, 1)), weight.dtype))


@lowers("torch.embedding")
def embedding(
    input: popxl.Tensor,
    weight: popxl.Tensor,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    **others: Any,
) -> popxl.Tensor:
    return _looked_up(weight, input, padding_idx, scale_grad_by_freq)


@lowers("aten.embedding")
def aten_embedding(
    weight: popxl.Tensor,
    indices: popxl.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> popxl.Tensor:
    return _looked_up(weight, indices, None if padding_idx < 0 else padding_idx, scale_grad_by_freq)


@jax_op("aten.embedding_renorm")
def embedding_renorm(input: Any, indices: Any, *, max_norm: float, norm_type: float) -> Any:
    """Embedding table with looked-up rows scaled down to at most `max_norm`."""
    used = jnp.zeros((len(input), 1), bool).at[indices.reshape(-1)].set(True)
    return jnp.where(used, renormed(widen(input), p=norm_type, dim=0, maxnorm=max_norm), input)


@lowers("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(
    weight: popxl.Tensor,
    indices: popxl.Tensor,
    offsets: popxl.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: popxl.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> popxl.Tensor:
    padding = None if padding_idx < 0 else padding_idx
    rows = _looked_up(weight, indices, padding, scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * ops.reshape(per_sample_weights, (-1, 1))
    bag_of = _bag_of(offsets, count=indices.nelms)
    bags = offsets.shape[0] - include_last_offset
    return _bagged(rows, bag_of, indices, bags=bags, mode=("sum", "mean", "max")[mode], padding_idx=padding)


@jax_op(title="BagOf")
def _bag_of(offsets: Any, *, count: int) -> Any:
    """Bag number of each row. Offsets mark bag starts; rows after a trailing end offset belong to no bag."""
    return jnp.searchsorted(offsets, jnp.arange(count), side="right").astype(jnp.int32) - 1


@jax_op(title="Bag")
def _bagged(rows: Any, bag_of: Any, indices: Any, *, bags: int, mode: str, padding_idx: int | None) -> Any:
    """Sum, mean or maximum per bag, without padding rows; 0 for empty bags."""
    rows = widen(rows)
    bag_of = bag_of if padding_idx is None else jnp.where(indices == padding_idx, bags, bag_of)
    counts = jax.ops.segment_sum(jnp.ones(bag_of.shape, rows.dtype), bag_of, bags)[:, None]
    if mode == "max":  # the first of equal ones; NaN counts only as the first row of its bag
        number = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        is_first = number == jnp.take(jax.ops.segment_min(number, bag_of, bags), bag_of, 0, mode="clip")
        compared = jnp.where(jnp.isnan(rows), jnp.where(is_first, jnp.inf, -jnp.inf), jax.lax.stop_gradient(rows))
        largest = jax.ops.segment_max(compared, bag_of, bags)
        is_largest = compared == jnp.take(largest, bag_of, 0, mode="clip")
        first = jax.ops.segment_min(jnp.where(is_largest, number, len(rows)), bag_of, bags)
        return jnp.where(counts > 0, jnp.take_along_axis(rows, first, 0, mode="clip"), 0)
    total = jax.ops.segment_sum(rows, bag_of, bags)
    return total / jnp.maximum(counts, 1) if mode == "mean" else total
