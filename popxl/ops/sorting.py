"""Sorting, searching, counting: positions of the largest elements, and numbers of elements between levels.

The running sum, `cumsum`, is in `popxl.ops.reduce`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.ops.families import REAL, public
from popxl.ops.kernels.elements import full_after
from popxl.ops.precision import widen
from popxl.values.shapes import flag, integer, of_shape, one_axis, reduced_shape
from popxl.values.spec import TensorSpec

# Positions of extreme elements --------------------------------------------------------------------------------------


class Search(Protocol):
    """An op selecting one element per line of a tensor."""

    kind: OpKind

    def __call__(self, t: Tensor, dim: int = 0, keepdim: bool = False) -> Tensor: ...


def _search(name: str, function: Any, which: str) -> Search:
    """Declare an op that finds the place of the extreme element along `dim`."""

    def lowering(t: Any, *, dim: int, keepdim: bool) -> Any:
        return function(t, axis=dim, keepdims=keepdim)

    def shape(t: Any, *, dim: int, keepdim: bool) -> TensorSpec:
        one_axis(dim, len(t.shape))
        return TensorSpec(reduced_shape(t.shape, dim, keepdim), dtypes.int32)

    kind = OpKind(f"Arg{which.capitalize()}", lowering, shape=shape, result=f"{name}_out", gradient=None, traits=REAL)

    def op(t: Tensor, dim: int = 0, keepdim: bool = False) -> Tensor:
        if keepdim is None:
            raise TypeError(f"{name}: `keepdim` must be True or False; got None.")
        return kind(t, dim=integer(dim, f"{name}: `dim`"), keepdim=flag(keepdim, f"{name}: `keepdim`"))

    largest = {"max": "largest", "min": "smallest"}[which]
    doc = f"""The place of the {largest} element along a dimension; of several equal ones, the first.

    NaN counts as the {largest}, as in NumPy. No gradient flows.

    Args:
        t: tensor of rank 1 or more.
        dim: the dimension to search; negative ones count from the back.
        keepdim: keep the dimension, with size 1.

    Returns:
        A new int32 tensor of the shape of `t` without `dim`.

    Raises:
        PopxlError: if there is no such dimension.
        TypeError: if `dim` is no integer, or `keepdim` is `None`.

    See also: `numpy.{name}`, `torch.{name}`.

    Example:
        >>> place = ops.{name}(x, dim=-1)"""
    return public(op, kind, name, doc)


argmax = _search("argmax", jnp.argmax, "max")
argmin = _search("argmin", jnp.argmin, "min")

# The extreme elements -----------------------------------------------------------------------------------------------


def _topk_lowering(t: Any, *, k: int, axis: int, largest: bool) -> tuple[Any, Any]:
    lines = jnp.moveaxis(t, axis, -1)
    _, places = jax.lax.top_k(_ranks(lines, largest), k)
    values = jnp.take_along_axis(lines, places, axis=-1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis)


def _ranks(t: Any, largest: bool) -> Any:
    """Numbers in the order of the elements, or in the opposite order. Equal elements have equal numbers."""
    if not jnp.issubdtype(t.dtype, jnp.floating):
        return t if largest else ~t  # unlike -t, this neither overflows nor wraps
    t = widen(t)  # XLA sorts float16 and bfloat16 a hundred times slower
    # JAX distinguishes 0 from -0 here, and one NaN from another.
    t = jnp.where(jnp.isnan(t), jnp.nan, jnp.where(t == 0, jnp.zeros((), t.dtype), t))
    return t if largest else -t


def _topk_specs(t: Any, *, k: int, axis: int, largest: bool) -> tuple[TensorSpec, TensorSpec]:
    at = one_axis(axis, len(t.shape))
    if not 0 <= k <= t.shape[at]:
        raise PopxlError(f"`k` is {k}; expected 0 to {t.shape[at]}, the size of dimension {axis}.")
    shape = (*t.shape[:at], k, *t.shape[at + 1 :])
    return TensorSpec(shape, t.dtype), TensorSpec(shape, dtypes.int32)


def _scatter_gradient(g: Any, places: Any, *, axis: int, shape: tuple[int, ...]) -> Any:
    return jnp.put_along_axis(full_after(shape, 0, g.dtype, after=g), places, g, axis, inplace=False)


_topk_grad = OpKind("TopKGrad", _scatter_gradient, shape=of_shape)
_topk = OpKind(
    "TopK",
    _topk_lowering,
    shape=_topk_specs,
    gradient={
        "t": lambda g, topk_out_indices, t_spec, axis: _topk_grad(g, topk_out_indices, axis=axis, shape=t_spec.shape)
    },
    result=("topk_out_value", "topk_out_indices"),
    traits=REAL,
)


def topk(
    t: Tensor,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    available_memory_proportion: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The `k` largest or smallest elements along an axis, and their places.

    Of equal elements those with lower places come first. NaN counts as larger than all numbers. The gradient of the
    values goes to the selected elements.

    Args:
        t: tensor of rank 1 or more.
        k: number of elements; at most the size of the axis.
        axis: the dimension to search; negative ones count from the back.
        largest: pick the largest elements, else the smallest.
        sorted: whether the results must be in order: descending for the largest, ascending for the smallest. They
            always are.
        available_memory_proportion: accepted for programs that tune memory; no effect.

    Returns:
        `(values, places)`, of the shape of `t` with `k` in place of the size of `axis`: new tensors, the first of the
        dtype of `t`, the second int32.

    Raises:
        PopxlError: if there is no such axis, or it has fewer than `k` elements.
        TypeError: if `k` or `axis` is not an integer.

    See also: `torch.topk`.

    Example:
        >>> probs, classes = ops.topk(probs, 5, axis=-1, largest=True, sorted=True)
    """
    return _topk(
        t, k=integer(k, "topk: `k`"), axis=integer(axis, "topk: `axis`"), largest=flag(largest, "topk: `largest`")
    )


