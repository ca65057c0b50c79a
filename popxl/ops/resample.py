"""Sampling images between their pixels: `interpolate` resizes them, `roi_align` cuts regions out of them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.precision import wide_dtype, widen
from popxl.values.shapes import integer, integers, is_known_word, number, of_shape
from popxl.values.spec import TensorSpec

InterpolateType = Literal["nearest", "linear", "cubic"]
InterpolateNearestType = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
InterpolateCoordinateTransformationType = Literal[
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"
]

# Interpolation ------------------------------------------------------------------------------------------------------

Taps = list[tuple[Any, Any]]
"""Linear interpolation of an axis: positions on the source axis with factors; `None` for the factor 1."""


def _resized(size: int, scale: float) -> int:
    """Resized length of an axis. The product is computed in float32: 10 times 0.7 is 7."""
    return math.floor(np.float32(size) * np.float32(scale))


def _coordinates(size: int, scale: float, mode: str) -> Any:
    """Source coordinates of resized axis elements.

    In float32, step by step as written: users compare results to seven digits, and digits more would change them.
    """
    i, s = np.arange(_resized(size, scale), dtype=np.float32), np.float32(scale)
    if mode == "asymmetric":
        return i / s
    if mode == "align_corners":  # float64, as the numbers that it is compared with
        length = size * scale
        return np.zeros(i.shape) if length == 1 else i.astype(np.float64) * (size - 1) / (length - 1)
    if mode == "pytorch_half_pixel" and np.float32(size) * s <= 1:
        return np.zeros_like(i)
    return (i + np.float32(0.5)) / s - np.float32(0.5)


_nearest: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - x.dtype.type(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + x.dtype.type(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _taps(size: int, scale: float, mode: str, nearest_mode: str, coordinate_transformation_mode: str) -> Taps:
    """The taps of a resized axis on the old one. Beyond its ends, the element at the edge goes on for ever."""
    taps = _interpolation_taps(_coordinates(size, scale, coordinate_transformation_mode), mode, nearest_mode)
    return [(np.clip(position, 0, size - 1).astype(np.int32), factor) for position, factor in taps]


def _interpolation_taps(x: Any, mode: str, nearest_mode: str) -> Taps:
    """Taps for elements at coordinates `x`."""
    if mode == "nearest":
        return [(_nearest[nearest_mode](x), None)]
    if mode == "linear":
        clamped = np.maximum(x, 0)
        fraction = clamped - np.floor(clamped)
        return [(np.floor(x), 1 - fraction), (np.ceil(x), fraction)]
    first = np.floor(x)
    r = np.float64(x - first)  # cancellation between four products would cost digits
    return [(first + k, cubic_kernel(r - k, -0.75)) for k in (-1, 0, 1, 2)]


def cubic_kernel(distance: Any, slope: float, where: Callable[..., Any] = np.where) -> Any:
    """Keys' cubic convolution kernel. Image libraries use the slope -0.75, or -0.5 for antialiasing."""
    x = abs(distance)
    inner = ((slope + 2) * x - (slope + 3)) * x * x + 1
    outer = ((slope * x - 5 * slope) * x + 8 * slope) * x - 4 * slope
    return where(x <= 1, inner, where(x >= 2, 0, outer))  # of NaN: NaN


def _interpolate(
    t: Any, *, scale_factor: tuple[float, ...], mode: str, nearest_mode: str, coordinate_transformation_mode: str
) -> Any:
    if coordinate_transformation_mode == "tf_crop_and_resize":
        raise PopxlError(
            "interpolate: the `coordinate_transformation_mode` 'tf_crop_and_resize' wants a region to crop, which the "
            "op does not take. Choose another, or crop with `ops.slice` first."
        )
    t = widen(t)
    for axis, (size, scale) in enumerate(zip(t.shape, scale_factor, strict=True)):
        if scale != 1:
            t = apply_taps(t, axis, _taps(size, scale, mode, nearest_mode, coordinate_transformation_mode))
    return t


