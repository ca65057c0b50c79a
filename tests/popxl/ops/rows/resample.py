"""Rows of the ops that read images between their pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import FLOATS, Array, PopxlError, Row, Sample, X, bad, f32, i32, over, sample, values

single = np.float32

# Interpolation ------------------------------------------------------------------------------------------------------


def source(i: int, n: int, s: float, coordinates: str) -> float:
    """Where element `i` of the result is on the old axis; in single precision, but for `align_corners`."""
    if coordinates == "asymmetric":
        return single(i) / single(s)
    if coordinates == "align_corners":
        return 0.0 if n * s == 1 else i * (n - 1) / (n * s - 1)
    if coordinates == "pytorch_half_pixel" and n * s <= 1:
        return single(0)
    return (single(i) + single(0.5)) / single(s) - single(0.5)


def shares(x: float, mode: str, nearest: str) -> dict[int, float]:
    """How much of which element there is at a coordinate."""
    floor = math.floor(x)
    if mode == "nearest":
        rounded = {"floor": floor, "ceil": math.ceil(x)}
        rounded["round_prefer_floor"] = floor if x - floor <= 0.5 else floor + 1
        rounded["round_prefer_ceil"] = floor if x - floor < 0.5 else floor + 1
        return {rounded[nearest]: 1.0}
    if mode == "linear":
        return {floor: 1 - (x - floor), floor + 1: x - floor}
    a = -0.75

    def keys(d: float) -> float:
        d = abs(d)
        return (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4)

    return {floor + k: keys(x - floor - k) for k in (-1, 0, 1, 2)}


def interpolate(
    t: Array,
    scale_factor: Any = (1.0,) * 4,
    mode: str = "nearest",
    nearest: str = "round_prefer_floor",
    coordinates: str = "half_pixel",
    **names: str,
) -> Array:
    nearest = names.get("nearest_mode", nearest)
    coordinates = names.get("coordinate_transformation_mode", coordinates)
    out = t
    for axis, s in enumerate(scale_factor):
        if s == 1:
            continue
        n = t.shape[axis]
        weights = np.zeros((math.floor(single(n) * single(s)), n))
        for i, row in enumerate(weights):
            for position, share in shares(float(source(i, n, s, coordinates)), mode, nearest).items():
                row[min(max(position, 0), n - 1)] += share
        out = np.moveaxis(np.tensordot(weights, out, (1, axis)), 0, axis)
    return np.asarray(out, t.dtype)


MODES = [
    *(("nearest", nearest) for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    ("linear", "floor"),
    ("cubic", "floor"),
]
COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
FACTORS = [(2.0, 1.5), (1, 0.3), (2.3, 1), (1.0, 0.2), (3, 0.5)]
V = f32(10, 20, 30, 40)

# Regions ------------------------------------------------------------------------------------------------------------


def pixel(image: Array, y: float, x: float) -> Array:
    """All channels at a place, blended of the four pixels around it."""
    _, height, width = image.shape
    if y < -1 or y > height or x < -1 or x > width:
        return np.zeros(len(image))
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = math.floor(y), math.floor(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, across = y - top, x - left
    upper = image[:, top, left] * (1 - across) + image[:, top, right] * across
    lower = image[:, bottom, left] * (1 - across) + image[:, bottom, right] * across
    return upper * (1 - down) + lower * down


def roi_align(t: Array, rois: Array, batch_index: Array, output_size: Any, scale: float, ratio: int) -> Array:
    rows, columns = output_size
    out = np.zeros((len(rois), t.shape[1], rows, columns))
    for r, (x1, y1, x2, y2) in enumerate(rois * scale):
        bin_h, bin_w = max(y2 - y1, 1) / rows, max(x2 - x1, 1) / columns
        for i in range(rows):
            for j in range(columns):
                samples = [
                    pixel(t[batch_index[r]], y1 + i * bin_h + (u + 0.5) * bin_h / ratio,
                          x1 + j * bin_w + (v + 0.5) * bin_w / ratio)
                    for u in range(ratio) for v in range(ratio)
                ]  # fmt: skip
                out[r, :, i, j] = np.mean(samples, axis=0)
    return out


IMAGES = values("float32", (2, 3, 5, 7))
ROIS = f32([1, 1.5, 9, 7], [0.25, 0.5, 0.75, 0.6], [-8, -9, 30, 21], [3.3, 2, 2, 1], [40, 40, 50, 50])
IMAGE_OF = i32(1, 0, 1, 0, 0)


def aligned(**changes: Any) -> list[Any]:
    """Arguments of `roi_align`, some of them changed."""
    usual = {"t": IMAGES, "rois": ROIS, "batch_index": IMAGE_OF, "size": (2, 3), "scale": 0.5, "ratio": 2}
    return list((usual | changes).values())


RESAMPLE = [
    Row("interpolate", interpolate,
        [*(s for d in "float32 float16 bfloat16 int8 uint8 int16 int32 uint32".split()
           for s in over(d, (1, 2, 3, 4), scale_factor=(1, 1, 2, 3.0))),
         *(s for d in FLOATS.split() for mode in ("linear", "cubic")
           for s in over(d, (2, 3, 4), scale_factor=[1, 2, 1.5], mode=mode)),
         *(Sample((values("float32", (3, 5)), factors, mode, nearest, coordinates), {}, thorough=(m + c + f) % 3 > 0)
           for m, (mode, nearest) in enumerate(MODES) for c, coordinates in enumerate(COORDINATES)
           for f, factors in enumerate(FACTORS)),
         *over("float32", (1, 2, 2, 3)), *over("float32", (1, 2, 2, 3), mode="linear"),
         *over("float32", (), scale_factor=()),
         *over("float32", (10,), scale_factor=(0.7,)), *over("float32", (3,), scale_factor=[0.1]),
         *over("float32", (5,), scale_factor=(np.float32(0.2),), coordinate_transformation_mode="align_corners"),
         *over("float32", (2, 2, 3, 2, 2), scale_factor=(1, 1, 1, 2, 1.5), mode="cubic"),
         sample(V, (2,), expect=f32(10, 10, 20, 20, 30, 30, 40, 40)),
         sample(V, (1.5,), expect=f32(10, 10, 20, 30, 30, 40)),
         sample(V, (0.5,), expect=f32(10, 30)), sample(V, (0.5,), nearest_mode="round_prefer_ceil", expect=f32(20, 40)),
         sample(V[:2], (2.0,), "nearest", "ceil", "asymmetric", expect=f32(10, 20, 20, 20)),
         sample(V, (2,), "linear", expect=f32(10, 12.5, 17.5, 22.5, 27.5, 32.5, 37.5, 40)),
         sample(V[:2], (2,), "linear", "floor", "align_corners", expect=f32(10, 40 / 3, 50 / 3, 20)),
         sample(V, (2,), "cubic", expect=f32(8.945312, 11.914062, 16.679688, 22.96875, 27.03125, 33.320312, 38.085938,
                                             41.054688))],
        "Resize", "interpolate_out", differentiable=(0,), keeps=0,
        bad=[bad(ValueError, "^interpolate: `mode` is 'area'; expected one of nearest, linear", X, (1, 2), "area"),
             bad(ValueError, "`nearest_mode` is 'up'; expected one of round_prefer_floor, ", X, (1, 2), "cubic", "up"),
             bad(ValueError, "`coordinate_transformation_mode` is 'pixel'; expected one of half_pixel, ", X, (1, 2),
                 coordinate_transformation_mode="pixel"),
             bad(ValueError, r"`scale_factor` is \(1\.0, 0\.0\); expected numbers above 0", X, (1, 0)),
             bad(ValueError, "expected numbers above 0", X, (1, -2)),
             bad(ValueError, "expected numbers above 0", X, (1, float("nan"))),
             bad(TypeError, "`scale_factor` must be a sequence of numbers, one for each axis; got 2", X, 2),
             bad(PopxlError, r"`scale_factor` has 4 entries, .*; expected one for each of the 2 dimensions of `t`", X),
             bad(PopxlError, "`scale_factor` has 1 entries", X, (2,))]),
    Row("roi_align", roi_align,
        [*(sample(values(d, (2, 3, 5, 7)), ROIS.astype(d), IMAGE_OF, (2, 3), 0.5, 2) for d in FLOATS.split()),
         sample(IMAGES, ROIS, IMAGE_OF, [1, 1], 1.0, 1), sample(IMAGES, ROIS, IMAGE_OF, (3, 4), 0.3, 3),
         sample(values("float32", (1, 2, 4, 1)), f32([1, 1, 2, 5]), i32(0), (np.int32(4), 2), 1, np.int64(1))],
        "RoiAlign", "roi_align_out", differentiable=(0,), keeps=2, tolerance=5e-6,
        bad=[bad(PopxlError, "expected `t` of rank 4; it has rank 3", *aligned(t=IMAGES[0])),
             bad(PopxlError, "expected `rois` of rank 2; it has rank 1", *aligned(rois=ROIS[0])),
             bad(PopxlError, "expected `batch_index` of rank 1; it has", *aligned(batch_index=IMAGE_OF[:, None])),
             bad(PopxlError, r"expected `rois` of shape \(R, 4\)", *aligned(rois=ROIS[:, :3].copy())),
             bad(PopxlError, r"and `batch_index` of shape \(R,\)", *aligned(batch_index=IMAGE_OF[:2])),
             bad(PopxlError, r"`output_size` is \(2, 3, 1\); expected two positive integers", *aligned(size=(2, 3, 1))),
             bad(PopxlError, r"`output_size` is \(2, 0\)", *aligned(size=(2, 0))),
             bad(TypeError, "^roi_align: `output_size` must be a sequence of integers", *aligned(size=2)),
             bad(TypeError, "`sampling_ratio` is -1; expected a positive integer", *aligned(ratio=-1)),
             bad(TypeError, "^roi_align: `sampling_ratio` must be an integer", *aligned(ratio=2.0)),
             bad(TypeError, "^roi_align: `spatial_scale` must be a number; got None", *aligned(scale=None)),
             bad(PopxlError, "`sampling_ratio` is 0", *aligned(ratio=0)),
             bad(PopxlError, r"`spatial_scale` 0\.0; expected numbers above 0", *aligned(scale=0)),
             bad(PopxlError, r"`spatial_scale` -1\.5", *aligned(scale=-1.5))]),
]  # fmt: skip
