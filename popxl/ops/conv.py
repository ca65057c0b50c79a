"""Convolutions and their transposes, over one, two or three spatial axes; of floats, and of scaled float8.

What they are called follows ONNX: channels come first, kernels are not flipped, and padding is written as all
beginnings, then all ends. Sums are accumulated in float32 and rounded once. How windows lie is in
`popxl.ops.windows`. Shapes follow from arithmetic alone, so a graph with a result of size 0 or less can be built and
looked at; running it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax import ShapeDtypeStruct

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import REFUSED, Colocated
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.float8 import SCALE, as_factor, check_float8, check_scale, pow2
from popxl.ops.kernels.convolutions import convolved, transposed, weights_gradient
from popxl.ops.windows import PAD_TYPES, PadType, Windows, halves, windows_over
from popxl.values.shapes import integer, integers
from popxl.values.spec import TensorSpec

__all__ = [
    "PadType",
    "conv",
    "conv_pow2scaled",
    "conv_transpose",
    "conv_transpose_pow2scaled",
    "multi_conv_options",
]

# What all four share ------------------------------------------------------------------------------------------------


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
        attr_param: hints for this one, which come before those.
        available_memory_proportions, partials_types, enable_conv_dithering: hints for this one, as given to `conv`.
            They come before all others; `None` and an empty list say nothing.

    Returns:
        The hints by name, lists as tuples.

    Raises:
        TypeError: if one of the last three is no list.

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


def _attributes(name: str, groups: int, pad_type: str, **sequences: Iterable[int]) -> dict[str, Any]:
    """Numeric convolution arguments as plain numbers."""
    plain = {key: integers(value, f"{name}: `{key}`") for key, value in sequences.items()}
    return {**plain, "groups": integer(groups, f"{name}: `groups`"), "pad_type": pad_type}


def _check_operands(t: Any, weight: Any, *, groups: int, pad_type: str, scaled: bool, **others: Any) -> None:
    """What convolutions and their transposes check alike."""
    if pad_type not in PAD_TYPES:
        raise ValueError(f"`pad_type` is {pad_type!r}; expected {', '.join(map(repr, PAD_TYPES))}.")
    if len(t.shape) < 3 or len(weight.shape) < 2:
        raise PopxlError(
            "expected `t` with batch, channels and at least one spatial axis, and `weight` of the same rank. A single "
            "image has a batch of 1."
        )
    if not scaled and (t.dtype.is_float8 or weight.dtype.is_float8):
        raise PopxlError("float8 is convolved with a scale; use the op whose name ends in `_pow2scaled`.")
    if groups < 1:
        raise PopxlError(f"`groups` is {groups}; expected 1 or more.")


def _kernel(t: Any, weight: Any) -> tuple[int, ...]:
    """Kernel sizes. Invented for weights of wrong rank, which fail only at run time."""
    n = len(t.shape) - 2
    return (tuple(weight.shape[2:]) + (1,) * n)[:n]


def _extend(entries: tuple[int, ...], count: int, missing: int) -> tuple[int, ...]:
    """The first `count` entries, padded with `missing`."""
    return (entries + (missing,) * count)[:count]


def _check_steps(**sequences: tuple[int, ...]) -> None:
    for name, steps in sequences.items():
        if min(steps, default=1) < 1:
            raise PopxlError(f"`{name}` is {steps}; expected numbers of 1 or more.")


def _declared(
    name: str, lowering: Callable[..., Any], shape: Callable[..., tuple[int, ...]], gradient: Mapping[str, Any]
) -> tuple[OpKind, OpKind]:
    """Declare a float convolution and its scaled float8 version."""

    def pow2scaled(t: Any, weight: Any, log2_scale: Any, **attributes: Any) -> Any:
        return lowering(as_factor(t), as_factor(weight), **attributes) * pow2(log2_scale)

    def spec(t: Any, weight: Any, **attributes: Any) -> TensorSpec:
        return TensorSpec(shape(t, weight, scaled=False, **attributes), t.dtype)

    def spec_of_scaled(t: Any, weight: Any, log2_scale: Any, **attributes: Any) -> TensorSpec:
        return TensorSpec(shape(t, weight, scaled=True, **attributes), dtypes.float16)

    result = f"{name.lower()}_out"
    return OpKind(name, lowering, shape=spec, result=result, gradient=gradient, traits=REAL), OpKind(
        name,
        pow2scaled,
        key=f"{name}Pow2Scaled",
        shape=spec_of_scaled,
        result=result,
        gradient=REFUSED,
        traits=[SCALE, Colocated("t", "weight")],
    )


# Convolution --------------------------------------------------------------------------------------------------------


def _conv_windows(
    t: Any,
    weight: Any,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    pad_type: str,
    **others: Any,
) -> tuple[Windows, ...]:
    n = len(t.shape) - 2
    strides, pads, apart = _extend(stride, n, 1), _extend(padding, 2 * n, 0), _extend(dilation, n, 1)
    return windows_over(t.shape[2:], _kernel(t, weight), strides, pads, pad_type, dilation=apart)


def _conv_shape(t: Any, weight: Any, *, scaled: bool, **how: Any) -> tuple[int, ...]:
    _check_operands(t, weight, scaled=scaled, **how)
    n = len(t.shape) - 2
    for name, expected in {"stride": n, "padding": 2 * n, "dilation": n}.items():
        if len(how[name]) not in (0, expected):
            hint = "" if n == 2 else " The defaults are for two axes."
            raise PopxlError(
                f"`{name}` is {how[name]}; expected {expected} entries for the {n} spatial axes of `t`, or ().{hint}"
            )
    _check_steps(stride=how["stride"], dilation=how["dilation"])
    (filters, depth), channels, groups = weight.shape[:2], t.shape[1], how["groups"]
    if channels != depth * groups:
        raise PopxlError(
            f"`t` has {channels} channels, `groups` is {groups} and `weight` has {depth} input channels for a group; "
            f"expected {depth * groups} channels."
        )
    if filters % groups:
        raise PopxlError(f"the {filters} output channels of `weight` cannot be divided into {groups} groups.")
    return (t.shape[0], filters, *(w.count for w in _conv_windows(t, weight, **how)))


def _conv_lowering(t: Any, weight: Any, *, groups: int, **how: Any) -> Any:
    return convolved("conv", t, weight, _conv_windows(t, weight, **how), groups)


def _data_gradient(g: Any, weight: Any, *, shape: tuple[int, ...], groups: int, **how: Any) -> Any:
    return transposed("conv", g, weight, _conv_windows(ShapeDtypeStruct(shape, g.dtype), weight, **how), groups)


def _weights_gradient(g: Any, t: Any, *, shape: tuple[int, ...], dtype: Any, groups: int, **how: Any) -> Any:
    """Weight gradient, with `shape` and `dtype` of the weight."""
    windows = _conv_windows(t, ShapeDtypeStruct(shape, t.dtype), **how)
    return weights_gradient("conv", g, t, shape, windows, groups)


_conv_data_grad = OpKind(
    "ConvDataGrad", _data_gradient, shape=lambda g, weight, *, shape, **how: TensorSpec(shape, g.dtype)
)
_conv_weights_grad = OpKind(
    "ConvWeightsGrad", _weights_gradient, shape=lambda g, t, *, shape, dtype, **how: TensorSpec(shape, dtype)
)


def _with_respect_to_weights(g: Tensor, t: Tensor, weight: TensorSpec, attributes: Mapping[str, Any]) -> Tensor:
    return _conv_weights_grad(g, t, shape=weight.shape, dtype=weight.dtype, **attributes)


_conv, _conv_pow2scaled = _declared(
    "Conv",
    _conv_lowering,
    _conv_shape,
    {
        "t": lambda g, t_spec, weight, attributes: _conv_data_grad(g, weight, shape=t_spec.shape, **attributes),
        "weight": lambda g, t, weight_spec, attributes: _with_respect_to_weights(g, t, weight_spec, attributes),
    },
)


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
        weight: of shape `(M, C / groups, k, ...)`. If its dtype is another than that of `t`, both are widened.
        stride: steps of the window along each spatial axis; empty for ones.
        padding: zeros before each spatial axis, then zeros after each: `(b1, ..., bn, e1, ..., en)`; empty for none.
            Negative numbers crop. Used for `"not_set"` only.
        dilation: distance of kernel elements along each spatial axis; empty for ones.
        groups: the channels of `t`, and those of the result, are divided into so many groups, which do not mix.
        pad_type: see above.
        available_memory_proportions, partials_types, enable_conv_dithering: accepted for programs that tune memory;
            without effect. Sums are always accumulated in float32.

    Returns:
        A new tensor of shape `(N, M, o, ...)`, with the dtype of `t`.

    Raises:
        ValueError: for another `pad_type`.
        PopxlError: if the number of entries of `stride`, `padding` or `dilation` does not fit `t`, if the channels
            do not fit `weight` and `groups`, or for float8, which `conv_pow2scaled` is for.

    See also: `torch.nn.functional.conv2d`.

    Example:
        >>> y = ops.conv(images, filters, stride=(2, 2), padding=(1, 1, 1, 1))
        >>> z = ops.conv(signal, signal_filters, stride=(2,), padding=(), dilation=())
    """
    attributes = _attributes("conv", groups, pad_type, stride=stride, padding=padding, dilation=dilation)
    hints = multi_conv_options({}, {}, available_memory_proportions, partials_types, enable_conv_dithering)
    return _conv(t, weight, **attributes, **hints)


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
        available_memory_proportions, enable_conv_dithering: accepted for programs that tune memory; without effect.

    Returns:
        A new float16 tensor of shape `(N, M, o, ...)`.

    Raises:
        TypeError: if `t` or `weight` is not float8, or `log2_scale` not int32.
        ValueError: for a `log2_scale` that is no scalar, and for another `pad_type`.
        PopxlError: for shapes that do not fit, as for `conv`.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    Example:
        >>> y = ops.conv_pow2scaled(images8, filters8, popxl.constant(-4))
    """
    check_float8("conv_pow2scaled", t=t, weight=weight)
    check_scale("conv_pow2scaled", log2_scale)
    attributes = _attributes("conv_pow2scaled", groups, pad_type, stride=stride, padding=padding, dilation=dilation)
    hints = multi_conv_options({}, {}, available_memory_proportions, None, enable_conv_dithering)
    return _conv_pow2scaled(t, weight, log2_scale, **attributes, **hints)


# Transpose ----------------------------------------------------------------------------------------------------------


def _crops(
    t: Any,
    weight: Any,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    groups: int,
    pad_type: str,
    output_padding: tuple[int, ...],
    output_shape: tuple[int, ...],
    **others: Any,
) -> list[tuple[int, int]]:
    """For each spatial axis: leading crop of the full result, and remaining size.

    The full result includes the output padding.
    """
    n = len(t.shape) - 2
    axes = zip(t.shape[2:], _kernel(t, weight), _extend(stride, n, 1), _extend(output_padding, n, 0), strict=True)
    full = [s * (d - 1) + k + more for d, k, s, more in axes]
    padding = _extend(padding, 2 * n, 0)
    cropped = [(b, size - b - e) for size, b, e in zip(full, padding, padding[n:], strict=False)]
    if not output_shape:
        return cropped

    if len(output_shape) not in (n, n + 2):
        raise PopxlError(
            f"`output_shape` is {output_shape}; expected the {n} spatial sizes, or all {n + 2} sizes of the result."
        )
    if len(output_shape) == n + 2:
        result = (t.shape[0], weight.shape[1] * groups)
        if output_shape[:2] != result:
            raise PopxlError(f"`output_shape` is {output_shape}; expected it to begin with {result}.")
        if output_shape[2:] == tuple(size for _, size in cropped):
            return cropped
    if pad_type == "valid":
        raise PopxlError(
            "`output_shape` is given and `pad_type` is 'valid', which leaves nothing to choose; use `padding` and "
            "`output_padding`, or another `pad_type`."
        )
    wanted = output_shape[-n:]
    larger_last = pad_type != "same_upper"
    return [(halves(size - wish, larger_last)[0], wish) for size, wish in zip(full, wanted, strict=True)]


def _transpose_windows(t: Any, weight: Any, *, stride: tuple[int, ...], **how: Any) -> tuple[Windows, ...]:
    """Windows over the result, one per element of `t`; crops cut the overhang."""
    strides = _extend(stride, len(t.shape) - 2, 1)
    axes = zip(_crops(t, weight, stride=stride, **how), t.shape[2:], _kernel(t, weight), strides, strict=True)
    return tuple(Windows(size, k, s, begin, s * (d - 1) + k - begin - size, d) for (begin, size), d, k, s in axes)


def _conv_transpose_shape(t: Any, weight: Any, *, scaled: bool, **how: Any) -> tuple[int, ...]:
    _check_operands(t, weight, scaled=scaled, **how)
    n = len(t.shape) - 2
    _check_steps(stride=how["stride"][:n])
    if any(step != 1 for step in how["dilation"][:n]):
        raise PopxlError(f"`dilation` is {how['dilation']}; expected ones, as a transposed convolution has none.")
    (channels, depth), groups = weight.shape[:2], how["groups"]
    if t.shape[1] != channels:
        raise PopxlError(
            f"`t` has {t.shape[1]} channels and `weight` has {channels} input channels, on its first axis; expected "
            "the same. The weight of a transposed convolution is laid out as (input channels, output channels, ...)."
        )
    if channels % groups:
        raise PopxlError(f"the {channels} channels of `t` cannot be divided into {groups} groups.")
    return (t.shape[0], depth * groups, *(size for _, size in _crops(t, weight, **how)))


def _conv_transpose_lowering(t: Any, weight: Any, *, groups: int, **how: Any) -> Any:
    return transposed("conv_transpose", t, weight, _transpose_windows(t, weight, groups=groups, **how), groups)


def _conv_of(g: Any, t: Any, weight: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the convolution that maps `g` (result shape) to the shape of `t`."""
    windows = _transpose_windows(t, weight, **attributes)
    return {
        "stride": tuple(w.stride for w in windows),
        "padding": (*(w.begin for w in windows), *(w.end for w in windows)),
        "dilation": (),
        "groups": attributes["groups"],
        "pad_type": "not_set",
    }


