"""Decompositions for ops of PyTorch's backward pass that PyTorch itself does not decompose.

Models that compute gradients in their `forward` use these ops. Gradients of a convolution are convolutions, that of a
maximum writes to its positions, and those of functions that are linear along each dimension multiply by matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

aten = torch.ops.aten

Sizes = Sequence[int]


def _expand_sizes(values: Sizes, dims: int) -> list[int]:
    """Values per dimension: a single value is repeated `dims` times."""
    return list(values) * dims if len(values) == 1 else list(values)


def _convolution(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    dims = input.dim() - 2
    stride, padding, dilation = (_expand_sizes(values, dims) for values in (stride, padding, dilation))
    large, small = (grad, input) if transposed else (input, grad)
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        missing = [0] * dims
        if not transposed:
            sizes = zip(input.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
            missing = [i - ((g - 1) * s - 2 * p + d * (k - 1) + 1) for i, g, k, s, p, d in sizes]
        of_input = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, missing, groups)
        of_input = _begin(of_input, input.shape[2:])
    if output_mask[1]:  # the sum is over rows of a batch, like channels in the convolution
        rows, places = large.shape[0], large.shape[2:]
        channels = large.reshape(rows, groups, -1, *places).transpose(0, 2).reshape(-1, groups * rows, *places)
        kernel = small.transpose(0, 1)
        gradient = aten.convolution(channels, kernel, None, dilation, padding, stride, False, [0] * dims, groups)
        of_weight = _begin(gradient.transpose(0, 1), weight.shape[2:])
    if output_mask[2]:
        of_bias = grad.sum([0, *range(2, grad.dim())])
    return of_input, of_weight, of_bias


def _begin(t: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    for dim, size in enumerate(sizes, 2):
        t = t.narrow(dim, 0, size)
    return t


def _max_pool(op: Any, dims: int, grad: torch.Tensor, input: torch.Tensor, *settings: Any) -> torch.Tensor:
    *_, indices = settings
    planes = input.shape[:-dims]
    zeros = grad.new_zeros(*planes, prod(input.shape[-dims:]))
    return zeros.scatter_add(-1, indices.reshape(*planes, -1), grad.reshape(*planes, -1)).reshape(input.shape)


def _by_matrices(
    grad: torch.Tensor, sizes: Sizes, forward: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Gradient of a function that acts linearly and separately along each trailing dimension, by matrix products.

    Args:
        sizes: sizes of these dimensions of the input.
        forward: function along one of these dimensions, by its number; the others have the size 1.
    """
    for number, size in enumerate(sizes):
        shape = [1] * len(sizes)
        shape[number] = size
        matrix = forward(torch.eye(size, dtype=grad.dtype).reshape(size, 1, *shape), number).reshape(size, -1)
        dim = number - len(sizes)
        grad = (grad.movedim(dim, -1) @ matrix.t()).movedim(-1, dim)
    return grad


def _replication_pad(op: Any, dims: int, grad: torch.Tensor, input: torch.Tensor, padding: Sizes) -> torch.Tensor:
    def pad(t: torch.Tensor, number: int) -> torch.Tensor:
        last = 2 * (dims - 1 - number)  # the first two numbers are for the last dimension
        size = t.shape[2 + number]
        places = torch.arange(-padding[last], size + padding[last + 1]).clamp(0, size - 1)
        return t.index_select(2 + number, places)

    return _by_matrices(grad, input.shape[-dims:], pad)


def _shrink(grad: torch.Tensor, input: torch.Tensor, lambd: float) -> torch.Tensor:
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, grad)


def _trilinear(
    i1: torch.Tensor,
    i2: torch.Tensor,
    i3: torch.Tensor,
    expand1: Sizes,
    expand2: Sizes,
    expand3: Sizes,
    sumdim: Sizes,
    unroll_dim: int = 1,
) -> torch.Tensor:
    """Sum, over some dimensions, of products of three tensors, each broadcast along dimensions that it lacks."""
    dims = range(i1.dim() + len(expand1))
    first, second, third, out = ([d for d in dims if d not in lacks] for lacks in (expand1, expand2, expand3, sumdim))
    return torch.einsum(i1, first, i2, second, i3, third, out)


