"""Convolutions and their transposes, over one, two or three spatial axes; of floats, and of scaled float8.

Conventions are those of ONNX: channels come first, kernels are not flipped, and padding lists all beginnings, then all
ends. Sums are accumulated in float32 and rounded once. Shapes follow from arithmetic alone: graphs with results of size
0 or less can be built and printed, and fail when they run. Shape rules and gradients are in `popxl.ops.convolutions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from popxl.core.tensor import Tensor
from popxl.ops.convolutions import conv_kind, conv_pow2scaled_kind, conv_transpose_kind, conv_transpose_pow2scaled_kind
from popxl.ops.float8 import check_float8, check_scale
from popxl.ops.windows import PadType
from popxl.values.shapes import integer, integers

__all__ = [
    "PadType",
    "conv",
    "conv_pow2scaled",
    "conv_transpose",
    "conv_transpose_pow2scaled",
    "multi_conv_options",
]


def multi_conv_options(
    sess_opts: Mapping[str, Any],
    attr_param: Mapping[str, Any],
    available_memory_proportions: Iterable[float] | None,
    partials_types: Iterable[str] | None,
    enable_conv_dithering: Iterable[int] | None,
) -> dict[str, Any]:
    """Convolution hints as op attributes, without numerical effect.

    Args:
        sess_opts: hints for all convolutions of a program.
        attr_param: hints for this convolution, with priority over those.
        available_memory_proportions, partials_types, enable_conv_dithering: hints for this convolution, as given to
            `conv`. They have priority over all others; `None` and an empty list have no effect.

    Returns:
        The hints by name, lists as tuples.

    Raises:
        TypeError: if one of the last three is not a list.

    Example:
        >>> multi_conv_options({"partials_types": ("half",)}, {}, [0.3], None, None)
        {'partials_types': ('half',), 'available_memory_proportions': (0.3,)}
    """
    given = {
        "available_memory_proportions": available_memory_proportions,
        "partials_types": partials_types,
        "enable_conv_dithering": enable_conv_dithering,
    }
    for name, hint in given.items():
        if isinstance(hint, str) or not isinstance(hint, Iterable | None):
            raise TypeError(f"`{name}` must be a list, with an entry for each convolution; got {hint!r}.")
    return {**sess_opts, **attr_param, **{name: tuple(hint) for name, hint in given.items() if hint}}


def _attributes(
    name: str,
    groups: int,
    pad_type: str,
    stride: Iterable[int],
    padding: Iterable[int],
    dilation: Iterable[int],
    **of_result: Iterable[int],
) -> dict[str, Any]:
    """Numeric convolution arguments as plain numbers."""
    sequences = {"stride": stride, "padding": padding, "dilation": dilation, **of_result}
    plain = {key: integers(value, f"{name}: `{key}`") for key, value in sequences.items()}
    return {**plain, "groups": integer(groups, f"{name}: `groups`"), "pad_type": pad_type}


def conv(
    t: Tensor,
    weight: Tensor,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Convolution as in neural networks: unflipped kernel, no bias.

    The defaults are for images. With one or three spatial axes `stride`, `padding` and `dilation` have to be given:
    with an entry for each axis, or empty.

    Along an axis of size `d`, with a kernel of size `k`, stride `s`, dilation `l` and a reach `r = l (k - 1) + 1`:

    * `"not_set"`: `padding` is used; the result has the size `floor((d + begin + end - r) / s) + 1`.
    * `"valid"`: there is no padding.
    * `"same_upper"`, `"same_lower"`: the result has the size `ceil(d / s)`, by padding with
      `max((ceil(d / s) - 1) s + r - d, 0)` zeros, half of them on either side; of an odd number one more at the end
      (upper) or at the beginning (lower).

    Computed in float32 and rounded once.

    Args:
        t: float tensor of shape `(N, C, d, ...)` with one spatial axis or more.
        weight: tensor of shape `(M, C / groups, k, ...)`. If its dtype differs from that of `t`, both are widened.
        stride: steps of the window along each spatial axis; empty for ones.
        padding: zeros before each spatial axis, then zeros after each: `(b1, ..., bn, e1, ..., en)`; empty for none.
            Negative numbers crop. Used for `"not_set"` only.
        dilation: distance of kernel elements along each spatial axis; empty for ones.
        groups: number of groups that the channels of `t`, and those of the result, are divided into.
        pad_type: see above.
        available_memory_proportions, partials_types, enable_conv_dithering: accepted for programs that tune memory;
            without effect. Sums are always accumulated in float32.

    Returns:
        A new tensor of shape `(N, M, o, ...)`, with the dtype of `t`.

    Raises:
        ValueError: for an unknown `pad_type`.
        PopxlError: if the number of entries of `stride`, `padding` or `dilation` does not fit `t`, if the channels
            do not fit `weight` and `groups`, or for float8, which `conv_pow2scaled` is for.

    See also: `torch.nn.functional.conv2d`.

    Example:
        >>> y = ops.conv(images, filters, stride=(2, 2), padding=(1, 1, 1, 1))
        >>> z = ops.conv(signal, signal_filters, stride=(2,), padding=(), dilation=())
    """
    attributes = _attributes("conv", groups, pad_type, stride, padding, dilation)
    hints = multi_conv_options({}, {}, available_memory_proportions, partials_types, enable_conv_dithering)
    return conv_kind(t, weight, **attributes, **hints)


