"""Reductions: ops that turn some dimensions of a tensor into one number each; and running sums.

In a rule, `g` and `out` lack the reduced dimensions; `spread` restores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import ShardingRule
from popxl.ops.elementwise import abs, sign, ties_grad
from popxl.ops.families import REAL, SUM, SUM_OF_FUNCTION, reduction
from popxl.ops.kernels.sums import largest, summed
from popxl.ops.precision import round_once, widen
from popxl.ops.shape import reshape
from popxl.values.shapes import (
    flag,
    integer,
    integer_or_integers,
    like_first,
    number,
    of_shape,
    one_axis,
    reduced_shape,
    reduction_axes,
)
from popxl.values.spec import TensorSpec

_broadcast = OpKind(
    "Expand",
    lambda t, *, shape: jnp.broadcast_to(t, shape),
    shape=lambda t, *, shape: TensorSpec(shape, t.dtype),
    gradient={"t": lambda g: g},
    traits=[
        ShardingRule(lambda shapes, attributes: f"...->{'_' * (len(attributes['shape']) - len(shapes[0]))}...", ("t",))
    ],
)


def broadcast_back(reduced: Tensor, spec: Any, axis: int | Iterable[int] | None) -> Tensor:
    """Repeat a reduced tensor along the dimensions that were reduced, to the shape of the operand."""
    axes = reduction_axes(axis, len(spec.shape))
    kept = tuple(1 if d in axes else size for d, size in enumerate(spec.shape))
    if reduced.shape != kept:
        reduced = reshape(reduced, kept)
    return reduced if kept == spec.shape else _broadcast(reduced, shape=tuple(spec.shape))


def _mean(t: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    count = math.prod(t.shape[d] for d in axes)
    if not jnp.issubdtype(t.dtype, jnp.integer):
        return summed(t, axes, keepdims) / count
    # The dtype of the sum is explicit because JAX's choice would depend on other parts of the program.
    dtype = jnp.promote_types(t.dtype, jnp.int32 if jnp.issubdtype(t.dtype, jnp.signedinteger) else jnp.uint32)
    return jax.lax.div(jnp.sum(t, axis=axes, keepdims=keepdims, dtype=dtype), jnp.asarray(count, dtype))


def _var(t: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    deviation = t - _mean(t, axes, keepdims=True)
    return _mean(deviation * deviation, axes, keepdims)


sum = reduction(
    "sum",
    summed,
    "The sum of the elements.",
    lambda g, t_spec, axis: broadcast_back(g, t_spec, axis),
    rule=SUM,
)
mean = reduction(
    "mean",
    _mean,
    "The mean of the elements; for integers rounded towards zero, of a sum that wraps at 32 bits or more.",
    rule=SUM,
)
max = reduction(
    "max",
    largest,
    "The largest element. Every element equal to it receives the whole gradient; ties are not split.",
    lambda g, t, out, axis: ties_grad(broadcast_back(g, t, axis), t, broadcast_back(out, t, axis)),
    traits=REAL,
)
min = reduction(
    "min",
    lambda t, axes, keepdims: jnp.min(t, axis=axes, keepdims=keepdims),
    "The smallest element. Every element equal to it receives the whole gradient; ties are not split.",
    lambda g, t, out, axis: ties_grad(broadcast_back(g, t, axis), t, broadcast_back(out, t, axis)),
    traits=REAL,
)
prod = reduction(
    "prod",
    lambda t, axes, keepdims: jnp.prod(t, axis=axes, keepdims=keepdims),
    "The product of the elements. Its gradient is exact where elements are zero.",
)
sumsquare = reduction(
    "sumsquare",
    lambda t, axes, keepdims: summed(t * t, axes, keepdims),
    "The sum of the squares of the elements.",
    lambda g, t, axis: broadcast_back(g, t, axis) * t * 2,
    kind="ReduceSumSquare",
    rule=SUM_OF_FUNCTION,
    traits=REAL,
)
l1 = reduction(
    "l1",
    lambda t, axes, keepdims: summed(jnp.abs(t), axes, keepdims),
    "The sum of the absolute values of the elements.",
    lambda g, t, axis: broadcast_back(g, t, axis) * sign(t),
    rule=SUM_OF_FUNCTION,
    traits=REAL,
)
var = reduction(
    "var",
    _var,
    "The mean of the squares of what the elements are off their mean: divided by their number.",
    traits=REAL,
)


def _std_pullback(g: Any, t: Any, out: Any, *, axis: tuple[int, ...] | None) -> Any:
    axes = reduction_axes(axis, t.ndim)
    slope = (t - _mean(t, axes, keepdims=True)) / (out * math.prod(t.shape[d] for d in axes))
    return jnp.where(out == 0, 0, g * slope)


std_grad = OpKind("ReduceStdGrad", round_once(_std_pullback), shape=lambda g, t, out, *, axis: like_first(t))
std = reduction(
    "std",
    lambda t, axes, keepdims: jnp.sqrt(_var(t, axes, keepdims)),
    "The square root of `var`. Its gradient is 0 where all elements are equal.",
    lambda g, t, out, axis: std_grad(broadcast_back(g, t, axis), t, broadcast_back(out, t, axis), axis=axis),
    traits=REAL,
)
l2_grad = OpKind("ReduceL2Grad", round_once(lambda g, t, out: g * (t / out)), shape=lambda g, t, out: like_first(t))
l2 = reduction(
    "l2",
    lambda t, axes, keepdims: jnp.sqrt(summed(t * t, axes, keepdims)),
    "The square root of the sum of the squares of the elements. Its gradient is NaN where all of them are zero.",
    lambda g, t, out, axis: l2_grad(broadcast_back(g, t, axis), t, broadcast_back(out, t, axis)),
    traits=REAL,
)
logsum_grad = OpKind("ReduceLogSumGrad", round_once(lambda g, out: g / jnp.exp(out)), shape=like_first)
logsum = reduction(
    "logsum",
    lambda t, axes, keepdims: jnp.log(summed(t, axes, keepdims)),
    "The natural logarithm of the sum of the elements.",
    lambda g, t_spec, out, axis: broadcast_back(logsum_grad(g, out), t_spec, axis),
    kind="ReduceLogSum",
)
logsumexp = reduction(
    "logsumexp",
    lambda t, axes, keepdims: jax.nn.logsumexp(t, axis=axes, keepdims=keepdims),
    "The natural logarithm of the sum of the exponentials of the elements, in a form that does not overflow.",
    kind="ReduceLogSumExp",
    traits=REAL,
)


def norm(t: Tensor, ord: float = 2, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """Euclidean norm over some or all axes.

    Args:
        t: tensor of any shape.
        ord: 1 for the sum of the absolute values, 2 for the root of the sum of the squares, `math.inf` for the
            largest absolute value.
        axis: the dimension to reduce, or several; negative ones count from the back; `None` means all.
        keepdims: keep the reduced dimensions, with size 1.

    Returns:
        A new tensor of the same dtype; of complex numbers a real one.

    Raises:
        ValueError: for an unknown `ord`; `TypeError` if it is not a number.
        PopxlError: if there is no such axis.

    See also: `numpy.linalg.norm`, `torch.linalg.vector_norm`.

    Example:
        >>> length = ops.norm(gradient)
    """
    if isinstance(t, Tensor) and t.dtype.is_complex:
        t = abs(t)
    ord = number(ord, "norm: `ord`")
    if ord == 1:
        return l1(t, axis, keepdims)
    if ord == 2:
        return l2(t, axis, keepdims)
    if ord == math.inf:
        return max(abs(t), axis, keepdims)
    raise ValueError(f"norm: `ord` is {ord!r}; expected 1, 2 or math.inf.")


def _order(shape: tuple[int, ...], axis: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Dimension order with reduced axes last, sizes, and number of kept dimensions."""
    axes = reduction_axes(axis, len(shape))
    kept = [d for d in range(len(shape)) if d not in axes]
    return (*kept, *axes), tuple(shape[d] for d in (*kept, *axes)), len(kept)