def _upsample(
    op: Any, dims: int, grad: torch.Tensor, output_size: Sizes, input_size: Sizes, *settings: Any, has_corners: bool
) -> torch.Tensor:
    corners, scales = settings[:has_corners], settings[has_corners:] or [None] * dims

    def forward(t: torch.Tensor, number: int) -> torch.Tensor:
        size = [output_size[i] if i == number else 1 for i in range(dims)]
        return op(t, size, *corners, *(scales[i] if i == number else None for i in range(dims)))

    return _by_matrices(grad, input_size[2:], forward)


def _adaptive_avg_pool(op: Any, dims: int, grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    def forward(t: torch.Tensor, number: int) -> torch.Tensor:
        return op(t, [grad.shape[i - dims] if i == number else 1 for i in range(dims)])

    return _by_matrices(grad, input.shape[-dims:], forward)


def _avg_pool(
    op: Any,
    dims: int,
    grad: torch.Tensor,
    input: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    kernel, padding = _expand_sizes(kernel_size, dims), _expand_sizes(padding, dims)
    stride = _expand_sizes(stride, dims) if stride else kernel

    def forward(t: torch.Tensor, number: int) -> torch.Tensor:
        sizes = [[v[i] if i == number else other for i in range(dims)]
                 for v, other in ((kernel, 1), (stride, 1), (padding, 0))]  # fmt: skip
        return op(t, *sizes, ceil_mode, count_include_pad, 1 if divisor_override else None)

    return _by_matrices(grad, input.shape[-dims:], forward) / (divisor_override or 1)


def _normalised(x: torch.Tensor, dims: list[int], eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return centred * rstd, mean, rstd


def _layer_norm(
    input: torch.Tensor, shape: Sizes, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    out, mean, rstd = _normalised(input, list(range(-len(shape), 0)), eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


def _group_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    N: int, C: int, HxW: int, group: int, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out, mean, rstd = _normalised(input.reshape(N, group, -1), [2], eps)
    out, shape = out.reshape(input.shape), (C, *[1] * (input.dim() - 2))
    out = out if weight is None else out * weight.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)), mean.squeeze(2), rstd.squeeze(2)


def _by_rank(name: str, backward: Callable[..., torch.Tensor], *ranks: int, **settings: Any) -> dict[Any, Any]:
    """Decompositions of the backward ops of `name`, with the number of dimensions of images for `{}`.

    Args:
        backward: function of the op whose gradient it is, the number of dimensions, and the backward op's arguments.
    """
    ops = {name.format(rank): rank for rank in ranks}
    return {
        getattr(aten, f"{op}_backward").default: partial(backward, getattr(aten, op), rank, **settings)
        for op, rank in ops.items()
    }


BACKWARD: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten._efficientzerotensor.default: aten.zeros,  # PyTorch adds these below autograd
    aten.convolution_backward.default: _convolution,
    aten.log_sigmoid_backward.default: lambda grad, input, buffer: grad * torch.sigmoid(-input),  # kernels use `buffer`
    aten.softshrink_backward.default: _shrink,
    aten.hardshrink_backward.default: _shrink,
    aten._trilinear.default: _trilinear,
    **_by_rank("max_pool{}d_with_indices", _max_pool, 2, 3),
    **_by_rank("adaptive_max_pool{}d", _max_pool, 2, 3),
    **_by_rank("fractional_max_pool{}d", _max_pool, 2, 3),
    **_by_rank("replication_pad{}d", _replication_pad, 1, 2, 3),
    **_by_rank("avg_pool{}d", _avg_pool, 2, 3),
    **_by_rank("_adaptive_avg_pool{}d", _adaptive_avg_pool, 2, 3),
    **_by_rank("upsample_linear{}d", _upsample, 1, has_corners=True),
    **_by_rank("upsample_bilinear{}d", _upsample, 2, has_corners=True),
    **_by_rank("upsample_bicubic{}d", _upsample, 2, has_corners=True),
    **_by_rank("upsample_trilinear{}d", _upsample, 3, has_corners=True),
    **_by_rank("upsample_nearest{}d", _upsample, 1, 2, 3, has_corners=False),
    **_by_rank("_upsample_nearest_exact{}d", _upsample, 1, 2, 3, has_corners=False),
}
"""Functions with the results and arguments of an op: ops of the backward pass, norms within them, products within
gradients of bilinear layers, and zeros as forward-mode derivatives."""
