"""Sorting, order statistics, binary search."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.operands import Number, at_least_1d, axis_of, cast_like, promoted
from poptorch.lowering.reductions import picking
from poptorch.lowering.registry import jax_op, lowers
from popxl import dtypes, ops
from popxl.extend.kernels import round_once, widen


def _ordered(t: popxl.Tensor) -> popxl.Tensor:
    """A tensor with a sortable dtype and at least one axis."""
    return cast_like(at_least_1d(t), dtypes.int8) if t.dtype is dtypes.bool else at_least_1d(t)


@lowers("aten.sort")
def sort(
    input: popxl.Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Sort all elements; always stable."""
    lines, axis = _ordered(input), axis_of(input, dim)
    return ops.topk(lines, lines.shape[axis], axis, largest=descending, sorted=True)


@lowers("aten.topk")
def topk(
    input: popxl.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[popxl.Tensor, popxl.Tensor]:
    return ops.topk(_ordered(input), k, axis_of(input, dim), largest, sorted)


# Order statistics -----------------------------------------------------------------------------------------------------


def _kth(lines: Any, *, k: int) -> Any:
    return jnp.argsort(lines, stable=True)[..., k - 1]


def _is_nan(lines: Any) -> Any:
    return lines != lines


def _median(lines: Any) -> Any:
    """Index of the median: the lower middle element for even lengths; a NaN, if present."""
    nan = _is_nan(lines)
    return jnp.where(jnp.any(nan, -1), jnp.argmax(nan, -1), _kth(lines, k=(lines.shape[-1] + 1) // 2))


def _nanmedian(lines: Any) -> Any:
    middle = jnp.maximum(jnp.sum(~_is_nan(lines), -1, keepdims=True) - 1, 0) // 2
    return jnp.take_along_axis(jnp.argsort(lines, stable=True), middle, -1)[..., 0]


def _mode(lines: Any) -> Any:
    """Index of the mode: the last occurrence of the smallest most frequent element."""
    order = jnp.argsort(lines, stable=True)
    ordered = jnp.take_along_axis(lines, order, -1)
    number = lax.broadcasted_iota(jnp.int32, lines.shape, lines.ndim - 1)
    is_new = jnp.concatenate([jnp.ones_like(number[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], -1)
    begin = lax.cummax(jnp.where(is_new, number, 0), axis=lines.ndim - 1)
    return jnp.take_along_axis(order, jnp.argmax(number - begin, -1, keepdims=True), -1)[..., 0]


picking("kthvalue", "KthValue", _kth)
picking("median.dim median.dim_values", "Median", _median)
picking("nanmedian.dim nanmedian.dim_values", "NanMedian", _nanmedian)
picking("mode", "Mode", _mode)


@jax_op(title="EvenShare")
def _even_share(g: Any, input: Any, out: Any) -> Any:
    """Gradient shared equally by all elements equal to the result."""
    winners = (input == out) | (_is_nan(input) & _is_nan(out))
    return jnp.where(winners, g / jnp.sum(winners).astype(g.dtype), 0)


def _define_full_reduction(name: str, title: str, find: Callable[[Any], Any]) -> None:
    gradient = {"input": lambda g, input, out: _even_share(g, input, out)}
    kind = jax_op(title=title, gradient=gradient)(lambda input: input[find(widen(input))])

    @lowers(f"aten.{name}.default")
    def lowering(input: popxl.Tensor) -> popxl.Tensor:
        if not input.nelms and input.dtype.is_floating_point:
            return popxl.constant(math.nan, input.dtype)
        return kind(ops.reshape(input, (input.nelms,)))


_define_full_reduction("median", "MedianOfAll", _median)
_define_full_reduction("nanmedian", "NanMedianOfAll", _nanmedian)


def _quantile(name: str, function: Callable[..., Any]) -> None:
    @jax_op(title=name.capitalize())
    @round_once
    def quantile(input: Any, q: Any = 0.5, *, axis: int | None, method: str, keepdims: bool) -> Any:
        return function(input, jnp.asarray(q), axis, method=method, keepdims=keepdims)

    @lowers(f"torch.{name}")
    def lowering(
        input: popxl.Tensor,
        q: Number | popxl.Tensor,
        dim: int | None = None,
        keepdim: bool = False,
        interpolation: str = "linear",
    ) -> popxl.Tensor:
        return quantile(at_least_1d(input), q, axis=dim, method=interpolation, keepdims=keepdim)


_quantile("quantile", jnp.quantile)
_quantile("nanquantile", jnp.nanquantile)


# Positions in sorted sequences ----------------------------------------------------------------------------------------


@lowers("aten.searchsorted")
def searchsorted(
    sorted_sequence: popxl.Tensor,
    input: popxl.Tensor | Number,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: popxl.Tensor | None = None,
) -> popxl.Tensor:
    sequence, values = promoted(sorted_sequence, input)
    return found(sequence, values, sorter, side=side or ("right" if right else "left"))


@lowers("aten.bucketize")
def bucketize(
    input: popxl.Tensor | Number, boundaries: popxl.Tensor, out_int32: bool = False, right: bool = False
) -> popxl.Tensor:
    return searchsorted(boundaries, input, right=right)


@jax_op(title="SearchSorted", gradient=None)
def found(sequence: Any, values: Any, sorter: Any = None, *, side: str) -> Any:
    """Insertion positions of values in one sorted sequence, or line by line in several."""
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    search = partial(_search, is_before=jnp.less_equal if side == "right" else jnp.less)
    for _ in range(sequence.ndim - 1):
        search = jax.vmap(search)
    return search(sequence, values)


def _search(sequence: Any, values: Any, is_before: Callable[[Any, Any], Any]) -> Any:
    """Binary search with PyTorch's steps, which decide where NaN belongs: behind all numbers, and behind each NaN."""
    low, high = jnp.zeros(values.shape, jnp.int32), jnp.full(values.shape, len(sequence), jnp.int32)
    for _ in range(len(sequence).bit_length()):
        middle = (low + high) // 2
        seen = jnp.take(sequence, middle, mode="clip")
        is_right = (low < high) & (is_before(seen, values) | _is_nan(seen) | _is_nan(values))
        low, high = jnp.where(is_right, middle + 1, low), jnp.where(is_right, high, middle)
    return low
