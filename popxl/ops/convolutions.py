"""How convolutions of arrays are computed, in the form that is quick where they are.

On CPUs XLA gathers what lies under each window into a row of a matrix, and multiplies that with the kernels. With few
channels the gathering takes longer than the product, and groups of channels are gone through one by one, so for such
shapes there are other forms here. They have the batch as their last axis: rows that are shifted along a spatial axis
then stay whole, and whatever is done to them takes vector instructions.

All of them compute in float32, or float64 where that is what there is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from string import ascii_lowercase
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from popxl.errors import PopxlError
from popxl.ops.kept import kept, quick_on_cpus
from popxl.ops.precision import wide_dtype

LITTLE_WORK = 2**16
"""So many products take XLA little time in any form, and its own compiles faster."""

FEW_TERMS, FEW_TERMS_OF_GROUPS = 40, 80
"""So many products for an element of the result are written as one expression; more of them where XLA would go through
groups."""

FEW_CHANNELS, MANY_CHANNELS = 6, 16
"""From so few to so many, or the other way round, XLA's convolution takes longer to gather than to multiply."""

FEW_PLACES = 64
"""So many places of a kernel are written one after the other."""

FEW_SUMS, FEW_PUT = 2**20, 2**22
"""Matrices of so many elements are added up in caches."""


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

    def rows_used(self, sizes: Sequence[int]) -> float:
        """The share of the rows of a padded input, of these spatial sizes, at which windows begin."""
        sizes = [spread * (size - 1) + 1 for size, spread in zip(sizes, self.spread, strict=True)]
        padded = [begin + size + end for size, (begin, end) in zip(sizes, self.pads, strict=True)]
        return math.prod(self.sizes[:-1]) / math.prod(padded[:-1])

    def padded(self, t: Any) -> Any:
        """An input of shape (N, C, d, ...) with its zeros, as (C, d, ..., N)."""
        zeros = [(begin, end, spread - 1) for (begin, end), spread in zip(self.pads, self.spread, strict=True)]
        return lax.pad(jnp.moveaxis(t, 0, -1), jnp.zeros((), t.dtype), [(0, 0, 0), *zeros, (0, 0, 0)])

    def under(self, t: Any, axis: int, place: int) -> Any:
        """The positions of a spatial axis that lie under that place of the kernel, for all windows, of a padded input
        whose last axes are d, ..., N."""
        begin, stride = place * self.dilation[axis], self.strides[axis]
        end = begin + stride * (self.sizes[axis] - 1) + 1
        return lax.slice_in_dim(t, begin, end, stride, t.ndim - 1 - len(self.sizes) + axis)

    def all_under(self, t: Any, places: Sequence[int]) -> Any:
        """The same for the first spatial axes, as many as there are places."""
        for axis, place in enumerate(places):
            t = self.under(t, axis, place)
        return t


