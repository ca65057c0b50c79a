"""Convolutions of few channels.

On CPUs XLA gathers the elements under each window into a row of a matrix, and multiplies that with the kernels. With
few channels the gathering takes longer than the product, and groups of channels are computed one by one; for such
shapes this file has other implementations. They have the batch as their last axis: rows that are shifted along a
spatial axis then stay contiguous, so that all operations on them are vectorised.

All of them compute in float32, or float64 where that is enabled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.ops.kernels import convolutions
from popxl.ops.kernels.convolutions import by_xla, check, widened_pair
from popxl.ops.windows import Windows
from runtime.cpu.platform_dependent import if_platform_cpu
from runtime.noinline import noinline

LITTLE_WORK = 2**16
"""Number of products that XLA computes quickly in any form. Its own form compiles faster."""

FEW_TERMS, FEW_TERMS_OF_GROUPS = 40, 80
"""Maximum number of products per output element that are written as one expression; more for grouped convolutions,
where XLA would loop over groups."""

FEW_CHANNELS, MANY_CHANNELS = 6, 16
"""From so few channels to so many, or back, XLA's convolution takes longer to gather than to multiply."""

FEW_PLACES = 64
"""Maximum number of kernel positions written out, one product each."""

FEW_SUMS, FEW_PUT = 2**20, 2**22
"""Maximum numbers of matrix elements whose sums fit into caches."""


class Sliding(tuple[Windows, ...]):
    """Windows along all spatial axes, with their slices."""

    __slots__ = ()

    def rows_used(self) -> float:
        """The fraction of padded input rows at window starts."""
        return math.prod(w.count for w in self[:-1]) / math.prod(w.begin + w.size + w.end for w in self[:-1])

    def padded(self, t: Any) -> Any:
        """Pad an input (N, C, d, ...) with zeros, as (C, d, ..., N)."""
        zeros = [(w.begin, w.end, w.spread - 1) for w in self]
        return lax.pad(jnp.moveaxis(t, 0, -1), jnp.zeros((), t.dtype), [(0, 0, 0), *zeros, (0, 0, 0)])

    def under(self, t: Any, axis: int, position: int) -> Any:
        """Slice a padded input along one spatial axis: elements under a kernel position, for all windows."""
        w = self[axis]
        begin = position * w.dilation
        end = begin + w.stride * (w.count - 1) + 1
        return lax.slice_in_dim(t, begin, end, w.stride, t.ndim - 1 - len(self) + axis)

    def all_under(self, t: Any, positions: Sequence[int]) -> Any:
        """Slice the first spatial axes, one position each; see `under`."""
        for axis, position in enumerate(positions):
            t = self.under(t, axis, position)
        return t


