"""A convolution of images."""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np

import popxl
from popxl import initial, ops
from popxl.extend.arguments import check_type, integer_or_integers
from popxl.ops import PadType
from popxl.replica_grouping import Groups
from popxl_addons.layers._torch_layer import TorchLayer
from popxl_addons.layers._values import drawn_weights


class Conv2D(TorchLayer):
    """``conv(x, weight) + bias`` over the last two axes of `x`. See also ``torch.nn.Conv2d``.

    Variables, of the dtype of `x`: `weight` of shape (out_channels, C / groups, kh, kw), a truncated normal
    distribution with the standard deviation 0.02; `bias` of shape (1, out_channels, 1, 1), zeros.

    Args:
        out_channels: channels of the result.
        kernel_size: ``(kh, kw)``, or one number for both.
        strides, dilations: strides and dilations of the two axes, or one number for both.
        paddings: zeros ``(top, left, bottom, right)``, or ``"same_upper"``, ``"same_lower"``, ``"valid"`` as in
            `ops.conv`.
        groups: number of groups that the channels are divided into.
        bias: whether to add a bias.
        available_memory_proportions, partials_types, enable_conv_dithering: without effect; see `ops.conv`.
        replica_grouping: grouping of the variables, or names of axes.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     images = popxl.TensorSpec((2, 3, 9, 8), popxl.float32)
        ...     facts, graph = Conv2D(4, kernel_size=3, strides=(2, 2), paddings="same_upper").create_graph(images)
        >>> facts.weight.shape, graph.graph.outputs[0].shape
        ((4, 3, 3, 3), (2, 4, 5, 4))
    """

    _of_torch = {"weight": np.asarray, "bias": lambda bias: bias.reshape(1, -1, 1, 1)}

    def __init__(
        self,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        strides: int | tuple[int, int] = (1, 1),
        paddings: tuple[int, int, int, int] | Literal["same_upper", "same_lower", "valid"] = (0, 0, 0, 0),
        dilations: int | tuple[int, int] = (1, 1),
        groups: int = 1,
        bias: bool = True,
        available_memory_proportions: list[float] | None = None,
        partials_types: list[str] | None = None,
        enable_conv_dithering: list[int] | None = None,
        replica_grouping: Groups | None = None,
    ):
        super().__init__()
        self.out_channels = out_channels
        self.kernel_size = _of_both_axes(kernel_size, "kernel_size")
        self.strides = _of_both_axes(strides, "strides")
        self.paddings = paddings
        self.dilations = _of_both_axes(dilations, "dilations")
        self.groups = groups
        self.bias = bias
        self.available_memory_proportions = available_memory_proportions
        self.partials_types = partials_types
        self.enable_conv_dithering = enable_conv_dithering
        self.replica_grouping = replica_grouping

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (N, C, H, W) to (N, out_channels, H', W'). `AssertionError` for another rank."""
        check_type(x, popxl.Tensor, "Conv2D: `x`", "a Tensor, such as of `popxl.constant`")
        if x.rank != 4:
            raise AssertionError(f"Conv2D: `x` has the shape {x.shape}; expected images (N, C, H, W).")
        weight = self.add_variable_input(
            "weight",
            drawn_weights("Conv2D", x.dtype, self.out_channels, x.shape[1] // self.groups, *self.kernel_size),
            x.dtype,
            replica_grouping=self.replica_grouping,
        )
        pad_type: PadType = self.paddings if isinstance(self.paddings, str) else "not_set"
        y = ops.conv(
            x,
            weight,
            stride=self.strides,
            padding=() if isinstance(self.paddings, str) else self.paddings,
            dilation=self.dilations,
            groups=self.groups,
            pad_type=pad_type,
            available_memory_proportions=self.available_memory_proportions,
            partials_types=self.partials_types,
            enable_conv_dithering=self.enable_conv_dithering,
        )
        if not self.bias:
            return y
        return y + self.add_variable_input(
            "bias",
            partial(initial.zeros, (1, self.out_channels, 1, 1)),
            x.dtype,
            replica_grouping=self.replica_grouping,
        )


def _of_both_axes(given: int | tuple[int, int], name: str) -> tuple[int, ...]:
    """Pair of numbers, one per spatial axis."""
    numbers = integer_or_integers(given, f"Conv2D: `{name}`")
    return (numbers, numbers) if isinstance(numbers, int) else tuple(numbers)
