"""Decompositions for torchvision ops, and patches for its random choices. The package is optional: ops are found by
name.

Removal of boxes (`nms`) is not an op of a program. The number of remaining boxes depends on numbers, so the host does
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from poptorch.base.patching import patched


def _roi_align(
    input: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Average pixels within bins of boxes, sampled on a grid per bin, with bilinear interpolation between four pixels.

    Without `sampling_ratio` a grid has about a place for each pixel. Then the size of the largest is looked at.
    """
    rows, channels, height, width = input.shape
    corners = rois[:, 1:].T * spatial_scale - (0.5 if aligned else 0.0)
    xs, x_shares = _neighbours(corners[0], corners[2], pooled_width, width, sampling_ratio, aligned)
    ys, y_shares = _neighbours(corners[1], corners[3], pooled_height, height, sampling_ratio, aligned)
    pixels = input.permute(0, 2, 3, 1).reshape(rows * height * width, channels)
    begins = (rois[:, 0].long() * height)[:, None] + ys.permute(2, 0, 1)  # rows of pixels: place, box, bin
    total = input.new_zeros(len(rois), pooled_height, pooled_width, channels)
    for begin, share in zip(begins, y_shares.permute(2, 0, 1), strict=True):  # one at a time, to limit memory
        found = pixels[begin[:, :, None, None] * width + xs[:, None]]
        total = total + (found * (share[:, :, None, None] * x_shares[:, None])[..., None]).sum(3)
    return total.permute(0, 3, 1, 2)


def _neighbours(
    begin: torch.Tensor, end: torch.Tensor, bins: int, size: int, sampling_ratio: int, aligned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixel indices and interpolation weights along one dimension, each with axes box, bin, pixel."""
    length = end - begin if aligned else (end - begin).clamp_min(1)
    each = length / bins
    counts = torch.full_like(each, sampling_ratio) if sampling_ratio > 0 else each.ceil()  # of an empty box, none
    most = sampling_ratio if sampling_ratio > 0 else max(1, int(counts.max().long())) if len(counts) else 1
    steps = torch.arange(most, dtype=begin.dtype)
    begin, each, count = (t[:, None, None] for t in (begin, each, counts))
    at = begin + each * (torch.arange(bins, dtype=begin.dtype)[:, None] + (steps + 0.5) / count.clamp_min(1))
    share = ((at >= -1) & (at <= size) & (steps < count)).to(at.dtype) / count.clamp_min(1)
    at = at.clamp(0, size - 1)
    low = at.floor()
    above = (at - low) * share
    low = low.long()
    return torch.cat([low, (low + 1).clamp_max(size - 1)], -1), torch.cat([share - above, above], -1)


def _deform_conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> torch.Tensor:
    """Deformable convolution: a given offset displaces each sampled pixel."""
    rows, channels, height, width = input.shape
    kernel_h, kernel_w = weight.shape[2:]
    taps, (high, wide) = kernel_h * kernel_w, offset.shape[2:]
    moves = offset.reshape(rows * offset_groups, kernel_h, kernel_w, 2, high, wide)

    def kernel_positions(stride: int, pad: int, dilation: int, count: int, kernel: int) -> torch.Tensor:
        return torch.arange(kernel)[:, None] * dilation + torch.arange(count) * stride - pad

    y = moves[..., 0, :, :] + kernel_positions(stride_h, pad_h, dilation_h, high, kernel_h)[:, None, :, None]
    x = moves[..., 1, :, :] + kernel_positions(stride_w, pad_w, dilation_w, wide, kernel_w)[None, :, None, :]
    at = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1)
    images = input.reshape(rows * offset_groups, channels // offset_groups, height, width)
    seen = F.grid_sample(images, at.reshape(len(images), taps * high, wide, 2), align_corners=False)
    seen = seen.reshape(rows, offset_groups, channels // offset_groups, taps, high, wide)
    if use_mask:
        seen = seen * mask.reshape(rows, offset_groups, 1, taps, high, wide)
    seen = seen.reshape(rows, groups, channels // groups, taps, high, wide)
    own = weight.reshape(groups, len(weight) // groups, channels // groups, taps)
    return torch.einsum("ngcthw,goct->ngohw", seen, own).reshape(rows, -1, high, wide) + bias[:, None, None]


OF_TORCHVISION: Mapping[str, Callable[..., torch.Tensor]] = {
    "roi_align": _roi_align,
    "deform_conv2d": _deform_conv2d,
}
"""Replacements of ops by name: functions of the same arguments with the same result."""


@contextmanager
def choosing() -> Iterator[None]:
    """Make detectors choose image sizes for training by random integers.

    They read a float that they have drawn, and round it. A program would be for that float, which never comes again.
    """
    module = sys.modules.get("torchvision.models.detection.transform")
    if module is None:
        yield
        return
    with patched(module.GeneralizedRCNNTransform, torch_choice=_choice):
        yield


def _choice(transform: Any, sizes: Sequence[int]) -> int:
    return sizes[int(torch.randint(len(sizes), ()))] if len(sizes) > 1 else sizes[0]
