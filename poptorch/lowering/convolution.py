"""Convolutions. How they are padded, and that a single image has no batch, PyTorch has sorted out before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

import popxl
from poptorch.lowering.operands import promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops


@lowers("aten.convolution")
def convolution(
    input: popxl.Tensor,
    weight: popxl.Tensor,
    bias: popxl.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> popxl.Tensor:
    axes = len(input.shape) - 2
    stride, padding, dilation, more = (per_axis(sizes, axes) for sizes in (stride, padding, dilation, output_padding))
    if not transposed:
        out = ops.conv(input, weight, stride, padding * 2, dilation, groups)
    else:
        if max(dilation) > 1:
            weight = _dilated(weight, dilation=dilation)
        out = ops.conv_transpose(input, weight, stride, padding * 2, (), groups, output_padding=more)
    return out if bias is None else ops.add(*promoted(out, ops.reshape(bias, (-1, *(1,) * axes))))


def per_axis(sizes: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """A size for each axis: those given, or the same for all."""
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * axes if len(given) == 1 else given


@jax_op(title="DilateKernel")
def _dilated(weight: Any, *, dilation: tuple[int, ...]) -> Any:
    return lax.pad(weight, weight.dtype.type(0), [(0, 0, 0)] * 2 + [(0, 0, step - 1) for step in dilation])