_conv_transpose, _conv_transpose_pow2scaled = _declared(
    "ConvTranspose",
    _conv_transpose_lowering,
    _conv_transpose_shape,
    {
        "t": lambda g, t_spec, weight, weight_spec, attributes: _conv(
            g, weight, **_conv_of(g, t_spec, weight_spec, attributes)
        ),
        "weight": lambda g, t, t_spec, weight_spec, attributes: _with_respect_to_weights(
            t, g, weight_spec, _conv_of(g, t_spec, weight_spec, attributes)
        ),
    },
)


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

    Where `output_shape` is given it says what to crop instead: half on either side, and of an odd number one more at
    the end, or for `"same_upper"` at the beginning. (For this op upper and lower are the other way round than for
    `conv`.) A larger shape than there is adds zeros. Otherwise `pad_type` has no effect.

    Computed in float32 and rounded once. Unlike in PopXL, gradients flow to `t` and `weight`.

    Args:
        t: float tensor of shape `(N, C, d, ...)` with one spatial axis or more.
        weight: of shape `(C, M / groups, k, ...)`; note that input channels come first.
        stride: for each spatial axis. Here and below, what is missing counts as the default, what is too much is not
            read.
        padding: positions cropped before each spatial axis, then after each: `(b1, ..., bn, e1, ..., en)`. Negative
            numbers add zeros.
        dilation: ones.
        groups: the channels of `t`, and those of the result, are divided into so many groups, which do not mix.
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
        ValueError: for another `pad_type`.
        PopxlError: if the channels do not fit, for a dilation, for `output_shape` with `"valid"`, or for float8, which
            `conv_transpose_pow2scaled` is for.

    See also: `torch.nn.functional.conv_transpose2d`.

    Example:
        >>> y = ops.conv_transpose(features, filters, stride=(2, 2), output_shape=(16, 16))
    """
    attributes = _attributes(
        "conv_transpose",
        groups,
        pad_type,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output_padding,
        output_shape=output_shape,
    )
    hints = multi_conv_options({}, {}, available_memory_proportions, partials_types, enable_conv_dithering)
    return _conv_transpose(t, weight, **attributes, **hints)


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
        available_memory_proportions, enable_conv_dithering: accepted for programs that tune memory; without effect.

    Returns:
        A new float16 tensor of shape `(N, M, o, ...)`.

    Raises:
        TypeError: if `t` or `weight` is not float8, or `log2_scale` not int32.
        ValueError: for a `log2_scale` that is no scalar, and for another `pad_type`.
        PopxlError: for shapes that do not fit, as for `conv_transpose`.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    Example:
        >>> y = ops.conv_transpose_pow2scaled(features8, filters8, popxl.constant(-4), stride=(2, 2))
    """
    check_float8("conv_transpose_pow2scaled", t=t, weight=weight)
    check_scale("conv_transpose_pow2scaled", log2_scale)
    attributes = _attributes(
        "conv_transpose_pow2scaled",
        groups,
        pad_type,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output_padding,
        output_shape=output_shape,
    )
    hints = multi_conv_options({}, {}, available_memory_proportions, None, enable_conv_dithering)
    return _conv_transpose_pow2scaled(t, weight, log2_scale, **attributes, **hints)
