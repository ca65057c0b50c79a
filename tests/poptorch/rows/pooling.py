"""Pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, whole

_SHAPES = {1: (2, 3, 7), 2: (2, 3, 7, 6), 3: (1, 2, 5, 7, 6)}


def _pool(name: str, axes: int, *ways: dict[str, Any]) -> Row:
    """A pool in several ways."""
    function = getattr(F, f"{name}{axes}d")
    # PyTorch has no averages of volumes in float16.
    half = axes < 3 or name not in ("avg_pool", "lp_pool")
    return Row(f"{name}{axes}d", lambda x: [function(x, **way) for way in ways], (normal(*_SHAPES[axes]),), half=half)


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    pooled, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, indices, 2, output_size=x.shape)


_REGULAR: list[dict[str, Any]] = [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}]
_DILATED = {"kernel_size": 2, "stride": 1, "dilation": 2, "return_indices": True}
_OF_AXES = {
    "max_pool": {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "dilation": (1, 2), "ceil_mode": True},
    "avg_pool": {"kernel_size": (3, 2), "stride": (1, 3), "divisor_override": 5},
    "lp_pool": {"norm_type": 3.0, "kernel_size": (2, 3), "stride": 2, "ceil_mode": True},
    "adaptive_avg_pool": {"output_size": (None, 4)},
    "adaptive_max_pool": {"output_size": (7, None)},
}

ROWS = [
    *(_pool("max_pool", n, *_REGULAR, _DILATED) for n in (1, 2, 3)),
    *(_pool("avg_pool", n, *_REGULAR, {**_REGULAR[1], "count_include_pad": False}) for n in (1, 2, 3)),
    *(_pool("lp_pool", n, {"norm_type": 2.0, "kernel_size": 2}) for n in (1, 2, 3)),
    *(_pool("adaptive_avg_pool", n, {"output_size": 1}, {"output_size": 3}) for n in (1, 2, 3)),
    *(_pool("adaptive_max_pool", n, {"output_size": 1}, {"output_size": 3, "return_indices": True}) for n in (1, 2, 3)),
    *(
        Row(f"{name}2d of axes", lambda x, name=name, way=way: getattr(F, f"{name}2d")(x, **way), (normal(2, 3, 7, 6),))
        for name, way in _OF_AXES.items()
    ),
    Row("pools without batch", lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3)), (normal(3, 7, 6),)),
    # Many are equal: the first of them gets the gradient.
    Row(
        "max_pool2d of equals",
        lambda x: F.max_pool2d(F.relu(x), 3, 2, 1, return_indices=True),
        (normal(2, 3, 7, 6) - 1,),
    ),
    Row("max_pool2d of many", lambda x: F.max_pool2d(x, 5, 1, 2, return_indices=True), (normal(2, 3, 7, 6),)),
    Row(  # several are NaN: the last of them is the largest
        "max_pool with NaN",
        lambda x: (
            F.max_pool2d(x, 3, 2, 1, return_indices=True),
            F.max_pool2d(x, 5, 1, 2, return_indices=True),
            F.adaptive_max_pool2d(x, (2, 5), return_indices=True),
        ),
        (normal(2, 3, 7, 6).masked_fill(normal(2, 3, 7, 6, seed=1) > 0.5, torch.nan),),
        half=False,
    ),
    # A batch that fills vectors.
    Row(
        "pools of a batch",
        lambda x: (F.max_pool2d(x, 3, 2, 1, return_indices=True), F.avg_pool2d(x, 2), F.max_pool2d(x, 6, 1)),
        (normal(9, 2, 7, 6),),
    ),
    Row("max_unpool2d", _unpooled, (normal(2, 3, 7, 6),)),
    Row(  # windows that overlap
        "max_unpool2d of equal positions",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 3, 1, return_indices=True), 3, 1),
        (normal(2, 3, 7, 6),),
    ),
    Row("max_unpool1d", lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), (normal(2, 3, 6),)),
    Row(
        "max_unpool3d", lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), (normal(1, 2, 4, 2, 6),)
    ),
    Row(
        "fractional_max_pool2d",
        lambda x, samples: F.fractional_max_pool2d(
            x, (2, 3), output_size=(4, 3), return_indices=True, _random_samples=samples.detach()
        ),
        (normal(2, 3, 9, 8), normal(2, 3, 2).sigmoid()),
        half=False,
    ),
    Row(
        "fractional_max_pool2d, ratio, no batch",
        lambda x, samples: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.4), _random_samples=samples.detach()),
        (normal(3, 9, 8), normal(1, 3, 2).sigmoid()),
        half=False,
    ),
    Row(
        "fractional_max_pool3d",
        lambda x, samples: F.fractional_max_pool3d(
            x, (2, 3, 2), output_size=(2, 3, 1), return_indices=True, _random_samples=samples.detach()
        ),
        (normal(2, 2, 5, 7, 6), normal(2, 2, 3).sigmoid()),
        half=False,
    ),
    Row(
        "integers, averaged",
        lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(-x, 3, 2, 1), F.avg_pool1d(x[0], 2), F.avg_pool3d(-x, (1, 2, 2))),
        (whole(2, 3, 5, 6, high=2**27),),
        half=False,
    ),
]