def apply_taps(t: Any, axis: int, taps: Taps) -> Any:
    """An axis made anew. The factor 0 takes nothing, not even infinities and NaN."""

    def term(position: Any, factor: Any) -> Any:
        values = jnp.take(t, position, axis, mode="clip")
        if factor is None:
            return values
        column = factor.reshape(-1, *(1,) * (t.ndim - axis - 1)).astype(wide_dtype(t))
        return jnp.where(column == 0, 0, values * column) if (factor == 0).any() else values * column

    return functools.reduce(operator.add, [term(*tap) for tap in taps])


def _interpolate_backward(g: Any, *, shape: tuple[int, ...], scale_factor: tuple[float, ...], **modes: str) -> Any:
    """Transposed interpolation, using transposed taps."""
    if not g.size:
        return jnp.zeros(shape, g.dtype)
    g = widen(g)
    for axis, (size, scale) in reversed(list(enumerate(zip(shape, scale_factor, strict=True)))):
        if scale != 1:
            g = apply_taps(g, axis, transposed(_taps(size, scale, **modes), size))
    return g


def transposed(taps: Taps, size: int) -> Taps:
    """The taps of the old axis, of this size, on the resized one. (Gathering is many times faster than scattering.)"""
    length = len(taps[0][0])
    flat_reads = np.concatenate([position.astype(np.int64) * length + np.arange(length) for position, _ in taps])
    factors = np.concatenate([np.ones(length) if factor is None else factor for _, factor in taps])
    # At the edges, an element may be read several times by one.
    pairs, pair_of = np.unique(flat_reads, return_inverse=True)
    elements, readers = pairs // length, pairs % length
    nth = np.arange(len(pairs)) - np.searchsorted(elements, elements)  # reader of the element
    positions, weights = np.zeros((nth.max() + 1, size), np.int32), np.zeros((nth.max() + 1, size))
    positions[nth, elements], weights[nth, elements] = readers, np.bincount(pair_of, factors)
    return list(zip(positions, weights, strict=True))


def _interpolated(t: Any, *, scale_factor: tuple[float, ...], **modes: str) -> TensorSpec:
    if len(scale_factor) != len(t.shape):
        raise PopxlError(
            f"`scale_factor` has {len(scale_factor)} entries, {scale_factor}; expected one for each of the "
            f"{len(t.shape)} dimensions of `t`, batch and channels included."
        )
    return TensorSpec(tuple(map(_resized, t.shape, scale_factor)), t.dtype)


_resize = OpKind(
    "Resize",
    _interpolate,
    traits=REAL,
    shape=_interpolated,
    result="interpolate_out",
    gradient={"t": lambda g, t_spec, attributes: _resize_grad(g, shape=t_spec.shape, **attributes)},
)
_resize_grad: OpKind = OpKind("ResizeGrad", _interpolate_backward, shape=of_shape)


def interpolate(
    t: Tensor,
    scale_factor: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    mode: InterpolateType = "nearest",
    nearest_mode: InterpolateNearestType = "round_prefer_floor",
    coordinate_transformation_mode: InterpolateCoordinateTransformationType = "half_pixel",
) -> Tensor:
    """Resize each axis by a factor, reading between the elements.

    An axis of size `n` becomes `floor(n * s)` long. Axes are resized one after the other; those with the factor 1 are
    unchanged. Element `i` of the result lies at the coordinate `x` of the old axis, with `L = n * s`, not rounded:

    ====================  ==========================================
    `half_pixel`          `(i + 0.5) / s - 0.5`
    `pytorch_half_pixel`  the same if `L > 1`, else 0
    `asymmetric`          `i / s`
    `align_corners`       `i * (n - 1) / (L - 1)`; 0 if `L` is 1
    ====================  ==========================================

    Beyond the ends, the edge element is repeated. The gradient is the exact transpose, in every mode.

    Args:
        t: tensor of any rank.
        scale_factor: a factor above 0 for each axis of `t`, batch and channels included.
        mode: `"nearest"` takes one element, `"linear"` blends two, `"cubic"` four (Keys' kernel with the slope -0.75).
            Blends are made in float32 and rounded once.
        nearest_mode: choice of the nearest element: `"round_prefer_floor"` (of two equally near the left one),
            `"round_prefer_ceil"` (the right one), `"floor"`, or `"ceil"`.
        coordinate_transformation_mode: one of the table above. `"tf_crop_and_resize"` can be declared, but not run.

    Returns:
        A new tensor of the same dtype.

    Raises:
        ValueError: for a mode that does not exist, or a factor that is not above 0.
        PopxlError: if there is not one factor for each axis; when the session is made, for `"tf_crop_and_resize"`.

    See also: `torch.nn.functional.interpolate`.

    Example:
        >>> large = ops.interpolate(images, (1, 1, 2, 2), "linear")
    """
    choices: dict[str, tuple[Any, Any]] = {
        "mode": (mode, InterpolateType),
        "nearest_mode": (nearest_mode, InterpolateNearestType),
        "coordinate_transformation_mode": (coordinate_transformation_mode, InterpolateCoordinateTransformationType),
    }
    for name, (choice, literal) in choices.items():
        if not is_known_word(choice, get_args(literal)):
            raise ValueError(f"interpolate: `{name}` is {choice!r}; expected one of {', '.join(get_args(literal))}.")
    return _resize(t, scale_factor=_factors(scale_factor), **{name: choice for name, (choice, _) in choices.items()})