# How many elements there are ----------------------------------------------------------------------------------------


def _bin_counts(t: Any, *, levels: tuple[float, ...], absolute_of_input: bool) -> Any:
    numbers = jnp.abs(t.ravel()) if absolute_of_input else t.ravel()
    with np.errstate(over="ignore"):  # levels beyond float16 are infinite
        bounds = np.asarray(levels, t.dtype)
    # Unrolled, the search is three times as fast as the loop that is the default.
    bins = jnp.searchsorted(jnp.asarray(bounds), numbers, side="right", method="scan_unrolled")
    return jnp.bincount(bins, length=len(levels) + 1)


def _bins(t: Any, *, levels: tuple[float, ...], absolute_of_input: bool) -> TensorSpec:
    if not all(low < high for low, high in pairwise(levels)):
        raise ValueError(f"`levels` have to increase from each to the next; got {levels}.")
    if not (t.dtype.is_half or t.dtype is dtypes.float32):
        raise PopxlError("only tensors of float16, bfloat16 and float32 are counted; convert `t` with `ops.cast`.")
    return TensorSpec((len(levels) + 1,), dtypes.uint32)


_histogram = OpKind("Histogram", _bin_counts, shape=_bins, gradient=None, traits=REAL)


def histogram(t: Tensor, levels: Iterable[float], absolute_of_input: bool) -> Tensor:
    """Count the elements of `t` between levels. Unlike NumPy's, the first and the last bin have no outer end.

    The first bin counts x < levels[0]; bin i, levels[i - 1] <= x < levels[i]; the last one x >= levels[-1]. NaN counts
    in the last bin. No gradient flows.

    Args:
        t: float16, bfloat16 or float32 tensor of any shape.
        levels: the bounds between the bins, increasing. They are converted to the dtype of `t`.
        absolute_of_input: count the absolute values of the elements.

    Returns:
        A new uint32 tensor of shape `(len(levels) + 1,)`.

    Raises:
        ValueError: if the levels do not increase.
        TypeError: if the levels are no sequence of numbers.
        PopxlError: for other dtypes.

    See also: `numpy.histogram`.

    Example:
        >>> counts = ops.histogram(gradient, [1e-6, 1e-3, 1.0], absolute_of_input=True)
    """
    try:
        bounds = tuple(float(level) for level in levels)
    except (TypeError, ValueError):
        raise TypeError(f"histogram: `levels` must be a sequence of numbers; got {levels!r}.") from None
    return _histogram(t, levels=bounds, absolute_of_input=flag(absolute_of_input, "histogram: `absolute_of_input`"))
