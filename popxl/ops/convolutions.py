"""How convolutions of arrays, and their gradients, are computed: in float32, or float64 where that is what there is."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from popxl.errors import PopxlError
from popxl.ops.kernels import Kernel
from popxl.ops.precision import is_half, wide_dtype


class Steps(NamedTuple):
    """How windows lie, by entries for each spatial axis.

    Attributes:
        pads: zeros before and after; negative where it is cropped.
        strides: between windows.
        dilation: of the kernel.
        spread: how far the elements of the input are apart; zeros lie between them.
        sizes: of the result.
    """

    pads: Sequence[tuple[int, int]]
    strides: Sequence[int]
    dilation: Sequence[int]
    spread: Sequence[int]
    sizes: Sequence[int]


@Kernel
def convolved(name: str, t: Any, weight: Any, steps: Steps, groups: int) -> Any:
    """The convolution of arrays.

    Args:
        name: of the op, for errors.
        t, weight: of shape (N, C, d, ...) and (M, C / groups, k, ...).
        steps: how windows lie.
        groups: of channels.
    """
    check(name, t, weight, steps.sizes)
    t, weight, precision = widened_pair(t, weight)
    return by_xla(t, weight, steps, groups, precision)


@Kernel
def transposed(
    name: str,
    t: Any,
    weight: Any,
    sizes: Sequence[int],
    begins: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """What a convolution is the gradient of, and has as its own: every element of `t` puts the kernel into the result.

    Args:
        name: of the op, for errors.
        t: of shape (N, C, d, ...).
        weight: of shape (C, channels of the result / groups, k, ...).
        sizes: the spatial sizes of the result.
        begins: how many positions are cropped before each axis of the result.
        strides: between what neighbours put there.
        dilation: of the kernel.
        groups: of channels.
    """
    check(name, t, weight, sizes)
    channels, depth, *kernel = weight.shape
    ends = [size - s * (d - 1) - 1 + b for size, s, d, b in zip(sizes, strides, t.shape[2:], begins, strict=True)]

    # A convolution of `t` with zeros between its elements: with the flipped kernel, its channels exchanged by group.
    grouped = weight.reshape(groups, channels // groups, depth, *kernel).swapaxes(1, 2)
    flipped = jnp.flip(grouped.reshape(depth * groups, channels // groups, *kernel), range(2, weight.ndim))
    reaches = [step * (k - 1) for step, k in zip(dilation, kernel, strict=True)]
    pads = [(reach - begin, end) for reach, begin, end in zip(reaches, begins, ends, strict=True)]
    return convolved(name, t, flipped, Steps(pads, (1,) * len(pads), dilation, strides, sizes), groups)


@Kernel
def weights_gradient(name: str, g: Any, t: Any, shape: Sequence[int], steps: Steps, groups: int) -> Any:
    """The gradient with respect to the weight, of that shape, for the gradient `g` of the result of `convolved`."""
    depth, *kernel = shape[1:]
    batch, _, *sizes = t.shape

    # A convolution of `t` with `g` in place of the kernel: the batch is what is summed over, in place of channels.
    grouped = t.reshape(batch, groups, depth, *sizes)
    turned = grouped.transpose(2, 1, 0, *range(3, grouped.ndim)).reshape(depth, groups * batch, *sizes)
    pads = [
        (begin, step * (k - 1) + stride * (count - 1) + 1 - size - begin)
        for (begin, _), step, k, stride, count, size in zip(
            steps.pads, steps.dilation, kernel, steps.strides, steps.sizes, sizes, strict=True
        )
    ]
    over = Steps(pads, steps.dilation, steps.strides, (1,) * len(pads), kernel)
    return convolved(name, turned, g.swapaxes(0, 1), over, groups).swapaxes(0, 1)


def check(name: str, t: Any, weight: Any, sizes: Sequence[int]) -> None:
    """`PopxlError` for ranks that differ, and for a result without elements."""
    if t.ndim != weight.ndim:
        raise PopxlError(f"{name}: `t` has rank {t.ndim} and `weight` has rank {weight.ndim}; expected the same.")
    if min(sizes) < 1:
        raise PopxlError(
            f"{name}: the result would have the spatial sizes {tuple(sizes)}; expected positive ones. Pad more, or "
            "crop less."
        )


def widened_pair(a: Any, b: Any) -> tuple[Any, Any, lax.Precision]:
    """Operands in the dtype to compute in, and how exactly they are to be multiplied."""
    wide = wide_dtype(a, b)
    # Halves are multiplied exactly by units too that are quicker, as they leave out some digits of float32.
    are_halves = is_half(a) and is_half(b)
    return a.astype(wide), b.astype(wide), lax.Precision.HIGH if are_halves else lax.Precision.HIGHEST


def by_xla(t: Any, weight: Any, steps: Steps, groups: int, precision: Any) -> Any:
    """With the channels last: XLA has quick code for that form everywhere, and does not always find it by itself."""
    n = t.ndim - 2
    axes = ascii_lowercase[:n]
    result = lax.conv_general_dilated(
        t.transpose(0, *range(2, n + 2), 1),
        weight.transpose(*range(2, n + 2), 1, 0),
        steps.strides,
        steps.pads,
        steps.spread,
        steps.dilation,
        (f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        groups,
        precision=precision,
    )
    return result.transpose(0, n + 1, *range(1, n + 1))
