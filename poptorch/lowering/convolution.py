"""Convolutions. PyTorch resolves padding modes and adds a batch dimension beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
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
    stride, padding, dilation, output_padding = (
        per_axis(sizes, axes) for sizes in (stride, padding, dilation, output_padding)
    )
    if not input.dtype.is_inexact:
        out = _integer_conv(
            input,
            weight,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            output_padding=output_padding if transposed else None,
        )
    elif not transposed:
        out = ops.conv(input, weight, stride, padding * 2, dilation, groups)
    else:
        if max(dilation) > 1:
            weight = _dilate_kernel(weight, dilation=dilation)
        out = ops.conv_transpose(input, weight, stride, padding * 2, (), groups, output_padding=output_padding)
    return out if bias is None else ops.add(*promoted(out, ops.reshape(bias, (-1, *(1,) * axes))))


def per_axis(sizes: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Size per axis: the given sizes, or a single size repeated."""
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * axes if len(given) == 1 else given


@jax_op(title="IntegerConv", gradient=None)
def _integer_conv(
    input: Any,
    weight: Any,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    output_padding: tuple[int, ...] | None,
) -> Any:
    """Integer convolution, as a sum over kernel positions; floats would round the integers.

    Args:
        output_padding: output padding of a transposed convolution; `None` for any other.
    """
    kernel, axes = weight.shape[2:], range(2, input.ndim)
    edges = [(pad, pad, 0) for pad in padding]
    if output_padding is not None:  # a convolution of the input dilated by the stride, with the flipped kernel
        grouped = weight.reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
        weight = jnp.flip(grouped.reshape(-1, *grouped.shape[2:]), axes)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sizes = zip(reach, padding, output_padding, stride, strict=True)
        edges, stride = [(r - pad, r - pad + more, s - 1) for r, pad, more, s in sizes], (1,) * len(kernel)
    input = lax.pad(input, input.dtype.type(0), [(0, 0, 0)] * 2 + edges)
    sizes = zip(input.shape[2:], dilation, kernel, stride, strict=True)
    counts = [(size - d * (k - 1) - 1) // s + 1 for size, d, k, s in sizes]
    images = input.reshape(len(input), groups, -1, *input.shape[2:])
    kernels = weight.reshape(groups, -1, *weight.shape[1:])
    out: Any = 0
    for position in itertools.product(*map(range, kernel)):
        sizes = zip(position, dilation, counts, stride, strict=True)
        window = images[(..., *(slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, n, s in sizes))]
        out += jnp.einsum("ngc...,gmc->ngm...", window, kernels[(..., *position)])
    return out.reshape(len(input), -1, *counts)


@jax_op(title="DilateKernel")
def _dilate_kernel(weight: Any, *, dilation: tuple[int, ...]) -> Any:
    return lax.pad(weight, weight.dtype.type(0), [(0, 0, 0)] * 2 + [(0, 0, step - 1) for step in dilation])