def convolved(name: str, t: Any, weight: Any, steps: Steps, groups: int) -> Any:
    """The convolution of arrays.

    Args:
        name: of the op, for errors.
        t, weight: of shape (N, C, d, ...) and (M, C / groups, k, ...).
        steps: how windows lie.
        groups: of channels.
    """
    _check(name, t, weight, steps.sizes)
    t, weight, precision = _widened(t, weight)

    def by_xla(t: Any, weight: Any) -> Any:
        return _by_xla(t, weight, steps, groups, precision)

    places = math.prod(weight.shape[2:])
    if _is_little(t, weight.shape, steps.sizes):
        return by_xla(t, weight)
    if weight.shape[1] * places <= (FEW_TERMS if groups == 1 else FEW_TERMS_OF_GROUPS):
        form = _by_elements
    elif (
        groups == 1
        and places <= FEW_PLACES
        and min(weight.shape[:2]) <= FEW_CHANNELS
        and max(weight.shape[:2]) <= MANY_CHANNELS
        and len(t) * len(weight) * math.prod(steps.sizes) <= FEW_SUMS
        and steps.rows_used(t.shape[2:]) >= 1 / 2
    ):
        form = _by_rows
    else:
        return by_xla(t, weight)

    def on_cpu(t: Any, weight: Any) -> Any:
        return _batch_first(kept(partial(form, steps=steps, groups=groups))(steps.padded(t), weight))

    return quick_on_cpus(on_cpu, by_xla)(t, weight)


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
    _check(name, t, weight, sizes)
    channels, depth, *kernel = weight.shape
    ends = [size - s * (d - 1) - 1 + b for size, s, d, b in zip(sizes, strides, t.shape[2:], begins, strict=True)]

    def by_convolution(t: Any, weight: Any) -> Any:
        """A convolution of `t` with zeros between its elements: with the flipped kernel, its channels exchanged by
        group."""
        grouped = weight.reshape(groups, channels // groups, depth, *kernel).swapaxes(1, 2)
        flipped = jnp.flip(grouped.reshape(depth * groups, channels // groups, *kernel), range(2, weight.ndim))
        reaches = [step * (k - 1) for step, k in zip(dilation, kernel, strict=True)]
        pads = [(reach - begin, end) for reach, begin, end in zip(reaches, begins, ends, strict=True)]
        return convolved(name, t, flipped, Steps(pads, (1,) * len(pads), dilation, strides, sizes), groups)

    def by_places(t: Any, weight: Any) -> Any:
        t, weight, _ = _widened(t, weight)
        shifts = [[place * step - b for place in range(k)] for k, step, b in zip(kernel, dilation, begins, strict=True)]
        rooms = [size - 1 - s * (d - 1) for size, s, d in zip(sizes, strides, t.shape[2:], strict=True)]

        def all_places(t: Any, weight: Any) -> Any:
            """One product of matrices for all places of the kernel, whose results are added up where they belong."""
            put = jnp.tensordot(weight, t, (0, 0))
            zero = jnp.zeros((), put.dtype)

            def moved(places: tuple[int, ...]) -> Any:
                befores = [along[place] for along, place in zip(shifts, places, strict=True)]
                zeros = [(b, room - b, s - 1) for b, room, s in zip(befores, rooms, strides, strict=True)]
                return lax.pad(put[:, *places], zero, [(0, 0, 0), *zeros, (0, 0, 0)])

            return sum(moved(places) for places in _places(kernel))

        return _batch_first(kept(all_places)(jnp.moveaxis(t, 0, -1), weight))

    places = math.prod(kernel)
    put = depth * places * len(t) * math.prod(t.shape[2:])
    if (
        groups == 1
        and not _is_little(t, weight.shape, t.shape[2:])
        and depth <= FEW_CHANNELS
        and depth * places < kernel[-1] * (channels + depth) * math.prod(strides)  # less than by rows
        and channels * places > FEW_TERMS
        and places <= FEW_PLACES
        and put <= FEW_PUT
    ):
        return quick_on_cpus(by_places, by_convolution)(t, weight)
    return by_convolution(t, weight)


def weights_gradient(name: str, g: Any, t: Any, shape: Sequence[int], steps: Steps, groups: int) -> Any:
    """The gradient with respect to the weight, of that shape, for the gradient `g` of the result of `convolved`."""
    depth, *kernel = shape[1:]
    batch, _, *sizes = t.shape

    def by_convolution(g: Any, t: Any) -> Any:
        """A convolution of `t` with `g` in place of the kernel: the batch is what is summed over, in place of
        channels."""
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

    def on_cpu(g: Any, t: Any) -> Any:
        g, t, _ = _widened(g, t)
        return kept(partial(_place_by_place, kernel=kernel, steps=steps))(jnp.moveaxis(g, 0, -1), steps.padded(t))

    if groups > 1 and depth == 1 and math.prod(kernel) <= FEW_TERMS and not _is_little(t, shape, steps.sizes):
        return quick_on_cpus(on_cpu, by_convolution)(g, t)
    return by_convolution(g, t)


def _check(name: str, t: Any, weight: Any, sizes: Sequence[int]) -> None:
    if t.ndim != weight.ndim:
        raise PopxlError(f"{name}: `t` has rank {t.ndim} and `weight` has rank {weight.ndim}; expected the same.")
    if min(sizes) < 1:
        raise PopxlError(
            f"{name}: the result would have the spatial sizes {tuple(sizes)}; expected positive ones. Pad more, or "
            "crop less."
        )


def _is_little(t: Any, kernel: Sequence[int], windows: Sequence[int]) -> bool:
    return len(t) * math.prod(kernel) * math.prod(windows) <= LITTLE_WORK


def _widened(a: Any, b: Any) -> tuple[Any, Any, lax.Precision]:
    """Operands in the dtype to compute in, and how exactly they are to be multiplied."""
    wide = wide_dtype(a, b)
    # Halves are multiplied exactly by units too that are quicker, as they leave out some digits of float32.
    are_halves = a.dtype == b.dtype == jnp.float16
    return a.astype(wide), b.astype(wide), lax.Precision.HIGH if are_halves else lax.Precision.HIGHEST


def _batch_first(t: Any) -> Any:
    return jnp.moveaxis(t, -1, 0)


def _places(kernel: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The places of a kernel, in order."""
    return itertools.product(*map(range, kernel))


def _by_xla(t: Any, weight: Any, steps: Steps, groups: int, precision: Any) -> Any:
    """It is written with the channels last, as that is the one form for which XLA has quick code on CPUs; within loops
    and kept calls it does not find that form by itself (with 64 channels it then takes twenty times as long)."""
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


def _by_elements(x: Any, weight: Any, steps: Steps, groups: int) -> Any:
    """One expression for an element of the result, of all products that it is the sum of."""
    filters, depth, *kernel = weight.shape
    x = x.reshape(groups, 1, depth, *x.shape[1:])
    w = weight.reshape(groups, filters // groups, depth, *kernel, *(1,) * (len(kernel) + 1))
    total = sum(
        w[:, :, channel, *places] * steps.all_under(x[:, :, channel], places)
        for channel in range(depth)
        for places in _places(kernel)
    )
    return total.reshape(filters, *total.shape[2:])


def _by_rows(x: Any, weight: Any, steps: Steps, groups: int) -> Any:
    """One product of matrices: what lies under a row of the kernel is gathered, and multiplied with all rows of it.
    Their products are added up, shifted as the rows are."""
    filters, _, *kernel = weight.shape
    last = len(kernel) - 1
    under = jnp.concatenate([steps.under(x, last, place) for place in range(kernel[last])])
    rows = jnp.moveaxis(weight, (0, 1), (last, -1)).reshape(-1, len(under))
    products = lax.dot(rows, under.reshape(len(under), -1)).reshape(*kernel[:last], filters, *under.shape[1:])
    return sum(steps.all_under(products[places], places) for places in _places(kernel[:last]))


def _place_by_place(g: Any, x: Any, kernel: Sequence[int], steps: Steps) -> Any:
    """The gradient with respect to kernels for one channel each: for each place, a sum of products.

    Rows are added up eight by eight first, in vector instructions, as XLA keeps to the order of additions.
    """
    rows = g.reshape(len(x), -1, *g.shape[1:])
    sums = []
    for places in _places(kernel):
        products, together = rows * steps.all_under(x[:, None], places), 1
        while together < 8 and products.shape[2] % 2 == 0:
            middle = products.shape[2] // 2
            products, together = products[:, :, :middle] + products[:, :, middle:], 2 * together
        sums.append(products.sum(range(2, products.ndim)))
    return jnp.stack(sums, -1).reshape(len(g), 1, *kernel)