def _median(t: Any, *, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    order, sizes, kept = _order(t.shape, axis)
    rows = jnp.transpose(t, order).reshape(*sizes[:kept], math.prod(sizes[kept:]))
    place = jnp.argsort(rows, axis=-1, stable=True)[..., (rows.shape[-1] - 1) // 2]
    value = jnp.take_along_axis(rows, place[..., None], axis=-1)[..., 0]
    shape = reduced_shape(t.shape, axis, keepdims)
    return value.reshape(shape), place.reshape(shape).astype(jnp.int32)


def _median_specs(t: Any, *, axis: tuple[int, ...] | None, keepdims: bool) -> tuple[TensorSpec, ...]:
    shape = reduced_shape(t.shape, axis, keepdims)
    return TensorSpec(shape, t.dtype), TensorSpec(shape, dtypes.int32)


def _median_pullback(g: Any, place: Any, *, axis: tuple[int, ...] | None, shape: tuple[int, ...]) -> Any:
    order, sizes, kept = _order(shape, axis)
    rows = (*sizes[:kept], math.prod(sizes[kept:]))
    g, place = (array.reshape(*sizes[:kept], 1) for array in (g, place))
    chosen = jnp.where(place == jnp.arange(rows[-1], dtype=place.dtype), g, 0)
    return jnp.transpose(chosen.reshape(sizes), tuple(sorted(range(len(order)), key=order.__getitem__)))


_median_grad = OpKind("ReduceMedianGrad", _median_pullback, shape=of_shape)
_median_kind = OpKind(
    "ReduceMedian",
    _median,
    shape=_median_specs,
    result=("median_out", "median_indices_out"),
    gradient={
        "t": lambda g, median_indices_out, t_spec, axis: _median_grad(
            g, median_indices_out, axis=axis, shape=t_spec.shape
        )
    },
    traits=REAL,
)
_lamb_square = OpKind(
    "LambSquare",
    lambda t: jnp.sum(jnp.square(t.astype(jnp.float32))),
    shape=lambda t: TensorSpec((), dtypes.float32),
    gradient=None,
    traits=[*REAL, ShardingRule("...->")],
)


def median(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """Median element; for even counts, the lower middle element.

    The whole gradient goes to the selected element: the middle one of several equal ones.

    Args:
        t: tensor of any shape.
        axis: the dimension to reduce, or several; negative ones count from the back; `None` means all.
        keepdims: keep the reduced dimensions, with size 1.

    Returns:
        A new tensor of the same dtype.

    Raises:
        PopxlError: if there is no such axis.

    Example:
        >>> y = ops.median(x, axis=-1)
    """
    return _median_kind(
        t,
        axis=axis if axis is None else integer_or_integers(axis, "median: `axis`"),
        keepdims=flag(keepdims, "median: `keepdims`"),
    )[0]


def lamb_square(t: Tensor) -> Tensor:
    """The sum of the squares of all elements, accumulated and returned in float32. No gradient flows.

    Args:
        t: tensor of any shape.

    Returns:
        A float32 scalar. For a replica-sharded tensor it is the sum over the local shard.

    Example:
        >>> norm = ops.sqrt(ops.lamb_square(w))
    """
    return _lamb_square(t)


def _running(t: Any, *, dim: int, reverse: bool) -> TensorSpec:
    one_axis(dim, len(t.shape))
    return like_first(t)


_cumsum: OpKind = OpKind(
    "CumSum",
    lambda t, *, dim, reverse: jax.lax.cumsum(widen(t), axis=dim % t.ndim, reverse=reverse),
    shape=_running,
    result="cumsum_out",
    gradient={"t": lambda g, dim, reverse: _cumsum(g, dim=dim, reverse=not reverse)},
)


def cumsum(t: Tensor, dim: int = 0) -> Tensor:
    """The running sum along a dimension: element i of the result is the sum of elements 0 to i.

    The gradient is the running sum from the other end.

    Args:
        t: tensor of rank 1 or more.
        dim: the dimension to sum along; negative ones count from the back. The graph also gains an int64 constant of
            this name, as in PopXL; nothing reads it.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        PopxlError: if there is no such dimension.
        TypeError: if `dim` is not an integer.

    See also: `numpy.cumsum`, `torch.cumsum`.

    Example:
        >>> ends = ops.cumsum(lengths)
    """
    dim = integer(dim, "cumsum: `dim`")
    total = _cumsum(t, dim=dim, reverse=False)
    constant(dim, dtypes.int64, "dim")
    return total
