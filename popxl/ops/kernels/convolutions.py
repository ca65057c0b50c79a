"""Convolutions of arrays, and their gradients, accumulated in float32, or in float64 where that is enabled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.errors import PopxlError
from popxl.ops.kernels.kernel import Kernel
from popxl.ops.precision import is_half, wide_dtype
from popxl.ops.windows import Windows


@Kernel
def convolved(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """Convolve arrays, returning their dtype or a wider one, for rounding by the caller.

    Args:
        t, weight: arrays of shape (N, C, d, ...) and (M, C / groups, k, ...).
        windows: along each spatial axis of `t`.
    """
    check(name, t, weight, [w.count for w in windows])
    return by_xla(*widened_pair(t, weight), windows, groups)


def convolved_halves(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """`convolved` for accelerators with half-precision units, float32 accumulation and rounded output."""
    if not (is_half(t) and t.dtype == weight.dtype):
        return convolved.plain(name, t, weight, windows, groups)
    check(name, t, weight, [w.count for w in windows])
    return by_xla(t, weight, windows, groups)


@Kernel
def transposed(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """Transposed convolution: every element of `t` adds a scaled kernel to the result.

    Args:
        t: array of shape (N, C, d, ...).
        weight: array of shape (C, channels of the result / groups, k, ...).
        windows: along each spatial axis of the result, one for each element of `t`.
    """
    check(name, t, weight, [w.size for w in windows])
    channels, depth, *kernel = weight.shape

    # A convolution of `t` with zeros between its elements: with the flipped kernel, its channels exchanged by group.
    grouped = weight.reshape(groups, channels // groups, depth, *kernel).swapaxes(1, 2)
    flipped = jnp.flip(grouped.reshape(depth * groups, channels // groups, *kernel), range(2, weight.ndim))
    return convolved(name, t, flipped, [_over_spread(w) for w in windows], groups)


def _over_spread(w: Windows) -> Windows:
    """Windows over a transposed convolution's input, given windows over its result: contiguous kernel, dilated
    input."""
    size = w.stride * (w.count - 1) + 1
    begin, end = w.reach - 1 - w.begin, w.size - size + w.begin
    return Windows(size, w.reach, 1, begin, end, w.size, w.dilation, spread=w.stride)


@Kernel
def weights_gradient(name: str, g: Any, t: Any, shape: Sequence[int], windows: Sequence[Windows], groups: int) -> Any:
    """Weight gradient of `convolved`, given the result gradient `g` and weight shape."""
    depth, *kernel = shape[1:]
    batch, _, *sizes = t.shape

    # A convolution of `t` with `g` in place of the kernel: it sums over the batch in place of channels.
    grouped = t.reshape(batch, groups, depth, *sizes)
    swapped = grouped.transpose(2, 1, 0, *range(3, grouped.ndim)).reshape(depth, groups * batch, *sizes)
    over = [under_places(w, k) for w, k in zip(windows, kernel, strict=True)]
    return convolved(name, swapped, g.swapaxes(0, 1), over, groups).swapaxes(0, 1)


def under_places(w: Windows, count: int) -> Windows:
    """For each kernel position, the window of input elements below it across all windows `w`."""
    reach = w.stride * (w.count - 1) + 1
    end = w.dilation * (count - 1) + reach - w.size - w.begin
    return Windows(w.size, reach, w.dilation, w.begin, end, count, w.stride)


def check(name: str, t: Any, weight: Any, sizes: Sequence[int]) -> None:
    """`PopxlError` for ranks that differ, and for a result without elements."""
    if t.ndim != weight.ndim:
        raise PopxlError(f"{name}: `t` has rank {t.ndim} and `weight` has rank {weight.ndim}; expected the same.")
    if min(sizes) < 1:
        raise PopxlError(
            f"{name}: the result would have the spatial sizes {tuple(sizes)}; expected positive ones. Pad more, or "
            "crop less."
        )


def widened_pair(a: Any, b: Any) -> tuple[Any, Any]:
    """Operands in computation precision."""
    wide = wide_dtype(a, b)
    return a.astype(wide), b.astype(wide)


def by_xla(t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """A convolution, channels last. XLA has quick code for that form everywhere, and does not always choose it."""
    n = t.ndim - 2
    axes = ascii_lowercase[:n]
    wanted = windows
    windows = [_not_like_groups(w, places) for w, places in zip(wanted, weight.shape[2:], strict=True)]
    result = lax.conv_general_dilated(
        t.transpose(0, *range(2, n + 2), 1),
        weight.transpose(*range(2, n + 2), 1, 0),
        [w.stride for w in windows],
        [(w.begin, w.end) for w in windows],
        [w.spread for w in windows],
        [w.dilation for w in windows],
        (f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        groups,
    )
    result = result.transpose(0, n + 1, *range(1, n + 1))
    return result if windows == list(wanted) else result[:, :, *(slice(w.count) for w in wanted)]


def _not_like_groups(w: Windows, places: int) -> Windows:
    """Windows along an axis, plus one where XLA would mistake the axis for groups.

    If a kernel is larger than its input, XLA exchanges the two, and leaves such axes unchanged. Sizes do not agree
    then, and it ends the process (jax 0.10).
    """
    if w.spread == places > 1 and w.stride == places - 1 and w.begin == w.end == 0 and w.dilation == 1:
        return replace(w, end=w.stride, count=w.count + 1)
    return w