def conv_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Convolution of float8, times `2**log2_scale`, as float16.

    Float8 is decoded exactly; sums are accumulated and scaled in float32 and rounded once. No gradient: autodiff
    refuses it.

    Args:
        t: float8 tensor of shape `(N, C, d, ...)`.
        weight: float8 tensor of shape `(M, C / groups, k, ...)`; its format may be the other one.
        log2_scale: int32 scalar, from -32 to 31. It may change while the program runs.
        stride, padding, dilation, groups, pad_type: as for `conv`.
        available_memory_proportions, enable_conv_dithering: accepted for programs that tune memory; no effect.

    Returns:
        A new float16 tensor of shape `(N, M, o, ...)`.

    Raises:
        TypeError: if `t` or `weight` is not float8, or `log2_scale` not int32.
        ValueError: for a `log2_scale` that is not a scalar, and for an unknown `pad_type`.
        PopxlError: for shapes that do not fit, as for `conv`.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    Example:
        >>> y = ops.conv_pow2scaled(images8, filters8, popxl.constant(-4))
    """
    check_float8("conv_pow2scaled", t=t, weight=weight)
    check_scale("conv_pow2scaled", log2_scale)
    attributes = _attributes("conv_pow2scaled", groups, pad_type, stride, padding, dilation)
    hints = multi_conv_options({}, {}, available_memory_proportions, None, enable_conv_dithering)
    return conv_pow2scaled_kind(t, weight, log2_scale, **attributes, **hints)


def conv_transpose(
    t: Tensor,
    weight: Tensor,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    output_padding: tuple[int, ...] = (),
    output_shape: tuple[int, ...] = (),
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Transposed convolution: the gradient of a convolution as a separate op, without bias.

    Each element of `t` puts the kernel, times the element, into the result, `stride` positions further than the one
    before it; where kernels overlap they add up. Along an axis of size `d`, with a kernel of size `k` and stride `s`,
    that gives `s (d - 1) + k` positions. `output_padding` adds zeros at the end, then `padding` crops either side.

    With `output_shape`, that determines the crop: half on either side, with an odd number one more at the end, or for
    `"same_upper"` at the beginning. (For this op upper and lower are swapped compared with `conv`.) A larger shape adds
    zeros. Otherwise `pad_type` has no effect.

    Computed in float32 and rounded once. Unlike in PopXL, gradients flow to `t` and `weight`.

    Args:
        t: float tensor of shape `(N, C, d, ...)` with one spatial axis or more.
        weight: tensor of shape `(C, M / groups, k, ...)`; note that input channels come first.
        stride: stride along each spatial axis. Here and below, missing entries have the default, and excess entries are
            ignored.
        padding: positions cropped before each spatial axis, then after each: `(b1, ..., bn, e1, ..., en)`. Negative
            numbers add zeros.
        dilation: ones.
        groups: number of groups that the channels of `t`, and those of the result, are divided into.
        pad_type: see above.
        output_padding: positions added after each spatial axis; fewer than `stride`, usually.
        output_shape: the spatial sizes of the result, or its whole shape, which is taken as the spatial sizes unless
            `padding` leads to it.
        available_memory_proportions, partials_types, enable_conv_dithering: accepted for programs that tune memory;
            without effect. Sums are always accumulated in float32.

    Returns:
        A new tensor of shape `(N, M, o, ...)`, with the dtype of `t`. If so much is cropped that a size is not
        positive, the graph can be built, and not run.

    Raises:
        ValueError: for an unknown `pad_type`.
        PopxlError: if the channels do not fit, for a dilation, for `output_shape` with `"valid"`, or for float8, which
            `conv_transpose_pow2scaled` is for.

    See also: `torch.nn.functional.conv_transpose2d`.

    Example:
        >>> y = ops.conv_transpose(features, filters, stride=(2, 2), output_shape=(16, 16))
    """
    of_result = {"output_padding": output_padding, "output_shape": output_shape}
    attributes = _attributes("conv_transpose", groups, pad_type, stride, padding, dilation, **of_result)
    hints = multi_conv_options({}, {}, available_memory_proportions, partials_types, enable_conv_dithering)
    return conv_transpose_kind(t, weight, **attributes, **hints)


def conv_transpose_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    output_padding: tuple[int, ...] = (),
    output_shape: tuple[int, ...] = (),
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Transposed convolution of float8, times `2**log2_scale`, as float16.

    Float8 is decoded exactly; sums are accumulated and scaled in float32 and rounded once. No gradient: autodiff
    refuses it.

    Args:
        t: float8 tensor of shape `(N, C, d, ...)`.
        weight: float8 tensor of shape `(C, M / groups, k, ...)`; its format may be the other one.
        log2_scale: int32 scalar, from -32 to 31. It may change while the program runs.
        stride, padding, dilation, groups, pad_type, output_padding, output_shape: as for `conv_transpose`.
        available_memory_proportions, enable_conv_dithering: accepted for programs that tune memory; no effect.

    Returns:
        A new float16 tensor of shape `(N, M, o, ...)`.

    Raises:
        TypeError: if `t` or `weight` is not float8, or `log2_scale` not int32.
        ValueError: for a `log2_scale` that is not a scalar, and for an unknown `pad_type`.
        PopxlError: for shapes that do not fit, as for `conv_transpose`.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    Example:
        >>> y = ops.conv_transpose_pow2scaled(features8, filters8, popxl.constant(-4), stride=(2, 2))
    """
    check_float8("conv_transpose_pow2scaled", t=t, weight=weight)
    check_scale("conv_transpose_pow2scaled", log2_scale)
    of_result = {"output_padding": output_padding, "output_shape": output_shape}
    attributes = _attributes("conv_transpose_pow2scaled", groups, pad_type, stride, padding, dilation, **of_result)
    hints = multi_conv_options({}, {}, available_memory_proportions, None, enable_conv_dithering)
    return conv_transpose_pow2scaled_kind(t, weight, log2_scale, **attributes, **hints)
