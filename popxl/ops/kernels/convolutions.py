"""How convolutions of arrays, and their gradients, are computed: summed in float32, or float64 where there is that."""

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
    """The convolution of arrays, which is to be rounded to their dtype; in that dtype or a wider one.

    Args:
        name: of the op, for errors.
        t, weight: of shape (N, C, d, ...) and (M, C / groups, k, ...).
        windows: along each spatial axis of `t`.
        groups: of channels.
    """
    check(name, t, weight, [w.count for w in windows])
    return by_xla(*widened_pair(t, weight), windows, groups)


def convolved_halves(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """`convolved` for accelerators, which have units for halves, sum in float32, and round what they write."""
    if not (is_half(t) and t.dtype == weight.dtype):
        return convolved.plain(name, t, weight, windows, groups)
    check(name, t, weight, [w.count for w in windows])
    return by_xla(t, weight, windows, groups)


@Kernel
def transposed(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """What a convolution is the gradient of, and has as its own: every element of `t` puts the kernel into the result.

    Args:
        name: of the op, for errors.
        t: of shape (N, C, d, ...).
        weight: of shape (C, channels of the result / groups, k, ...).
        windows: along each spatial axis of the result, one for each element of `t`.
        groups: of channels.
    """
    check(name, t, weight, [w.size for w in windows])
    channels, depth, *kernel = weight.shape

    # A convolution of `t` with zeros between its elements: with the flipped kernel, its channels exchanged by group.
    grouped = weight.reshape(groups, channels // groups, depth, *kernel).swapaxes(1, 2)
    flipped = jnp.flip(grouped.reshape(depth * groups, channels // groups, *kernel), range(2, weight.ndim))
    return convolved(name, t, flipped, [_over_spread(w) for w in windows], groups)


def _over_spread(w: Windows) -> Windows:
    """The windows over the input of a transposed convolution, for those over its result: each has a kernel's elements
    next to each other, and the input's are spread."""
    size = w.stride * (w.count - 1) + 1
    begin, end = w.reach - 1 - w.begin, w.size - size + w.begin
    return Windows(size, w.reach, 1, begin, end, w.size, w.dilation, spread=w.stride)


@Kernel
def weights_gradient(name: str, g: Any, t: Any, shape: Sequence[int], windows: Sequence[Windows], groups: int) -> Any:
    """The gradient with respect to the weight, of that shape, for the gradient `g` of the result of `convolved`."""
    depth, *kernel = shape[1:]
    batch, _, *sizes = t.shape

    # A convolution of `t` with `g` in place of the kernel: the batch is what is summed over, in place of channels.
    grouped = t.reshape(batch, groups, depth, *sizes)
    turned = grouped.transpose(2, 1, 0, *range(3, grouped.ndim)).reshape(depth, groups * batch, *sizes)
    over = [under_places(w, k) for w, k in zip(windows, kernel, strict=True)]
    return convolved(name, turned, g.swapaxes(0, 1), over, groups).swapaxes(0, 1)


def under_places(w: Windows, count: int) -> Windows:
    """For each place of a kernel a window: of what lies under that place, for all the windows `w`."""
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
    """Operands in the dtype to compute in."""
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
    """The windows along an axis, with one more where XLA would take the axis for one of groups.

    Where kernels are larger than what they slide over, XLA exchanges the two, and leaves such axes as they are. Sizes
    do not agree then, and it ends the process (jax 0.10).
    """
    if w.spread == places > 1 and w.stride == places - 1 and w.begin == w.end == 0 and w.dilation == 1:
        return replace(w, end=w.stride, count=w.count + 1)
    return w