def _factors(scale_factor: Iterable[float]) -> tuple[float, ...]:
    try:
        factors = tuple(map(float, scale_factor))
    except (TypeError, ValueError):
        raise TypeError(
            f"interpolate: `scale_factor` must be a sequence of numbers, one for each axis; got {scale_factor!r}."
        ) from None
    if not all(0 < factor < math.inf for factor in factors):
        raise ValueError(f"interpolate: `scale_factor` is {factors}; expected numbers above 0.")
    return factors


# Regions of interest ------------------------------------------------------------------------------------------------


def _samples(start: Any, end: Any, bins: int, ratio: int, size: int) -> tuple[Any, Any, Any, Any]:
    """Sampling positions of regions along an axis of `size` pixels: arrays with a row per region.

    Returns:
        Whether the sample counts, the pixels before and after it, and how far it is from the first to the second.
    """
    step = (jnp.maximum(end - start, 1) / bins)[:, None, None]
    bin_ = jnp.arange(bins, dtype=step.dtype)[:, None]
    subsample = jnp.arange(ratio, dtype=step.dtype) + 0.5
    # In the order of other libraries, which matters at borders.
    x = start[:, None, None] + bin_ * step + subsample * step / ratio
    x = x.reshape(-1, bins * ratio)
    counts = (x >= -1) & (x <= size)
    x = jnp.clip(x, 0, size - 1)
    floor = jnp.floor(x)
    before = floor.astype(jnp.int32)
    return counts, before, jnp.minimum(before + 1, size - 1), x - floor


