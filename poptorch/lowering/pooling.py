"""Pooling: one number per window of the last axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

import popxl
from poptorch.lowering.convolution import per_axis
from poptorch.lowering.registry import jax_op, lowers
from poptorch.lowering.resample import Axis, resampled
from popxl.extend.kernels import Kernel, Windows, first_largest, first_largest_gradient, full_after, spatial, widen

Table = NDArray[np.int32]
"""A row for each window along an axis: the positions that it sees. Those short of positions see one several times."""

LONG = 16
"""Number of positions up to which they are compared one by one, which runs faster. More are gathered, which compiles
faster."""

# Windows --------------------------------------------------------------------------------------------------------------


def _regular(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Windows:
    """Windows along an axis. No window begins inside the end padding."""
    reach = dilation * (kernel - 1) + 1
    span = size + 2 * padding - reach
    count = span // stride + 1
    if ceil_mode and span % stride and count * stride < size + padding:
        count += 1
    end = max(padding, (count - 1) * stride + reach - size - padding)
    return Windows(size, reach, stride, padding, end, count, dilation)


def _window_sizes(
    axes: int, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Sizes of windows for each axis. Windows lie side by side without a stride."""
    sizes = {"kernel_size": kernel_size, "stride": stride or kernel_size, "padding": padding}
    return {name: per_axis(each, axes) for name, each in sizes.items()}


def _windows(sizes: Sequence[int], output_size: Any = None, **options: Any) -> list[Windows | Table]:
    """Windows along the last axes: regular, or adaptive to `output_size`, with a table for irregular windows."""
    if output_size is not None:
        return [_adaptive(*each) for each in zip(sizes, output_size, strict=True)]
    steps = zip(sizes, options["kernel_size"], options["stride"], options["padding"], options["dilation"], strict=True)
    return [_regular(*each, options["ceil_mode"]) for each in steps]


