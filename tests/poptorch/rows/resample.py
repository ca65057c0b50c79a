"""Images read between their pixels, and patches of images."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

_SHAPES = {1: (2, 3, 5), 2: (2, 3, 5, 4), 3: (1, 2, 5, 4, 3)}
_MODES = [
    *((mode, axes) for mode in ("nearest", "nearest-exact", "area") for axes in (1, 2, 3)),
    *[("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)],
]


def _resize(mode: str, axes: int, **how: Any) -> Row:
    said = ", ".join(f"{key} {value}" for key, value in how.items())
    return Row(
        f"{mode} {axes}d, {said}",
        lambda x: F.interpolate(x, mode=mode, **how),
        (normal(*_SHAPES[axes]),),
        half="antialias" not in how,
        tolerance=2e-5,
    )


def _sample(mode: str, padding: str, align_corners: bool, axes: int = 2) -> Row:
    image, points = (
        (normal(2, 3, 5, 4), normal(2, 3, 4, 2)) if axes == 2 else (normal(2, 3, 5, 4, 3), normal(2, 3, 4, 2, 3))
    )
    # In float16 coordinates are too coarse: PyTorch computes with what they are rounded to.
    return Row(
        f"grid_sample {axes}d, {mode}, {padding}, {align_corners}",
        lambda x, grid: F.grid_sample(x, grid, mode, padding, align_corners),
        (image, points),
        half=False,
        tolerance=1e-4,
    )


ROWS = [
    *(_resize(mode, axes, scale_factor=2) for mode, axes in _MODES),
    *(_resize(mode, axes, scale_factor=1.7) for mode, axes in _MODES),
    *(_resize(mode, axes, size=(3, 7, 2)[:axes]) for mode, axes in _MODES),
    _resize("bilinear", 2, scale_factor=(0.6, 1.3), recompute_scale_factor=True),
    *(
        _resize(mode, axes, size=(3, 7, 1)[:axes], align_corners=True)
        for mode, axes in _MODES
        if "near" not in mode and mode != "area"
    ),
    *(_resize(mode, 2, size=size, antialias=True) for mode in ("bilinear", "bicubic") for size in ((2, 3), (7, 3))),
    Row("Upsample", lambda x: torch.nn.Upsample(scale_factor=3)(x), (normal(2, 3, 4, 5),)),
    *(
        _sample(mode, padding, align)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        for align in (False, True)
    ),
    *(_sample(mode, "zeros", False, axes=3) for mode in ("bilinear", "nearest")),
    Row("affine_grid", lambda theta: F.affine_grid(theta, [2, 3, 4, 5], align_corners=False), (normal(2, 2, 3),)),
    Row("affine_grid 3d", lambda theta: F.affine_grid(theta, [2, 1, 3, 4, 5], align_corners=True), (normal(2, 3, 4),)),
    Row("unfold", lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1)), (normal(2, 3, 5, 6),)),
    Row("unfold without batch", lambda x: F.unfold(x, 2), (normal(3, 5, 6),)),
    Row(
        "fold", lambda x: F.fold(x, (5, 6), (2, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1)), (normal(2, 18, 6),)
    ),
    Row("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (normal(2, 8, 3, 4),)),
]
