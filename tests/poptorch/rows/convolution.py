"""Convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, whole


def _conv(name: str, shape: tuple[int, ...], weight: tuple[int, ...], **how: Any) -> Row:
    function = getattr(F, name)
    channels = weight[1] * how.get("groups", 1) if "transpose" in name else weight[0]
    title = ", ".join([name, *(f"{key} {value}" for key, value in how.items())])
    return Row(
        title,
        lambda *given: function(*given, **how),
        (normal(*shape), normal(*weight), normal(channels)),
        half_tolerance=1e-2,
        sums=True,
    )


def _module(title: str, module: torch.nn.Module, *args: Any) -> Row:
    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x, *args))

    tensors = (normal(2, 2, 4, 5), normal(*module.weight.shape), normal(*module.bias.shape))
    return Row(title, function, tensors, half_tolerance=1e-2, sums=True)


ROWS = [
    _conv("conv1d", (2, 3, 7), (4, 3, 3)),
    _conv("conv1d", (2, 4, 7), (6, 2, 3), stride=2, padding=1, groups=2),
    _conv("conv1d", (3, 7), (4, 3, 2), dilation=2),
    _conv("conv1d", (2, 3, 7), (4, 3, 4), padding="same", dilation=2),
    _conv("conv2d", (2, 3, 5, 6), (4, 3, 3, 2)),
    _conv("conv2d", (2, 4, 5, 6), (4, 1, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=4),
    _conv("conv2d", (3, 5, 6), (4, 3, 3, 5), padding="same"),
    _conv("conv2d", (2, 3, 5, 6), (4, 3, 3, 2), padding="valid"),
    _conv("conv3d", (2, 3, 4, 5, 6), (4, 3, 2, 3, 1)),
    _conv("conv3d", (1, 4, 4, 5, 3), (2, 2, 2, 3, 2), stride=2, padding=(1, 0, 1), groups=2),
    _conv("conv_transpose1d", (2, 3, 5), (3, 4, 3)),
    _conv("conv_transpose1d", (2, 4, 5), (4, 3, 3), stride=3, padding=1, output_padding=2, groups=2),
    _conv("conv_transpose2d", (2, 3, 4, 5), (3, 4, 3, 2)),
    _conv(
        "conv_transpose2d",
        (1, 4, 3, 4),
        (4, 2, 3, 2),
        stride=(2, 3),
        padding=1,
        output_padding=(1, 2),
        groups=2,
        dilation=2,
    ),
    _conv("conv_transpose2d", (3, 4, 5), (3, 4, 3, 2), dilation=(1, 3), output_padding=(0, 1)),
    _conv("conv_transpose3d", (1, 2, 3, 2, 4), (2, 3, 2, 3, 1)),
    _conv("conv_transpose3d", (1, 2, 3, 2, 4), (2, 3, 2, 3, 1), stride=2, padding=1, output_padding=1),
    Row(
        "conv2d without bias",
        lambda x, w: F.conv2d(x, w, padding=1),
        (normal(2, 3, 5, 6), normal(4, 3, 3, 2)),
        half_tolerance=1e-2,
        sums=True,
    ),
    *(
        _module(f"Conv2d, padded by {mode}", torch.nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode=mode))
        for mode in ("reflect", "replicate", "circular")
    ),
    _module(
        "Conv2d, padded by circular to the same size", torch.nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular")
    ),
    _module("ConvTranspose2d, output_size", torch.nn.ConvTranspose2d(2, 3, 3, stride=2), (10, 11)),
    *(
        Row(
            f"integers, {dtype}",
            lambda x, w, b: (
                F.conv2d(x, w, b, stride=(2, 1), padding=1),
                F.conv2d(torch.cat([x, x], 1), w, groups=2),
            ),
            tuple(whole(*shape, high=high).to(dtype) for shape in ((2, 3, 6, 7), (4, 3, 2, 2), (4,))),
            half=False,
        )
        for dtype, high in ((torch.uint8, 256), (torch.int8, 128), (torch.int32, 2**31 - 1))
    ),
    Row(
        "transposed integers",
        lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 1), 1, (1, 0), 2, (2, 1)),
        (whole(2, 4, 3, 4, high=2**13), whole(4, 3, 2, 3, high=2**13), whole(6, high=2**13)),
        half=False,
    ),
]
