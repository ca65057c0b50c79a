"""Reductions and cumulative ops: sums, extremes, statistics, norms, distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import popxl
from poptorch.lowering.emission import wanted
from poptorch.lowering.operands import at_least_1d, axes_of, axis_of, cast_like, promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import dtypes, ops
from popxl.extend.kernels import round_once, widen

Dims = int | Sequence[int] | None

# Over dimensions ------------------------------------------------------------------------------------------------------


def _over_dims(
    name: str, op: Callable[[popxl.Tensor, tuple[int, ...]], popxl.Tensor], computed_in: popxl.dtype | None = None
) -> None:
    """Declare a reduction over dims, computed in dtype `computed_in` or the result's dtype."""

    @lowers(f"aten.{name}")
    def lowering(
        input: popxl.Tensor, dim: Dims = None, keepdim: bool = False, dtype: popxl.dtype | None = None
    ) -> popxl.Tensor:
        return op(cast_like(input, computed_in or wanted().dtype), axes_of(input, dim))


def _of_axes(title: str, function: Callable[..., Any], **settings: Any) -> Callable[..., popxl.Tensor]:
    """Define an op from a JAX function `(input, axes)`."""
    kind = jax_op(title=title, **settings)(lambda input, *, axes: function(input, axes))
    return lambda t, axes: kind(t, axes=axes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def _extreme(find: Callable[..., Any], among_none: bool, t: Any, axes: tuple[int, ...]) -> Any:
    """Maxima or minima. Ties share the gradient; with `among_none`, NaNs do as well."""
    return find(t, axes)


def _extreme_forward(find: Callable[..., Any], among_none: bool, t: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    out = find(t, axes)
    return out, (t, out)


def _extreme_backward(
    find: Callable[..., Any], among_none: bool, axes: tuple[int, ...], residuals: tuple[Any, Any], g: Any
) -> tuple[Any]:
    t, out = residuals
    g, out = (jnp.expand_dims(each, axes) for each in (g, out))
    winners = (t == out) | (jnp.isnan(t) & jnp.isnan(out)) if among_none else t == out
    return (g * winners.astype(g.dtype) / winners.sum(axes, keepdims=True).astype(g.dtype),)


_extreme.defvjp(_extreme_forward, _extreme_backward)

_over_dims("sum", ops.sum)
_over_dims("mean", ops.mean)
_over_dims("prod", ops.prod)
_over_dims("logsumexp", ops.logsumexp)
# Unlike the ops of popxl, these share the gradient evenly among equal elements.
_over_dims("amax", amax := _of_axes("Amax", partial(_extreme, jnp.max, False)))
_over_dims("amin", amin := _of_axes("Amin", partial(_extreme, jnp.min, False)))
_over_dims("any", _of_axes("Any", jnp.any, gradient=None), computed_in=dtypes.bool)
_over_dims("all", _of_axes("All", jnp.all, gradient=None), computed_in=dtypes.bool)
_over_dims("count_nonzero", _of_axes("CountNonzero", jnp.count_nonzero, gradient=None), computed_in=dtypes.bool)
for _name, _function in (("max", jnp.max), ("min", jnp.min)):
    _of_all = _of_axes(_name.capitalize(), partial(_extreme, _function, True))
    lowers(f"aten.{_name}.default", f"aten.{_name}.unary_out")(
        lambda input, of_all=_of_all: of_all(input, axes_of(input, None))
    )


# Selecting one element of each line -----------------------------------------------------------------------------------


@jax_op(title="PickGrad")
def _pick_grad(g: Any, place: Any, *, axis: int, size: tuple[int, ...]) -> Any:
    g, place = (jnp.expand_dims(t, axis) for t in (g, place))
    return jnp.where(lax.broadcasted_iota(place.dtype, size, axis) == place, g, jnp.zeros((), g.dtype))


def picking(names: str, title: str, find: Callable[..., Any]) -> None:
    """Declare ops that select one element per line along a dimension, with its index.

    Args:
        find: JAX function of lines along the last axis, and of further attributes, which gives the places.
    """

    def pick(input: Any, *, axis: int, **settings: Any) -> tuple[Any, Any]:
        lines = jnp.moveaxis(input, axis, -1)
        index = find(widen(lines), **settings).astype(jnp.int32)
        return jnp.take_along_axis(lines, index[..., None], -1)[..., 0], index

    gradient = {"input": lambda g, places, input_spec, axis: _pick_grad(g, places, axis=axis, size=input_spec.shape)}
    kind = jax_op(title=title, gradient=gradient, result=("values", "places"))(pick)

    @lowers(*(f"aten.{name}" for name in names.split()))
    def lowering(input: popxl.Tensor, dim: int = -1, keepdim: bool = False, **how: Any) -> Any:
        return kind(at_least_1d(input), axis=axis_of(input, dim), **how)


picking("max.dim max.dim_max", "Max", partial(jnp.argmax, axis=-1))
picking("min.dim min.dim_min", "Min", partial(jnp.argmin, axis=-1))


def _define_arg_reduction(name: str) -> None:
    @lowers(f"aten.{name}")
    def lowering(input: popxl.Tensor, dim: int | None = None, keepdim: bool = False) -> popxl.Tensor:
        lines = ops.reshape(input, (input.nelms,)) if dim is None else at_least_1d(input)
        return getattr(ops, name)(lines, axis_of(lines, dim or 0))


_define_arg_reduction("argmax")
_define_arg_reduction("argmin")


@lowers("aten.aminmax")
def aminmax(input: popxl.Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[popxl.Tensor, ...]:
    axes = axes_of(input, dim)
    return amin(input, axes), amax(input, axes)


# Mean and variance ----------------------------------------------------------------------------------------------------


@jax_op(title="Variance")
@round_once
def _variance(input: Any, *, axes: tuple[int, ...], correction: float, is_root: bool) -> Any:
    variance = _squared_deviation(input, axes, correction)
    return _root(variance) if is_root else variance


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _squared_deviation(t: Any, axes: tuple[int, ...], correction: float) -> Any:
    """Variance. The mean is not differentiated, which matters only for divisor 0."""
    deviation = t - jnp.mean(t, axes, keepdims=True)
    squares = jnp.sum(jnp.real(deviation * jnp.conj(deviation)), axes)
    return squares / jnp.maximum(_divisor(t, axes, correction), 0)


def _divisor(t: Any, axes: tuple[int, ...], correction: float) -> Any:
    return jnp.float32(math.prod(t.shape[axis] for axis in axes) - correction)


def _deviation_backward(axes: tuple[int, ...], correction: float, t: Any, g: Any) -> tuple[Any]:
    deviation = jnp.conj(t - jnp.mean(t, axes, keepdims=True))
    return (2 / _divisor(t, axes, correction) * jnp.expand_dims(g, axes) * deviation,)


_squared_deviation.defvjp(lambda t, *how: (_squared_deviation(t, *how), t), _deviation_backward)


def _root(t: Any) -> Any:
    """Square root without gradient flow at 0."""
    return jnp.where(t == 0, t, jnp.sqrt(jnp.where(t == 0, 1, t)))


def _spread_of_numbers(name: str, is_root: bool, with_mean: bool) -> None:
    @lowers(f"aten.{name}")
    def lowering(
        input: popxl.Tensor, dim: Dims = None, correction: float | None = None, keepdim: bool = False
    ) -> popxl.Tensor | tuple[popxl.Tensor, popxl.Tensor]:
        axes = axes_of(input, dim)
        made = _variance(input, axes=axes, correction=1 if correction is None else correction, is_root=is_root)
        return (made, ops.mean(input, axes)) if with_mean else made


_spread_of_numbers("var", is_root=False, with_mean=False)
_spread_of_numbers("std", is_root=True, with_mean=False)
_spread_of_numbers("var_mean", is_root=False, with_mean=True)
_spread_of_numbers("std_mean", is_root=True, with_mean=True)


# Norms and distances --------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def norm(t: Any, order: float, axes: tuple[int, ...], shares_gradient: bool = True) -> Any:
    """(Σ |t|ᵖ)^(1/p), and its limits: maximum, minimum, number of nonzero elements.

    Where the norm is 0, and where an element is, the gradient is 0 (for orders up to 2; beyond, it is so anyway). Each
    of several largest or smallest elements has its share of the gradient, or (unless `shares_gradient`) all of it.
    """
    size = jnp.abs(t)
    if math.isinf(order):
        return (jnp.max if order > 0 else jnp.min)(size, axes)
    if order == 0:
        return jnp.sum(size != 0, axes, dtype=size.dtype)
    if order == 1:
        return jnp.sum(size, axes)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axes))
    return jnp.sum(size**order, axes) ** (1 / order)


def _norm_forward(t: Any, order: float, axes: tuple[int, ...], shares_gradient: bool) -> tuple[Any, Any]:
    out = norm(t, order, axes)
    return out, (t, out)


def _norm_backward(
    order: float, axes: tuple[int, ...], shares_gradient: bool, residuals: tuple[Any, Any], g: Any
) -> tuple[Any]:
    t, out = residuals
    g, out = (jnp.expand_dims(each, axes) for each in (g, out))
    size, is_zero = jnp.abs(t), (t == 0) | (out == 0)
    if math.isinf(order):
        winners = size == out
        share = winners / jnp.sum(winners, axes, keepdims=True) if shares_gradient else winners
    elif order == 0:
        share = jnp.zeros_like(t)
    else:
        share = jnp.where(is_zero, 0, jnp.where(is_zero, 1, size / out) ** (order - 1))
    sign = jnp.conj(jnp.sign(t))
    return (
        g * (jnp.where(jnp.isnan(t), 0, sign) if shares_gradient and order == 1 or math.isinf(order) else sign) * share,
    )


norm.defvjp(_norm_forward, _norm_backward)


@jax_op(title="VectorNorm")
@round_once
def vector_norm(input: Any, *, order: float, axes: tuple[int, ...]) -> Any:
    return norm(input, order, axes)


@lowers("aten.linalg_vector_norm", "aten.norm")
def linalg_vector_norm(
    input: popxl.Tensor,
    ord: float = 2,
    p: float | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: popxl.dtype | None = None,
) -> popxl.Tensor:
    t = input if dtype is None else cast_like(input, dtype)
    return vector_norm(t, order=float(ord if p is None else p), axes=axes_of(input, dim))


@lowers("aten.dist")
def dist(input: popxl.Tensor, other: popxl.Tensor, p: float = 2) -> popxl.Tensor:
    difference = ops.sub(*promoted(input, other))
    return vector_norm(difference, order=float(p), axes=axes_of(difference, None))


@jax_op("aten._cdist_forward", title="Cdist")
@round_once
def cdist(x1: Any, x2: Any, *, p: float, compute_mode: int | None = None) -> Any:
    return norm(x1[..., :, None, :] - x2[..., None, :, :], p, (x1.ndim,), False)


@jax_op("aten._euclidean_dist", title="EuclideanDistance")
@round_once
def euclidean_distance(x1: Any, x2: Any) -> Any:
    """Euclidean distances by a matrix product: less accurate, much faster."""
    lengths = jnp.sum(x1 * x1, -1)[..., :, None] + jnp.sum(x2 * x2, -1)[..., None, :]
    return _root(jnp.maximum(lengths - 2 * jnp.matmul(x1, jnp.swapaxes(x2, -1, -2)), 0))


@jax_op("aten._pdist_forward", title="Pdist")
@round_once
def pdist(input: Any, *, p: float = 2) -> Any:
    first, second = np.triu_indices(input.shape[0], 1)
    return norm(input[first] - input[second], p, (1,), False)


# Running --------------------------------------------------------------------------------------------------------------


def _running(name: str, function: Callable[..., Any]) -> None:
    kind = jax_op(title=name.capitalize())(round_once(lambda input, *, axis: function(input, axis)))

    @lowers(f"aten.{name}")
    def lowering(input: popxl.Tensor, dim: int, dtype: popxl.dtype | None = None) -> popxl.Tensor:
        return kind(at_least_1d(cast_like(input, wanted().dtype)), axis=axis_of(input, dim))


_running("cumsum", lax.cumsum)
_running("cumprod", lax.cumprod)
_running("logcumsumexp", lax.cumlogsumexp)


def _running_extreme(name: str, is_beyond: Callable[[Any, Any], Any]) -> None:
    """Declare a cumulative maximum or minimum. Ties choose the last element; NaN exceeds all numbers."""

    def later(first: Any, second: Any) -> Any:
        wins = jnp.isnan(second[0]) | (is_beyond(second[0], first[0]) & ~jnp.isnan(first[0]))
        return tuple(jnp.where(wins, b, a) for a, b in zip(first, second, strict=True))

    @jax_op(title=name.capitalize(), result=("values", "places"))
    def running(input: Any, *, axis: int) -> tuple[Any, Any]:
        positions = lax.broadcasted_iota(jnp.int32, input.shape, axis)
        _, winners = lax.associative_scan(later, (lax.stop_gradient(input), positions), axis=axis)
        return jnp.take_along_axis(widen(input), winners, axis).astype(input.dtype), winners

    @lowers(f"aten.{name}")
    def lowering(input: popxl.Tensor, dim: int) -> Any:
        return running(at_least_1d(input), axis=axis_of(input, dim))


_running_extreme("cummax", jnp.greater_equal)
_running_extreme("cummin", jnp.less_equal)


# Counting -------------------------------------------------------------------------------------------------------------


@jax_op("aten.histc", gradient=None)
def histc(input: Any, *, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Histogram counts of equal-width bins; out-of-range elements are ignored."""
    t = input.reshape(-1)
    low, high = (jnp.min(t), jnp.max(t)) if min == max else (min, max)
    widen = jnp.where(low == high, 1, 0)  # all elements are the same
    low, high = low - widen, high + widen
    bin_index = jnp.minimum(jnp.floor((t - low) / (high - low) * bins), bins - 1)
    bin_index = jnp.where((t >= low) & (t <= high), bin_index, bins).astype(jnp.int32)
    return jnp.zeros(bins, input.dtype).at[bin_index].add(1, mode="drop")


@jax_op("aten.histogram.bin_ct", gradient=None)
def histogram(
    input: Any, weight: Any = None, *, bins: int, range: tuple[float, float] | None = None, density: bool = False
) -> tuple[Any, Any]:
    return jnp.histogram(input, bins, range, weight, density)


@jax_op("torch.bincount", gradient=None)
def bincount(input: Any, weights: Any = None, *, minlength: int = 0) -> Any:
    return jnp.bincount(input, None if weights is None else weights.astype(jnp.float32), length=minlength)


# Statistics -----------------------------------------------------------------------------------------------------------


@jax_op("torch.cov")
@round_once
def cov(input: Any, fweights: Any = None, aweights: Any = None, *, correction: int = 1) -> Any:
    return jnp.cov(input, ddof=correction, fweights=fweights, aweights=aweights)


jax_op("torch.corrcoef", title="Corrcoef")(round_once(lambda input: jnp.corrcoef(input)))


# Of segments ----------------------------------------------------------------------------------------------------------

_NEUTRAL = {"sum": 0, "mean": 0, "prod": 1, "max": -math.inf, "min": math.inf}


@jax_op("aten.segment_reduce")
@round_once
def segment_reduce(
    data: Any,
    lengths: Any = None,
    offsets: Any = None,
    indices: None = None,
    *,
    reduce: str,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    """Reduce contiguous segments; rowwise for batched segments."""
    if offsets is None:
        offsets = jnp.pad(jnp.cumsum(lengths, -1), [(0, 0)] * (lengths.ndim - 1) + [(1, 0)])
    of_row = partial(_segment_reduction, reduce=reduce, initial=initial)
    for _ in range(offsets.ndim - 1):
        of_row = jax.vmap(of_row)
    return of_row(data, offsets)


def _segment_reduction(data: Any, offsets: Any, reduce: str, initial: float | None) -> Any:
    positions = jnp.arange(len(data))
    is_inside = (offsets[:-1, None] <= positions) & (positions < offsets[1:, None])
    is_inside = is_inside.reshape(*is_inside.shape, *(1,) * (data.ndim - 1))
    start = _NEUTRAL[reduce] if initial is None else initial
    each = jnp.where(is_inside, data, _NEUTRAL[reduce])
    if reduce in ("max", "min"):
        return getattr(jnp, reduce)(each, 1, initial=start)
    if reduce == "prod":
        return each.prod(1) * start
    total, count = each.sum(1) + start, is_inside.sum(1)
    if reduce == "sum":
        return total
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan if initial is None else start)