def _roi_align(
    t: Any,
    rois: Any,
    batch_index: Any,
    *,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Any:
    images = jnp.asarray(t, wide_dtype(t))
    x1, y1, x2, y2 = (rois.astype(images.dtype) * spatial_scale).T
    (_, channels, height, width), (rows, columns), s = t.shape, output_size, sampling_ratio
    y_counts, top, bottom, down = _samples(y1, y2, rows, s, height)
    x_counts, left, right, across = _samples(x1, x2, columns, s, width)
    # Each corner is one lookup, regions by rows by columns by channels: no image is copied for its regions.
    image = batch_index[:, None, None]

    def corner(y: Any, x: Any, y_share: Any, x_share: Any) -> Any:
        pixels = images.at[image, :, y[:, :, None], x[:, None, :]].get(mode="clip")
        return pixels * (y_share[:, :, None] * x_share[:, None, :])[..., None]

    blended = (
        corner(top, left, 1 - down, 1 - across)
        + corner(top, right, 1 - down, across)
        + corner(bottom, left, down, 1 - across)
        + corner(bottom, right, down, across)
    )
    counted = jnp.where((y_counts[:, :, None] & x_counts[:, None, :])[..., None], blended, 0)
    pooled = counted.reshape(len(rois), rows, s, columns, s, channels).mean((2, 4))
    return pooled.transpose(0, 3, 1, 2)


def _roi_align_backward(g: Any, rois: Any, batch_index: Any, *, shape: tuple[int, ...], **how: Any) -> Any:
    """Transpose of this linear op, as gradient without reading `t`."""
    seed = g.astype(wide_dtype(g))

    def forward(t: Any) -> Any:
        return _roi_align(t, rois, batch_index, **how)

    (gradient,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct(shape, seed.dtype))(seed)
    return gradient


def _aligned(
    t: Any,
    rois: Any,
    batch_index: Any,
    *,
    output_size: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> TensorSpec:
    for name, operand, rank in (("t", t, 4), ("rois", rois, 2), ("batch_index", batch_index, 1)):
        if len(operand.shape) != rank:
            raise PopxlError(f"expected `{name}` of rank {rank}; it has rank {len(operand.shape)}.")
    regions, corners = rois.shape
    if corners != 4 or batch_index.shape != (regions,):
        raise PopxlError("expected `rois` of shape (R, 4), rows of x1, y1, x2, y2, and `batch_index` of shape (R,).")
    if len(output_size) != 2 or min(output_size) < 1:
        raise PopxlError(f"`output_size` is {output_size}; expected two positive integers, height and width.")
    if sampling_ratio < 0:
        raise TypeError(f"`sampling_ratio` is {sampling_ratio}; expected a positive integer.")
    if sampling_ratio == 0 or not spatial_scale > 0:
        raise PopxlError(
            f"`sampling_ratio` is {sampling_ratio} and `spatial_scale` {spatial_scale}; expected numbers above 0."
        )
    samples = math.prod(output_size) * sampling_ratio**2
    if samples >= 2**31:
        raise PopxlError(
            f"`sampling_ratio` is {sampling_ratio} and `output_size` {output_size}: {samples} samples of each "
            "region; expected fewer than 2**31."
        )
    return TensorSpec((regions, t.shape[1], *output_size), t.dtype)


_roi_align_kind = OpKind(
    "RoiAlign",
    _roi_align,
    traits=REAL,
    shape=_aligned,
    gradient={
        "t": lambda g, t_spec, rois, batch_index, attributes: _roi_align_grad(
            g, rois, batch_index, shape=t_spec.shape, **attributes
        )
    },
)
_roi_align_grad: OpKind = OpKind("RoiAlignGrad", _roi_align_backward, shape=of_shape)


def roi_align(
    t: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    """Cut regions out of images, and average each down (or up) to one size.

    A region is scaled by `spatial_scale`, nothing is rounded, and it is at least one pixel high and wide. It is cut
    into bins, and each bin is the mean of `sampling_ratio` by `sampling_ratio` samples, evenly spread, each blended of
    the four pixels around it. Samples that lie more than a pixel outside of the image are 0.

    Args:
        t: float images of shape `(N, C, H, W)`.
        rois: regions of shape `(R, 4)`: rows of `x1, y1, x2, y2`, in the dtype of `t`.
        batch_index: int32 of shape `(R,)`: the image of each region.
        output_size: height and width of the result.
        spatial_scale: pixels of `t` for one unit of `rois`; above 0.
        sampling_ratio: samples along each side of a bin; above 0.

    Returns:
        A new tensor of shape `(R, C, *output_size)` and the dtype of `t`. Its gradient goes to `t` alone.

    Raises:
        PopxlError: if the ranks are not 4, 2 and 1, the shapes do not fit, `spatial_scale` is not above 0, or
            `sampling_ratio` is 0 or makes 2**31 samples of a region.
        TypeError: for a negative `sampling_ratio`.

    See also: `torchvision.ops.roi_align`, with `aligned=False`.

    Example:
        >>> crops = ops.roi_align(features, boxes, image_of_box, (7, 7), spatial_scale=1 / 16, sampling_ratio=2)
    """
    return _roi_align_kind(
        t,
        rois,
        batch_index,
        output_size=integers(output_size, "roi_align: `output_size`"),
        spatial_scale=float(number(spatial_scale, "roi_align: `spatial_scale`")),
        sampling_ratio=integer(sampling_ratio, "roi_align: `sampling_ratio`"),
    )
