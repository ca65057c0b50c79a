"""Windows that slide over the spatial axes of a tensor: their number, and their extent beyond its ends.

Convolutions and pooling share this arithmetic on sizes, which is independent of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

PadType = Literal["not_set", "same_upper", "same_lower", "valid"]
"""Padding modes: explicit (`not_set`); keep the size at stride 1 (`same_upper` and `same_lower`, with the odd one at
the end or at the beginning); none (`valid`)."""

PAD_TYPES: tuple[str, ...] = get_args(PadType)


@dataclass(frozen=True)
class Windows:
    """The windows along one axis. Window `j` begins at position `j * stride - begin`, and is `reach` positions long.

    Attributes:
        size: size of the axis, without padding.
        reach, stride: see above. A kernel of 3 with dilation 2 reaches over 5 positions.
        begin, end: padding at either side; negative where the axis is cropped.
        count: number of windows. Not positive if not even one fits.
        dilation: distance between elements of the kernel.
        spread: distance between elements of the input; zeros lie between them, which `size` counts.
    """

    size: int
    reach: int
    stride: int
    begin: int
    end: int
    count: int
    dilation: int = 1
    spread: int = 1

    def valid_counts(self) -> NDArray[np.int64]:
        """Number of positions per window that are not padding."""
        starts = np.arange(self.count) * self.stride - self.begin
        return np.maximum(np.minimum(starts + self.reach, self.size) - np.maximum(starts, 0), 0)


def windows_over(
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    auto_pad: str,
    ceil_mode: bool = False,
    dilation: Sequence[int] | None = None,
) -> tuple[Windows, ...]:
    """The windows along each axis. The parameters after `sizes` are named like the attributes of pooling ops.

    Args:
        sizes, kernel_size, stride, dilation: one number for each axis; dilations are 1 by default.
        padding: padding before each axis, then after each; read for `not_set` only.
        auto_pad: a `PadType`.
        ceil_mode: whether, for `not_set`, there are as many windows as it takes to cover the end, which is padded for
            it. (Otherwise the remaining elements are in no window.)
    """
    apart = (1,) * len(sizes) if dilation is None else dilation
    pads = zip(padding, padding[len(sizes) :], strict=False)
    axes = zip(sizes, kernel_size, stride, apart, pads, strict=False)
    return tuple(_windows(*axis, auto_pad, ceil_mode) for axis in axes)


def _windows(
    size: int, places: int, stride: int, dilation: int, pads: tuple[int, int], pad_type: str, ceil_mode: bool
) -> Windows:
    reach, (begin, end) = dilation * (places - 1) + 1, pads
    if pad_type in ("same_upper", "same_lower"):
        count = -(-size // stride)
        begin, end = halves(max((count - 1) * stride + reach - size, 0), larger_last=pad_type == "same_upper")
    elif pad_type == "valid":
        begin = end = 0
        count = (size - reach) // stride + 1
    else:
        span = size + begin + end - reach
        count = span // stride + 1
        if ceil_mode and span % stride:
            count, end = count + 1, end + stride - span % stride
    return Windows(size, reach, stride, begin, end, count, dilation)


def halves(total: int, larger_last: bool) -> tuple[int, int]:
    """Split a total into two nearly equal amounts."""
    smaller = total // 2
    return (smaller, total - smaller) if larger_last else (total - smaller, smaller)
