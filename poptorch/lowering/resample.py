"""Image resampling: resizing, grid sampling; images as columns of patches (im2col)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from poptorch.lowering.registry import jax_op, lowers
from popxl.extend.kernels import Taps, apply_taps, cubic_kernel, materialize, round_once, transposed, widen

# Resizing -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Resampling along an axis to another length: new elements are linear combinations of old elements.

    Args:
        mode: `"nearest"`, `"exact"` (nearest, rightly), `"linear"`, `"cubic"`, `"area"` (the mean of a stretch).
        size: length of the axis.
        length: length of the new axis.
        scale: ratio of the lengths, if it was given; otherwise it follows from them.
        align_corners: the centres of the outer elements stay where they are; otherwise the outer edges do.
        antialias: whether elements of a shorter axis are blends of all elements that they cover.
    """

    mode: str
    size: int
    length: int
    scale: float | None = None
    align_corners: bool = False
    antialias: bool = False

    def taps(self) -> Taps:
        """Source positions and factors of each new element."""
        taps = (
            self._area() if self.mode == "area" else self._antialiased() if self.antialias else self._neighbour_taps()
        )
        return [(np.clip(position, 0, self.size - 1).astype(np.int32), factor) for position, factor in taps]

    def _step(self) -> np.float32:
        """Spacing of new elements. In float32, like all subsequent arithmetic, because rounding decides nearest
        neighbours.
        """
        if self.align_corners:
            return np.float32((self.size - 1) / (self.length - 1) if self.length > 1 else 0)
        return np.float32(self.size) / np.float32(self.length) if self.scale is None else np.float32(1 / self.scale)

    def _neighbour_taps(self) -> Taps:
        half, i, step = np.float32(0.5), np.arange(self.length, dtype=np.float32), self._step()
        if self.mode == "nearest":
            return [(np.floor(i * step), None)]
        if self.mode == "exact":
            return [(np.floor((i + half) * step), None)]
        x = i * step if self.align_corners else (i + half) * step - half
        if self.mode == "linear":
            x = np.maximum(x, 0)
            first = np.minimum(np.floor(x), self.size - 1)
            return [(first, 1 - (x - first)), (first + 1, x - first)]
        first = np.floor(x)
        return [(first + k, cubic_kernel(x - first - k, -0.75)) for k in (-1, 0, 1, 2)]

    def _antialiased(self) -> Taps:
        """Taps of a triangle or cubic filter as wide as the step."""
        step = self._step()
        width = np.maximum(step, np.float32(1))
        reach = (1 if self.mode == "linear" else 2) * width
        centres = step * (np.arange(self.length, dtype=np.float32) + np.float32(0.5))
        first = np.maximum(np.trunc(centres - reach + np.float32(0.5)), 0)
        last = np.minimum(np.trunc(centres + reach + np.float32(0.5)), self.size) - 1
        positions = first + np.arange((last - first).max() + 1)[:, None]
        distances = (positions - centres + np.float32(0.5)) / width
        shape = np.maximum(1 - np.abs(distances), 0) if self.mode == "linear" else cubic_kernel(distances, -0.5)
        factors = np.where(positions <= last, shape, 0)
        return list(zip(positions, factors / factors.sum(0), strict=True))

    def _area(self) -> Taps:
        starts = np.arange(self.length) * self.size // self.length
        ends = -(-np.arange(1, self.length + 1) * self.size // self.length)
        offsets = range((ends - starts).max())
        return [(starts + k, np.where(starts + k < ends, 1 / (ends - starts), 0)) for k in offsets]


def resampled(input: popxl.Tensor, axes: Sequence[Axis]) -> popxl.Tensor:
    """Resample the last axes of a tensor."""
    return _resample(input, axes=tuple(axes))


def _samples(input: Any, *, axes: tuple[Axis, ...]) -> Any:
    if input.dtype == jnp.uint8:
        return _byte_samples(input, axes)
    out = widen(input)
    for i, axis in enumerate(axes, input.ndim - len(axes)):
        out = _resample_axis(out, i, axis, axis.taps())
    return out.astype(input.dtype)


def _byte_samples(input: Any, axes: tuple[Axis, ...]) -> Any:
    """Resample uint8 images as PyTorch does: factors of at most 15 bits, last axis first, rounding after each axis."""
    out = input
    for i, axis in reversed(list(enumerate(axes, input.ndim - len(axes)))):
        taps = axis.taps()
        if taps[0][1] is None:
            out = apply_taps(out, i, taps)
            continue
        largest = max(factor.max() for _, factor in taps)
        steps = 2.0 ** next(bits for bits in range(23) if bits == 22 or int(largest * 2 ** (bits + 1) + 0.5) >= 2**15)
        whole = [
            (position, np.copysign(np.floor(abs(factor) * steps + 0.5), factor) / steps) for position, factor in taps
        ]
        blended = apply_taps(out.astype(jnp.float32), i, whole)
        out = jnp.clip(jnp.floor(blended + 0.5), 0, 255).astype(jnp.uint8)
    return out


def _read_backward(g: Any, *, axes: tuple[Axis, ...]) -> Any:
    out = widen(g)
    for i, axis in enumerate(axes, g.ndim - len(axes)):
        out = _resample_axis(out, i, axis, transposed(axis.taps(), axis.size))
    return out.astype(g.dtype)


def _resample_axis(t: Any, i: int, axis: Axis, taps: Taps) -> Any:
    """Resample one axis. Interpolated results are materialised: the next axis reads each element several times."""
    if axis.mode in ("nearest", "exact"):
        return apply_taps(t, i, taps)
    return materialize(lambda t: apply_taps(t, i, taps), t)


_resample_grad = jax_op(title="ResampleGrad")(_read_backward)
_resample = jax_op(title="Resample", gradient={"input": lambda g, axes: _resample_grad(g, axes=axes)})(_samples)


def _resizes(name: str, mode: str, axes: int, antialias: bool = False) -> None:
    def resize(
        input: popxl.Tensor, output_size: Sequence[int], align_corners: bool = False, **scales: float | None
    ) -> popxl.Tensor:
        names = ["scales"] if axes == 1 else ["scales_d", "scales_h", "scales_w"][-axes:]
        old = zip(input.shape[-axes:], output_size, (scales.get(name) for name in names), strict=True)
        return resampled(input, [Axis(mode, *each, align_corners, antialias) for each in old])

    lowers(f"aten.{name}{axes}d{'_aa' if antialias else ''}")(resize)


for _axes in (1, 2, 3):
    _resizes("upsample_nearest", "nearest", _axes)
    _resizes("_upsample_nearest_exact", "exact", _axes)
_resizes("upsample_linear", "linear", 1)
_resizes("upsample_bilinear", "linear", 2)
_resizes("upsample_trilinear", "linear", 3)
_resizes("upsample_bicubic", "cubic", 2)
_resizes("_upsample_bilinear", "linear", 2, antialias=True)
_resizes("_upsample_bicubic", "cubic", 2, antialias=True)

# At points of a grid --------------------------------------------------------------------------------------------------


@jax_op("aten.grid_sampler_2d", "aten.grid_sampler_3d", title="GridSample")
@round_once
def grid_sample(input: Any, grid: Any, *, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """Sample an image at coordinates from -1 to 1 per axis, last axis first.

    Args:
        input: array of shape `(N, C, ...)`.
        grid: array of shape `(N, ..., axes)`.
        interpolation_mode: 0 linear, 1 nearest, 2 cubic.
        padding_mode: values beyond the edges: 0 zeros, 1 the edge elements, 2 the mirrored image.
        align_corners: -1 and 1 are the centres of the outer pixels; otherwise the outer edges.
    """
    axes, index = input.ndim - 2, []
    factor: Any = 1
    for i, size in enumerate(input.shape[2:]):
        x = grid[..., -1 - i]
        x = (x + 1) * ((size - 1) / 2) if align_corners else (x + 1) * (size / 2) - 0.5
        inside = _coordinate_map(size, padding_mode, align_corners, is_volume=axes == 3)
        places, shares = _grid_neighbours(x if interpolation_mode == 2 else inside(x), interpolation_mode)
        places = inside(places) if interpolation_mode == 2 else places
        shares = jnp.where((places >= 0) & (places <= size - 1) | jnp.isnan(shares), shares, 0)
        # All combinations of the places along each axis: an axis for each, after those of the points.
        crossed = (*x.shape, *(1,) * i, places.shape[-1], *(1,) * (axes - 1 - i))
        index.append(jnp.clip(places, 0, size - 1).astype(jnp.int32).reshape(crossed))
        factor = factor * shares.reshape(crossed)
    batch = jnp.arange(len(input)).reshape(-1, *(1,) * 2 * axes)
    seen = input[(batch, slice(None), *index)] * factor[..., None]
    return jnp.moveaxis(seen.sum(range(1 + axes, 1 + 2 * axes)), -1, 1)


def _coordinate_map(size: int, padding_mode: int, align_corners: bool, is_volume: bool) -> Callable[[Any], Any]:
    """Map out-of-range coordinates into the image, by padding mode.

    What is no finite number is, as in PyTorch, outside of volumes, or their last element; the first one of images.
    """
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)

    def limited(x: Any) -> Any:
        if padding_mode == 0:
            return jnp.where(jnp.isfinite(x), x, -100) if is_volume else x
        if padding_mode == 2:
            x = _mirrored(x, low, high, is_volume) if high > low else jnp.zeros_like(x)
        if is_volume:
            return jnp.where(x < size - 1, jnp.where(x < 0, 0, x), size - 1)
        return jnp.where(x > 0, jnp.where(x < size - 1, x, size - 1), 0)

    return limited


def _mirrored(x: Any, low: float, high: float, is_volume: bool) -> Any:
    """Coordinates mirrored at both edges. Those of images are rounded as PyTorch rounds them, also far away."""
    distance, span = jnp.abs(x - low), high - low
    if is_volume:
        beyond = jnp.fmod(distance, span)
        return low + jnp.where(jnp.floor(distance / span) % 2 == 0, beyond, span - beyond)
    beyond = distance - jnp.floor(distance / (2 * span)) * (2 * span)
    return low + jnp.minimum(beyond, 2 * span - beyond)


def _grid_neighbours(x: Any, mode: int) -> tuple[Any, Any]:
    """Grid positions around coordinates, along a new axis, with their interpolation weights."""
    if mode == 1:
        return jnp.round(x)[..., None], jnp.ones((*x.shape, 1), x.dtype)
    first = jax.lax.stop_gradient(jnp.floor(x))
    beyond = x - first
    if mode == 0:
        return first[..., None] + jnp.arange(2), jnp.stack([1 - beyond, beyond], -1)
    steps = jnp.arange(-1, 3)
    return first[..., None] + steps, cubic_kernel(beyond[..., None] - steps, -0.75, jnp.where)


# Patches --------------------------------------------------------------------------------------------------------------


def _columns(image: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Image patches as columns: from `(..., C, H, W)` to `(..., C * kernel, places)`."""
    *outer, channels, _, _ = image.shape
    image = jnp.pad(image, [(0, 0)] * (image.ndim - 2) + [(pad, pad) for pad in padding])
    axes = list(zip(image.shape[-2:], kernel, dilation, stride, strict=True))
    counts = [(size - reach * (k - 1) - 1) // step + 1 for size, k, reach, step in axes]

    def aligned_elements(*element: int) -> Any:
        """Image elements aligned with one kernel element."""
        steps = zip(element, dilation, counts, stride, strict=True)
        return image[(..., *(slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, n, s in steps))]

    seen = jnp.stack([aligned_elements(*element) for element in itertools.product(*map(range, kernel))], -3)
    return seen.reshape(*outer, channels * math.prod(kernel), math.prod(counts))


@jax_op("aten.im2col", title="Unfold")
def im2col(input: Any, *, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return _columns(input, kernel_size, dilation, padding, stride)


@jax_op("aten.col2im", title="Fold")
def col2im(input: Any, *, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Transpose of im2col: sum overlapping patches."""
    channels = input.shape[-2] // math.prod(kernel_size)
    wide = widen(input)
    image = jax.ShapeDtypeStruct((*input.shape[:-2], channels, *output_size), wide.dtype)
    (out,) = jax.linear_transpose(lambda t: _columns(t, kernel_size, dilation, padding, stride), image)(wide)
    return out
