"""Pooling: one number for each window of the spatial axes. Positions of windows are in `popxl.ops.windows`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.kernels.elements import spatial
from popxl.ops.kernels.kernel import Kernel
from popxl.ops.precision import wide_dtype
from popxl.ops.windows import PAD_TYPES, PadType, Windows, windows_over
from popxl.values.shapes import flag, integers, is_known_word, like_first
from popxl.values.spec import TensorSpec

LONG = 16
"""Maximum window size that is combined element by element; longer windows would compile too slowly."""


# Windows of a tensor ------------------------------------------------------------------------------------------------


def _pooled_shape(t: Any, **how: Any) -> TensorSpec:
    n = len(t.shape) - 2
    if n < 1:
        raise PopxlError("expected `t` with batch, channels and at least one spatial axis.")
    for name, count in {"kernel_size": n, "stride": n, "padding": 2 * n}.items():
        if len(how[name]) != count:
            raise PopxlError(f"`{name}` is {how[name]}; `t` has {n} spatial axes, expected {count} entries.")
    for name, least in {"kernel_size": 1, "stride": 1, "padding": 0}.items():
        if min(how[name]) < least:
            raise PopxlError(f"`{name}` is {how[name]}; expected numbers of {least} or more.")
    counts = tuple(w.count for w in windows_over(t.shape[2:], **how))
    if min(counts) < 1:
        raise PopxlError(f"the result would have the spatial sizes {counts}; the window does not fit into `t`.")
    return TensorSpec((*t.shape[:2], *counts), t.dtype)


class Combining(NamedTuple):
    """Reduction of a pooling window: binary function and neutral element."""

    of_two: Callable[[Any, Any], Any]
    neutral: Any

    def over(self, t: Any, windows: Sequence[Windows]) -> Any:
        """The elements of each window of the spatial axes, combined. Padding contributes nothing."""
        return over_windows(self, t, windows)

    def along(self, t: Any, axis: int, windows: Windows) -> Any:
        """Reduce windows along one axis."""
        if windows.reach > LONG:
            return self.by_xla(t, {axis: windows})
        edges = [(windows.begin, windows.end, 0) if a == axis else (0, 0, 0) for a in range(t.ndim)]
        padded = lax.pad(t, np.asarray(self.neutral, t.dtype), edges)
        starts = (windows.count - 1) * windows.stride + 1
        slices = (lax.slice_in_dim(padded, k, k + starts, windows.stride, axis) for k in range(windows.reach))
        return reduce(self.of_two, slices)

    def by_xla(self, t: Any, windows: Mapping[int, Windows]) -> Any:
        """Reduce windows along several axes with XLA."""

        def axis_values(entry: str, otherwise: int) -> list[int]:
            return [getattr(windows[axis], entry) if axis in windows else otherwise for axis in range(t.ndim)]

        pads = list(zip(axis_values("begin", 0), axis_values("end", 0), strict=True))
        neutral = np.asarray(self.neutral, t.dtype)
        return lax.reduce_window(t, neutral, self.of_two, axis_values("reach", 1), axis_values("stride", 1), pads)


@Kernel
def over_windows(combining: Combining, t: Any, windows: Sequence[Windows]) -> Any:
    """What `Combining.over` gives."""
    return combining.by_xla(t, dict(enumerate(windows, 2)))


def _unpadded_sizes(windows: Sequence[Windows]) -> Any:
    """Number of unpadded elements per window: a scalar if constant, otherwise an array."""
    along = [np.asarray(w.valid_counts(), np.float32) for w in windows]
    if all((counts == counts[0]).all() for counts in along):
        return math.prod(counts[0] for counts in along)
    rank = len(along)
    return math.prod(jnp.asarray(counts).reshape(-1, *(1,) * (rank - 1 - i)) for i, counts in enumerate(along))


# Average ------------------------------------------------------------------------------------------------------------


def _average(t: Any, **how: Any) -> Any:
    windows = windows_over(t.shape[2:], **how)
    total = Combining(lax.add, 0).over(t.astype(wide_dtype(t)), windows)
    return total / jnp.maximum(_unpadded_sizes(windows), 1).astype(total.dtype)


_average_pool = OpKind("AveragePool", _average, shape=_pooled_shape, result="averagepool_out")

# Maximum ------------------------------------------------------------------------------------------------------------


def largest_of(dtype: Any) -> Combining:
    """Largest number of a dtype."""
    return Combining(lax.max, -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min)


def _max(t: Any, **how: Any) -> Any:
    windows = windows_over(t.shape[2:], **how)
    largest, counts = largest_of(t.dtype).over(t, windows), _unpadded_sizes(windows)
    return largest if np.ndim(counts) == 0 and counts else jnp.where(counts > 0, largest, jnp.zeros((), t.dtype))


def _max_gradient(g: Any, t: Any, **how: Any) -> Any:
    """Max-pooling gradient, separable by axis.

    An element equals the first exactly if it equals the largest of its row, and that equals the largest of the window.
    So ties have the right gradient, and a window of 3 x 3 costs two passes of 3.
    """
    windows = windows_over(t.shape[2:], **how)

    def gradient(first: int, g: Any, t: Any) -> Any:
        axes = list(enumerate(windows, first))
        stages = [t]
        for axis, along in axes:
            stages.append(largest_of(t.dtype).along(stages[-1], axis, along))
        g = g.astype(wide_dtype(g))
        for (axis, along), x, largest in reversed(list(zip(axes, stages, stages[1:], strict=False))):
            g = _to_largest(g, x, largest, axis, along)
        return g

    return spatial(gradient, len(windows), g, t)


def _to_largest(g: Any, x: Any, largest: Any, axis: int, windows: Windows) -> Any:
    """Gradient of window maxima along one axis; every equal element receives all.

    Each position belongs to few windows, and the last of these begins nearest to it: one loop iteration per window.
    """
    size, stride, begin = windows.size, windows.stride, windows.begin
    positions = np.arange(begin, begin + size)
    slots = -(-(begin + size) // stride)  # windows that begin before the last position
    column = (-1, *(1,) * (x.ndim - axis - 1))

    def at_positions(values: Any, offset: int) -> Any:
        """Value, per position, of the latest or an earlier window."""
        edges = [(offset, slots - offset - windows.count, 0) if a == axis else (0, 0, 0) for a in range(x.ndim)]
        padded = lax.pad(values, jnp.zeros((), values.dtype), edges)
        return lax.slice_in_dim(jnp.repeat(padded, stride, axis), begin, begin + size, axis=axis)

    total = jnp.zeros(x.shape, g.dtype)
    for offset in range(-(-windows.reach // stride)):
        within = (positions % stride + offset * stride < windows.reach).reshape(column)
        total += jnp.where(within & (at_positions(largest, offset) == x), at_positions(g, offset), 0)
    return total


_max_pool_grad = OpKind("MaxPoolGrad", _max_gradient, shape=lambda g, t, **how: like_first(t))
_max_pool = OpKind(
    "MaxPool",
    _max,
    shape=_pooled_shape,
    result="maxpool_out",
    gradient={"t": lambda g, t, attributes: _max_pool_grad(g, t, **attributes)},
    traits=REAL,
)

# Public functions ---------------------------------------------------------------------------------------------------


def _pool(
    kind: OpKind,
    name: str,
    t: Tensor,
    kernel_size: Iterable[int],
    stride: Iterable[int] | None,
    padding: Iterable[int] | None,
    auto_pad: str | None,
    ceil_mode: bool,
    **neutral: Iterable[int] | None,
) -> Tensor:
    """Add a pooling op, with all arguments spelled out as plain numbers."""
    auto_pad = "not_set" if auto_pad is None or is_known_word(auto_pad, [""]) else auto_pad
    if not is_known_word(auto_pad, PAD_TYPES):
        raise KeyError(f"{name}: `auto_pad` is {auto_pad!r}; expected {', '.join(map(repr, PAD_TYPES))}.")
    for argument, values in neutral.items():
        neutral_value = 0 if argument == "out_pads" else 1
        if values is not None and any(value != neutral_value for value in integers(values, f"{name}: `{argument}`")):
            raise ValueError(f"{name}: `{argument}` is {values}; only {neutral_value} is supported. Leave it out.")
    kernel = integers(kernel_size, f"{name}: `kernel_size`")
    strides = () if stride is None else integers(stride, f"{name}: `stride`")
    pads = () if padding is None else integers(padding, f"{name}: `padding`")
    return kind(
        t,
        kernel_size=kernel,
        stride=strides + (1,) * (len(kernel) - len(strides)),
        padding=pads + (0,) * (2 * len(kernel) - len(pads)),
        auto_pad=auto_pad,
        ceil_mode=flag(ceil_mode, f"{name}: `ceil_mode`"),
    )


def average_pool(
    t: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    out_pads: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    in_dilations: tuple[int, ...] | None = None,
    auto_pad: PadType | None = "not_set",
    ceil_mode: bool = False,
) -> Tensor:
    """The mean of each window, where padding does not count; 0 for a window of nothing but padding.

    Along an axis of size `d`, with a kernel of size `k` and stride `s`:

    * `"not_set"`: `padding` is used; there are `floor((d + begin + end - k) / s) + 1` windows, and with `ceil_mode`
      the ceiling of the quotient plus 1. Unlike in PyTorch, a last window of nothing but padding is kept.
    * `"valid"`: there is no padding, and what is left over at the end is in no window.
    * `"same_upper"`, `"same_lower"`: there are `ceil(d / s)` windows; of the padding that this takes half is on either
      side, and of an odd number one more at the end (upper) or at the beginning (lower).

    Computed in float32 and rounded once.

    Args:
        t: float tensor of shape `(N, C, d, ...)` with one spatial axis or more.
        kernel_size: size of the window along each spatial axis.
        stride: steps of the window along each spatial axis; missing entries are 1. (The default is not the size of the
            kernel.)
        padding: padding before each spatial axis, then after each: `(b1, ..., bn, e1, ..., en)`; missing entries are 0.
            Used for `"not_set"` only.
        out_pads: zeros, or left out.
        dilation, in_dilations: ones, or left out.
        auto_pad: see above; `None` and an empty string mean `"not_set"`.
        ceil_mode: see above.

    Returns:
        A new tensor of shape `(N, C, o, ...)`, with the dtype of `t`.

    Raises:
        KeyError: for an unknown `auto_pad`.
        ValueError: for `out_pads`, `dilation` or `in_dilations` that would have an effect.
        PopxlError: if the numbers of entries do not fit `t`, or no window does.

    See also: `torch.nn.functional.avg_pool2d`, with `count_include_pad=False`.

    Example:
        >>> y = ops.average_pool(images, (2, 2), stride=(2, 2))
    """
    neutral = {"out_pads": out_pads, "dilation": dilation, "in_dilations": in_dilations}
    return _pool(_average_pool, "average_pool", t, kernel_size, stride, padding, auto_pad, ceil_mode, **neutral)


def max_pool(
    t: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    out_pads: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    in_dilations: tuple[int, ...] | None = None,
    auto_pad: PadType | None = "not_set",
    ceil_mode: bool = False,
    storage_order: Literal["row", "column"] = "row",
) -> Tensor:
    """The largest element of each window, where padding does not count; 0 for a window of nothing but padding.

    Every element that equals the largest of a window receives the whole gradient of the window; ties are not split.

    Args:
        t: float tensor of shape `(N, C, d, ...)` with one spatial axis or more.
        kernel_size, stride, padding, out_pads, dilation, in_dilations, auto_pad, ceil_mode: as for `average_pool`.
        storage_order: `"row"`; it would be the order of indices, which are not returned.

    Returns:
        A new tensor of shape `(N, C, o, ...)`, with the dtype of `t`.

    Raises:
        KeyError: for an unknown `auto_pad`.
        ValueError: for `out_pads`, `dilation` or `in_dilations` that would have an effect.
        PopxlError: for an unknown `storage_order`, if the numbers of entries do not fit `t`, or no window does.

    See also: `torch.nn.functional.max_pool2d`.

    Example:
        >>> y = ops.max_pool(images, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1))
    """
    if not is_known_word(storage_order, ["row"]):
        raise PopxlError(f"max_pool: `storage_order` is {storage_order!r}; expected 'row'. No indices are returned.")
    neutral = {"out_pads": out_pads, "dilation": dilation, "in_dilations": in_dilations}
    return _pool(_max_pool, "max_pool", t, kernel_size, stride, padding, auto_pad, ceil_mode, **neutral)