def _adaptive(size: int, count: int) -> Windows | Table:
    if size % count == 0:
        return Windows(size, size // count, size // count, 0, 0, count)
    starts = np.arange(count) * size // count
    ends = -(-np.arange(1, count + 1) * size // count)
    positions = starts[:, None] + np.arange((ends - starts).max())
    return np.minimum(positions, ends[:, None] - 1).astype(np.int32)


def _table(windows: Windows | Table) -> Table:
    if not isinstance(windows, Windows):
        return windows
    starts = np.arange(windows.count) * windows.stride - windows.begin
    positions = starts[:, None] + np.arange(0, windows.reach, windows.dilation)
    is_inside = (positions >= 0) & (positions < windows.size)
    first = np.where(is_inside, positions, windows.size).min(1, keepdims=True)
    last = np.where(is_inside, positions, -1).max(1, keepdims=True)
    return np.clip(positions, first, last).astype(np.int32)


def _readers(table: Table, size: int) -> Table:
    """Indices of windows covering each position, padded with the window count."""
    windows = np.repeat(np.arange(len(table)), table.shape[1])
    pairs = np.unique(np.stack([table.reshape(-1), windows], 1), axis=0)
    nth = np.arange(len(pairs)) - np.searchsorted(pairs[:, 0], pairs[:, 0])
    readers = np.full((size, nth.max() + 1), len(table), np.int32)
    readers[pairs[:, 0], nth] = pairs[:, 1]
    return readers


# Maximum --------------------------------------------------------------------------------------------------------------


def _gather_axis(t: Any, positions: NDArray[np.int32], axis: int, fill: Any = None) -> Any:
    """Elements at fixed positions along an axis; position `size` reads `fill`.

    Positions in equal steps, each of them once or the same number of times, are sliced: XLA gathers much more slowly on
    CPUs.
    """
    if positions.max() == t.shape[axis]:
        edges = [(0, int(a == axis), 0) for a in range(t.ndim)]
        t = lax.pad(t, jnp.asarray(fill, t.dtype), edges)
    steps = np.diff(positions)
    if not len(steps) or (steps[0] > 0 and (steps == steps[0]).all()):
        return lax.slice_in_dim(t, positions[0], positions[-1] + 1, steps[0] if len(steps) else 1, axis)
    repeats = np.bincount(positions - positions.min())
    inner_repeats = repeats[1:-1] if len(repeats) > 2 else repeats
    if positions[0] <= positions.min() and (steps >= 0).all() and (inner_repeats == repeats.max()).all():
        repeated = jnp.repeat(lax.slice_in_dim(t, positions[0], positions[-1] + 1, axis=axis), repeats.max(), axis)
        first = repeats.max() - repeats[0]
        return lax.slice_in_dim(repeated, first, first + len(positions), axis=axis)
    return jnp.take(t, positions, axis)


def _position_grid(sizes: Sequence[int], first: int, rank: int) -> Any:
    """Row-major positions of the spatial axes, shaped to broadcast with images: first spatial axis `first`, rank
    `rank`.
    """
    numbers = jnp.arange(math.prod(sizes), dtype=jnp.int32)
    return jnp.expand_dims(numbers.reshape(sizes), (*range(first), *range(first + len(sizes), rank)))


def _largest(input: Any, *, axes: int, **options: Any) -> tuple[Any, Any]:
    """Maximum per window and its row-major index in the last axes; ties choose the first."""
    windows = _windows(input.shape[-axes:], **options)
    return _run_kernel(first_largest, partial(_largest_by_axes, windows), windows, input)


def _to_largest(g: Any, input: Any, *, axes: int, **options: Any) -> Any:
    """Max-pooling gradient: each window passes its gradient to its first maximum."""
    windows = _windows(input.shape[-axes:], **options)
    return _run_kernel(first_largest_gradient, partial(_to_largest_by_positions, windows), windows, g, input)


def _run_kernel(kernel: Kernel, function: Callable[..., Any], windows: Sequence[Windows | Table], *images: Any) -> Any:
    """Run a pooling kernel on images with regular windows; call `function` otherwise."""
    if all(isinstance(along, Windows) for along in windows):
        return kernel(function, windows, *images)
    return function(*images)


def _largest_by_axes(windows: Sequence[Windows | Table], input: Any) -> tuple[Any, Any]:
    """Maximum axis by axis, last axis first, so ties resolve to the first in row-major order, NaNs to the last."""
    axes = len(windows)

    def largest(first: int, input: Any) -> tuple[Any, Any]:
        sizes = input.shape[first : first + axes]
        positions = jnp.broadcast_to(_position_grid(sizes, first, input.ndim), input.shape)
        for axis, table in reversed(list(enumerate(map(_table, windows), first))):
            if table.shape[1] > LONG:
                input, positions = (jnp.take(t, table, axis) for t in (input, positions))
                nth = _last_nan_or_largest(input, axis + 1)
                input, positions = (jnp.take_along_axis(t, nth, axis + 1).squeeze(axis + 1) for t in (input, positions))
                continue
            (best, winner), *others = (
                [_gather_axis(t, column, axis) for t in (input, positions)] for column in table.T
            )
            for other, position in others:
                is_larger = (other > best) | jnp.isnan(other)
                best, winner = jnp.where(is_larger, other, best), jnp.where(is_larger, position, winner)
            input, positions = best, winner
        return input, positions

    return spatial(largest, axes, input)


def _last_nan_or_largest(t: Any, axis: int) -> Any:
    is_nan = jnp.isnan(t)
    last = t.shape[axis] - 1 - jnp.argmax(jnp.flip(is_nan, axis), axis, keepdims=True)
    return jnp.where(is_nan.any(axis, keepdims=True), last, jnp.argmax(t, axis, keepdims=True))


def _to_largest_by_positions(windows: Sequence[Windows | Table], g: Any, input: Any) -> Any:
    """Gather gradients per position from covering windows; many times faster than scattering on CPUs.

    Where the largest numbers are has been computed before: XLA does not compute it again.
    """
    axes, dtype = len(windows), g.dtype
    _, positions = _largest_by_axes(windows, input)
    sizes = input.shape[-axes:]
    readers = [_readers(_table(along), size) for along, size in zip(windows, sizes, strict=True)]

    def gradient(first: int, g: Any, positions: Any) -> Any:
        g, own = widen(g), _position_grid(sizes, first, g.ndim)
        if math.prod(each.shape[1] for each in readers) > LONG:
            for axis, each in reversed(list(enumerate(readers, first))):
                g = jnp.take(g, each, axis, mode="fill", fill_value=0)
                positions = jnp.take(positions, each, axis, mode="fill", fill_value=-1)
            window_axes = tuple(range(first + 1, first + 2 * axes, 2))
            return jnp.where(positions == jnp.expand_dims(own, window_axes), g, 0).sum(window_axes).astype(dtype)
        pairs = [(g, positions)]
        for axis, each in enumerate(readers, first):
            pairs = [
                (_gather_axis(g, column, axis, 0), _gather_axis(positions, column, axis, -1))
                for g, positions in pairs
                for column in each.T
            ]
        return reduce(add, (jnp.where(positions == own, g, 0) for g, positions in pairs)).astype(dtype)

    return spatial(gradient, axes, g, positions)


_max_pool_grad = jax_op(title="MaxPoolGrad")(_to_largest)


_max_pool = jax_op(
    title="MaxPool",
    gradient={"input": lambda g, input, attributes: _max_pool_grad(g, input, **attributes)},
    result=("maxpool_out", "maxpool_indices"),
)(_largest)


def _max_pools(axes: int) -> None:
    def max_pool(
        input: popxl.Tensor, dilation: Sequence[int] = (1,), ceil_mode: bool = False, **sizes: Sequence[int]
    ) -> tuple[popxl.Tensor, ...]:
        dilation = per_axis(dilation, axes)
        return _max_pool(input, axes=axes, **_window_sizes(axes, **sizes), dilation=dilation, ceil_mode=ceil_mode)

    def adaptive(input: popxl.Tensor, output_size: Sequence[int]) -> tuple[popxl.Tensor, ...]:
        return _max_pool(input, axes=axes, output_size=tuple(output_size))

    def unpool(input: popxl.Tensor, indices: popxl.Tensor, output_size: Sequence[int], **regular: Any) -> popxl.Tensor:
        return _unpool(input, indices, output_size=tuple(output_size))

    lowers(f"aten.max_pool{axes}d_with_indices")(max_pool)
    lowers(f"aten.adaptive_max_pool{axes}d")(adaptive)
    lowers(f"aten.max_unpool{axes}d")(unpool)


@jax_op(title="MaxUnpoolGrad")
def _unpool_grad(g: Any, indices: Any, *, output_size: tuple[int, ...]) -> Any:
    """Gradient at the position of each number. Where windows overlap, several have one position: as in PyTorch, each of
    them has its gradient, not only the one that was written last."""
    rows = math.prod(g.shape[: g.ndim - len(output_size)])
    return jnp.take_along_axis(g.reshape(rows, -1), indices.reshape(rows, -1), 1).reshape(indices.shape)


@jax_op(
    title="MaxUnpool",
    gradient={"input": lambda g, indices, attributes: _unpool_grad(g, indices, **attributes)},
)
def _unpool(input: Any, indices: Any, *, output_size: tuple[int, ...]) -> Any:
    """Place numbers at row-major indices of the last axes; zeros elsewhere."""
    outer = input.shape[: input.ndim - len(output_size)]
    rows, positions = (t.reshape(math.prod(outer), -1) for t in (input, indices))
    out = full_after((len(rows), math.prod(output_size)), 0, input.dtype, after=input)
    return out.at[jnp.arange(len(rows))[:, None], positions].set(rows).reshape(*outer, *output_size)


_max_pools(2)
_max_pools(3)

# Maximum of windows at random places ----------------------------------------------------------------------------------


def _window_positions(samples: Any, size: int, kernel: int, count: int) -> Any:
    """`[..., windows, kernel]`: window positions along an axis, from one random number each."""
    step = (size - kernel) / max(count - 1, 1)
    starts = jnp.floor((jnp.arange(count) + samples[..., None]) * step) - jnp.floor(samples[..., None] * step)
    starts = jnp.where(jnp.arange(count) == count - 1, size - kernel, starts)  # the last one ends at the end
    return starts.astype(jnp.int32)[..., None] + jnp.arange(kernel)


def _fractional(axes: int) -> Callable[..., Any]:
    def fractional(
        input: Any, random_samples: Any, *, kernel_size: tuple[int, ...], output_size: tuple[int, ...]
    ) -> tuple[Any, Any]:
        sizes = input.shape[-axes:]
        samples = widen(random_samples) if axes == 3 else widen(random_samples)[..., ::-1]
        samples = samples.reshape(*input.shape[:-axes], axes)
        t, positions = (
            input,
            jnp.broadcast_to(jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(sizes), input.shape),
        )
        for i in range(axes):  # each axis becomes an axis of windows, and an axis of their elements at the end
            axis = input.ndim - axes + i
            elements = _window_positions(samples[..., i], sizes[i], kernel_size[i], output_size[i])
            elements = elements.reshape(*elements.shape[:-2], *(1,) * i, -1, *(1,) * (t.ndim - axis - 1))
            t, positions = (jnp.take_along_axis(each, elements, axis) for each in (t, positions))
            shape = (*t.shape[:axis], output_size[i], kernel_size[i], *t.shape[axis + 1 :])
            t, positions = (jnp.moveaxis(each.reshape(shape), axis + 1, -1) for each in (t, positions))
        t, positions = (each.reshape(*each.shape[:-axes], -1) for each in (t, positions))
        first = _last_nan_or_largest(t, -1)
        largest, position = (jnp.take_along_axis(each, first, -1).squeeze(-1) for each in (t, positions))
        return largest, position

    return fractional


for _axes in (2, 3):
    jax_op(f"aten.fractional_max_pool{_axes}d", title=f"FractionalMaxPool{_axes}d")(_fractional(_axes))

# Average --------------------------------------------------------------------------------------------------------------


@jax_op(title="AveragePool")
def _average(
    input: Any,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    axes, outer = len(kernel_size), (1,) * (input.ndim - len(kernel_size))
    ends, divisor = [], np.ones((), np.float32)
    for size, kernel, step, pad in zip(input.shape[-axes:], kernel_size, stride, padding, strict=True):
        windows = _regular(size, kernel, step, pad, 1, ceil_mode)
        ends.append((windows.begin, windows.end))
        starts = np.arange(windows.count) * step - pad
        lowest, highest = (-pad, size + pad) if count_include_pad else (0, size)
        counts = np.minimum(starts + kernel, highest) - np.maximum(starts, lowest)
        divisor = divisor[..., None] * counts.astype(np.float32)
    input = widen(input)
    if divisor_override is not None:
        divisor = np.full((), divisor_override, np.float32)
    total = lax.reduce_window(
        input, input.dtype.type(0), lax.add, outer + kernel_size, outer + stride, [(0, 0)] * len(outer) + ends
    )
    if jnp.issubdtype(total.dtype, jnp.integer):  # towards zero
        return lax.div(total, jnp.broadcast_to(divisor, total.shape).astype(total.dtype))
    return total / divisor


def _average_pools(axes: int) -> None:
    def average(
        input: popxl.Tensor,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        **sizes: Sequence[int],
    ) -> popxl.Tensor:
        return _average(
            input,
            **_window_sizes(axes, **sizes),
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor_override=divisor_override,
        )

    def adaptive(input: popxl.Tensor, output_size: Sequence[int]) -> popxl.Tensor:
        sizes = input.shape[-axes:]
        if not any(size % count for size, count in zip(sizes, output_size, strict=True)):
            return average(input, kernel_size=[s // count for s, count in zip(sizes, output_size, strict=True)])
        return resampled(input, [Axis("area", *each) for each in zip(sizes, output_size, strict=True)])

    lowers(f"aten.avg_pool{axes}d")(average)
    lowers(f"aten._adaptive_avg_pool{axes}d")(adaptive)


_average_pools(2)
_average_pools(3)
