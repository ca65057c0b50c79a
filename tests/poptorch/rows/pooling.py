"""Pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

_SHAPES = {1: (2, 3, 7), 2: (2, 3, 7, 6), 3: (1, 2, 5, 7, 6)}


def _pool(name: str, *args: Any, title: str = "", shape: tuple[int, ...] = (), **how: Any) -> Row:
    function = getattr(F, name)
    said = ", ".join([name, *map(str, args), *(f"{key} {value}" for key, value in how.items())])
    axes = int(name.removesuffix("_with_indices")[-2])
    # PyTorch has no averages of volumes in float16.
    half = name not in ("avg_pool3d", "lp_pool3d")
    return Row(title or said, lambda x: function(x, *args, **how), (normal(*(shape or _SHAPES[axes])),), half=half)


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    pooled, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, indices, 2, output_size=x.shape)


ROWS = [
    *(_pool(f"max_pool{n}d", 2) for n in (1, 2, 3)),
    *(_pool(f"max_pool{n}d", 3, stride=2, padding=1, ceil_mode=True) for n in (1, 2, 3)),
    *(_pool(f"max_pool{n}d", 2, stride=1, dilation=2, return_indices=True) for n in (1, 2, 3)),
    _pool("max_pool2d", (3, 2), (2, 3), (1, 0), (1, 2), True),
    _pool("max_pool2d", 2, shape=(3, 7, 6), title="max_pool2d without batch"),
    # Many are equal: the first of them gets the gradient.
    Row(
        "max_pool2d of equals",
        lambda x: F.max_pool2d(F.relu(x), 3, 2, 1, return_indices=True),
        (normal(2, 3, 7, 6) - 1,),
    ),
    *(_pool(f"avg_pool{n}d", 2) for n in (1, 2, 3)),
    *(_pool(f"avg_pool{n}d", 3, 2, 1, ceil_mode=True) for n in (1, 2, 3)),
    *(_pool(f"avg_pool{n}d", 3, 2, 1, ceil_mode=True, count_include_pad=False) for n in (1, 2, 3)),
    *(_pool(f"avg_pool{n}d", 2, divisor_override=3) for n in (2, 3)),
    _pool("avg_pool2d", (3, 2), (1, 3), shape=(3, 7, 6)),
    *(_pool(f"adaptive_avg_pool{n}d", 1) for n in (1, 2, 3)),
    *(_pool(f"adaptive_avg_pool{n}d", 3) for n in (1, 2, 3)),
    _pool("adaptive_avg_pool2d", (7, 3)),
    _pool("adaptive_avg_pool2d", (None, 4)),
    *(_pool(f"adaptive_max_pool{n}d", 3) for n in (1, 2, 3)),
    *(_pool(f"adaptive_max_pool{n}d", 2, return_indices=True) for n in (1, 2, 3)),
    *(_pool(f"lp_pool{n}d", 2.0, 2) for n in (1, 2, 3)),
    _pool("lp_pool2d", 3.0, (2, 3), stride=2, ceil_mode=True),
    Row("max_unpool2d", _unpooled, (normal(2, 3, 7, 6),)),
    Row("max_unpool1d", lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), (normal(2, 3, 6),)),
    Row(
        "max_unpool3d", lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), (normal(1, 2, 4, 2, 6),)
    ),
]