def convolved(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """Convolution as one expression, or row by row, if faster."""
    counts = [w.count for w in windows]
    check(name, t, weight, counts)
    t, weight = widened_pair(t, weight)
    plain = partial(by_xla, windows=windows, groups=groups)
    positions = math.prod(weight.shape[2:])
    if _is_little(t, weight.shape, counts):
        return plain(t, weight)
    sliding = Sliding(windows)
    if weight.shape[1] * positions <= (FEW_TERMS if groups == 1 else FEW_TERMS_OF_GROUPS):
        kernel_function = _by_elements
    elif (
        groups == 1
        and positions <= FEW_PLACES
        and min(weight.shape[:2]) <= FEW_CHANNELS
        and max(weight.shape[:2]) <= MANY_CHANNELS
        and len(t) * len(weight) * math.prod(counts) <= FEW_SUMS
        and sliding.rows_used() >= 1 / 2
    ):
        kernel_function = _by_rows
    else:
        return plain(t, weight)

    def on_cpu(t: Any, weight: Any) -> Any:
        return _batch_first(
            noinline(partial(kernel_function, sliding=sliding, groups=groups))(sliding.padded(t), weight)
        )

    return if_platform_cpu(on_cpu, plain)(t, weight)


def transposed(name: str, t: Any, weight: Any, windows: Sequence[Windows], groups: int) -> Any:
    """Transposed convolution as one matrix product, if faster."""
    check(name, t, weight, [w.size for w in windows])
    channels, depth, *kernel = weight.shape

    def plain(t: Any, weight: Any) -> Any:
        return convolutions.transposed.plain(name, t, weight, windows, groups)

    def by_position(t: Any, weight: Any) -> Any:
        t, weight = widened_pair(t, weight)
        totals = [w.size - 1 - w.stride * (w.count - 1) for w in windows]

        def all_positions(t: Any, weight: Any) -> Any:
            """Product of one matrix for all kernel positions; results are added at their positions."""
            products = jnp.tensordot(weight, t, (0, 0))
            zero = jnp.zeros((), products.dtype)

            def moved(positions: tuple[int, ...]) -> Any:
                befores = [position * w.dilation - w.begin for position, w in zip(positions, windows, strict=True)]
                zeros = [(b, total - b, w.stride - 1) for b, total, w in zip(befores, totals, windows, strict=True)]
                return lax.pad(products[:, *positions], zero, [(0, 0, 0), *zeros, (0, 0, 0)])

            return sum(moved(positions) for positions in _kernel_positions(kernel))

        return _batch_first(noinline(all_positions)(jnp.moveaxis(t, 0, -1), weight))

    positions = math.prod(kernel)
    products = depth * positions * len(t) * math.prod(t.shape[2:])
    if (
        groups == 1
        and not _is_little(t, weight.shape, t.shape[2:])
        and depth <= FEW_CHANNELS
        and depth * positions < kernel[-1] * (channels + depth) * math.prod(w.stride for w in windows)  # cheaper
        and channels * positions > FEW_TERMS
        and positions <= FEW_PLACES
        and products <= FEW_PUT
    ):
        return if_platform_cpu(by_position, plain)(t, weight)
    return plain(t, weight)


def weights_gradient(name: str, g: Any, t: Any, shape: Sequence[int], windows: Sequence[Windows], groups: int) -> Any:
    """Weight gradient of depthwise kernels, position by position."""
    depth, *kernel = shape[1:]

    def plain(g: Any, t: Any) -> Any:
        return convolutions.weights_gradient.plain(name, g, t, shape, windows, groups)

    def on_cpu(g: Any, t: Any) -> Any:
        g, t = widened_pair(g, t)
        sliding = Sliding(windows)
        return noinline(partial(_gradient_by_position, kernel=kernel, sliding=sliding))(
            jnp.moveaxis(g, 0, -1), sliding.padded(t)
        )

    if (
        groups > 1
        and depth == 1
        and math.prod(kernel) <= FEW_TERMS
        and not _is_little(t, shape, [w.count for w in windows])
    ):
        return if_platform_cpu(on_cpu, plain)(g, t)
    return plain(g, t)


def _is_little(t: Any, kernel: Sequence[int], windows: Sequence[int]) -> bool:
    return len(t) * math.prod(kernel) * math.prod(windows) <= LITTLE_WORK


def _batch_first(t: Any) -> Any:
    return jnp.moveaxis(t, -1, 0)


def _kernel_positions(kernel: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Kernel positions, in order."""
    return itertools.product(*map(range, kernel))


def _by_elements(x: Any, weight: Any, sliding: Sliding, groups: int) -> Any:
    """Expression per output element: a sum of products."""
    filters, depth, *kernel = weight.shape
    x = x.reshape(groups, 1, depth, *x.shape[1:])
    w = weight.reshape(groups, filters // groups, depth, *kernel, *(1,) * (len(kernel) + 1))
    total = sum(
        w[:, :, channel, *position] * sliding.all_under(x[:, :, channel], position)
        for channel in range(depth)
        for position in _kernel_positions(kernel)
    )
    return total.reshape(filters, *total.shape[2:])


def _by_rows(x: Any, weight: Any, sliding: Sliding, groups: int) -> Any:
    """One matrix product: gather inputs under a kernel row, multiply by all kernel rows."""
    filters, _, *kernel = weight.shape
    last = len(kernel) - 1
    under = jnp.concatenate([sliding.under(x, last, column) for column in range(kernel[last])])
    rows = jnp.moveaxis(weight, (0, 1), (last, -1)).reshape(-1, len(under))
    products = lax.dot(rows, under.reshape(len(under), -1)).reshape(*kernel[:last], filters, *under.shape[1:])
    return sum(sliding.all_under(products[position], position) for position in _kernel_positions(kernel[:last]))


def _gradient_by_position(g: Any, x: Any, kernel: Sequence[int], sliding: Sliding) -> Any:
    """Gradient of single-channel kernels: one sum of products per position.

    Rows are added up eight by eight first, in vector instructions, as XLA keeps to the order of additions.
    """
    rows = g.reshape(len(x), -1, *g.shape[1:])
    sums = []
    for position in _kernel_positions(kernel):
        products = rows * sliding.all_under(x[:, None], position)
        for _ in range(3):  # halvings
            if products.shape[2] % 2:
                break
            middle = products.shape[2] // 2
            products = products[:, :, :middle] + products[:, :, middle:]
        sums.append(products.sum(range(2, products.ndim)))
    return jnp.stack(sums, -1).reshape(len(g), 1, *kernel)
