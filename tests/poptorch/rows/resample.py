"""Images read between their pixels, and patches of images."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, whole

_SHAPES = {1: (2, 3, 5), 2: (2, 3, 5, 4), 3: (1, 2, 5, 4, 3)}
_MODES = [
    *((mode, axes) for mode in ("nearest", "nearest-exact", "area") for axes in (1, 2, 3)),
    *[("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)],
]


def _resized(mode: str, axes: int) -> Row:
    """An image resized in several ways."""
    return Row(
        f"{mode} {axes}d",
        lambda x: [F.interpolate(x, mode=mode, **way) for way in _ways(mode, axes)],
        (normal(*_SHAPES[axes]),),
        tolerance=2e-5,
    )


def _far_grid(axes: int) -> torch.Tensor:
    """Coordinates outside, far away, or not finite; all combinations."""
    points = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.3, -2.2, 1e10])
    return torch.stack(torch.meshgrid(*[points] * axes, indexing="ij"), -1)[None]


def _nearly_all(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bytes are rounded to the nearest; a factor at an edge may differ in its fifteenth bit."""
    apart = (mine.int() - theirs.int()).abs()
    assert mine.dtype == theirs.dtype == torch.uint8
    assert apart.max() <= 1
    assert apart.float().mean() < 0.02


def _ways(mode: str, axes: int) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [{"scale_factor": 2}, {"scale_factor": 1.7}, {"size": (3, 7, 2)[:axes]}]
    if "linear" in mode or "cubic" in mode:
        ways.append({"size": (3, 7, 1)[:axes], "align_corners": True})
    return ways


def _sample(mode: str, padding: str, axes: int = 2) -> Row:
    shapes = {2: ((2, 3, 5, 4), (2, 3, 4, 2)), 3: ((2, 3, 5, 4, 3), (2, 3, 4, 2, 3))}[axes]
    # In float16 coordinates are too coarse: PyTorch computes with what they are rounded to.
    return Row(
        f"grid_sample {axes}d, {mode}, {padding}",
        lambda x, grid: [F.grid_sample(x, grid, mode, padding, align) for align in (False, True)],
        tuple(normal(*shape) for shape in shapes),
        half=False,
        tolerance=1e-4,
    )


ROWS = [
    *(_resized(mode, axes) for mode, axes in _MODES),
    Row(
        "recomputed factors",
        lambda x: F.interpolate(x, scale_factor=(0.6, 1.3), mode="bilinear", recompute_scale_factor=True),
        (normal(2, 3, 5, 4),),
    ),
    *(
        Row(
            f"antialiased {mode}",
            lambda x, mode=mode: [F.interpolate(x, size, mode=mode, antialias=True) for size in ((2, 3), (7, 3))],
            (normal(2, 3, 5, 4),),
            half=False,
        )
        for mode in ("bilinear", "bicubic")
    ),
    *(
        Row(
            f"bytes, {mode}",
            lambda x, mode=mode: [
                F.interpolate(x, size, mode=mode, align_corners=corners, antialias=antialias)
                for size in ((2, 3), (11, 9), (5, 9), (11, 2))
                for corners, antialias in ((False, False), (True, False), (False, True))
            ],
            (whole(2, 3, 5, 7, high=256).to(torch.uint8),),
            like=_nearly_all,
            half=False,
        )
        for mode in ("bilinear", "bicubic")
    ),
    Row("Upsample", lambda x: torch.nn.Upsample(scale_factor=3)(x), (normal(2, 3, 4, 5),)),
    *(
        _sample(mode, padding)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
    ),
    *(_sample(mode, "zeros", axes=3) for mode in ("bilinear", "nearest")),
    *(
        Row(
            f"grid_sample {axes}d of no numbers",
            lambda x, grid, modes=modes: [
                F.grid_sample(x, grid, mode, padding, align)
                for mode in modes
                for padding in ("zeros", "border", "reflection")
                for align in (False, True)
            ],
            (normal(*_SHAPES[axes])[:1], _far_grid(axes)),
            half=False,
            gradient=False,
        )
        for axes, modes in ((2, ("bilinear", "nearest", "bicubic")), (3, ("bilinear", "nearest")))
    ),
    Row("affine_grid", lambda theta: F.affine_grid(theta, [2, 3, 4, 5], align_corners=False), (normal(2, 2, 3),)),
    Row("affine_grid 3d", lambda theta: F.affine_grid(theta, [2, 1, 3, 4, 5], align_corners=True), (normal(2, 3, 4),)),
    Row("unfold", lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1)), (normal(2, 3, 5, 6),)),
    Row("unfold without batch", lambda x: F.unfold(x, 2), (normal(3, 5, 6),)),
    Row(
        "fold", lambda x: F.fold(x, (5, 6), (2, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1)), (normal(2, 18, 6),)
    ),
    Row("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (normal(2, 8, 3, 4),)),
]
