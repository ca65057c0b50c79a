"""Convolutions and their transposes as ops: shape rules, lowerings and gradients, for floats and for scaled float8.

Users call the functions of `popxl.ops.conv`. Positions of windows are in `popxl.ops.windows`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import ShapeDtypeStruct

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import REFUSED, Colocated, ShardingRule
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.float8 import SCALE, as_convolved, pow2
from popxl.ops.kernels.convolutions import convolved, transposed, weights_gradient
from popxl.ops.windows import PAD_TYPES, Windows, halves, windows_over
from popxl.values.shapes import of_shape
from popxl.values.spec import TensorSpec


def _check_operands(t: Any, weight: Any, *, groups: int, pad_type: str, scaled: bool, **others: Any) -> None:
    """Check operands of convolutions and transposed convolutions."""
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


def _rule(subscripts: str, *linear: str) -> ShardingRule:
    """The sharding rule of an op on images and a weight: the letters of the first two dimensions of each. Others are
    spatial, and so are all channels in groups: shards along these are not followed."""

    def written(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
        spatial = "_" * (len(shapes[0]) - 2)
        text = subscripts if attributes["groups"] == 1 else re.sub("[io]", "_", subscripts)
        return re.sub("(?<=[a-z_]{2})", spatial, text)

    return ShardingRule(written, linear)


def _declared(
    name: str,
    lowering: Callable[..., Any],
    shape: Callable[..., tuple[int, ...]],
    gradient: Mapping[str, Any],
    subscripts: str,
) -> tuple[OpKind, OpKind]:
    """Declare a float convolution and its scaled float8 version."""

    def pow2scaled(t: Any, weight: Any, log2_scale: Any, **attributes: Any) -> Any:
        return lowering(as_convolved(t), as_convolved(weight), **attributes) * pow2(log2_scale)

    def spec(t: Any, weight: Any, **attributes: Any) -> TensorSpec:
        return TensorSpec(shape(t, weight, scaled=False, **attributes), t.dtype)

    def spec_of_scaled(t: Any, weight: Any, log2_scale: Any, **attributes: Any) -> TensorSpec:
        return TensorSpec(shape(t, weight, scaled=True, **attributes), dtypes.float16)

    result = f"{name.lower()}_out"
    traits = [*REAL, _rule(subscripts, "t", "weight")]
    return OpKind(name, lowering, shape=spec, result=result, gradient=gradient, traits=traits), OpKind(
        name,
        pow2scaled,
        key=f"{name}Pow2Scaled",
        shape=spec_of_scaled,
        result=result,
        gradient=REFUSED,
        traits=[SCALE, Colocated("t", "weight")],
    )


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


def _data_gradient(g: Any, weight: Any, *, shape: tuple[int, ...], groups: int, **how: Any) -> Any:
    return transposed("conv", g, weight, _conv_windows(ShapeDtypeStruct(shape, g.dtype), weight, **how), groups)


def _weights_gradient(g: Any, t: Any, *, shape: tuple[int, ...], dtype: Any, groups: int, **how: Any) -> Any:
    """Weight gradient, with `shape` and `dtype` of the weight."""
    windows = _conv_windows(t, ShapeDtypeStruct(shape, t.dtype), **how)
    return weights_gradient("conv", g, t, shape, windows, groups)


_conv_data_grad = OpKind(
    "ConvDataGrad",
    _data_gradient,
    shape=of_shape,
    traits=[_rule("no,oi->ni", "g", "weight")],
)


_conv_weights_grad = OpKind(
    "ConvWeightsGrad",
    _weights_gradient,
    shape=lambda g, t, *, shape, dtype, **how: TensorSpec(shape, dtype),
    traits=[_rule("no,ni->oi", "g", "t")],
)


def _with_respect_to_weights(g: Tensor, t: Tensor, weight: TensorSpec, attributes: Mapping[str, Any]) -> Tensor:
    return _conv_weights_grad(g, t, shape=weight.shape, dtype=weight.dtype, **attributes)


conv_kind, conv_pow2scaled_kind = _declared(
    "Conv",
    lambda t, weight, *, groups, **how: convolved("conv", t, weight, _conv_windows(t, weight, **how), groups),
    _conv_shape,
    {
        "t": lambda g, t_spec, weight, attributes: _conv_data_grad(g, weight, shape=t_spec.shape, **attributes),
        "weight": lambda g, t, weight_spec, attributes: _with_respect_to_weights(g, t, weight_spec, attributes),
    },
    "ni,oi->no",
)


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
    """Leading crop of the full result, and remaining size, per spatial axis.

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


conv_transpose_kind, conv_transpose_pow2scaled_kind = _declared(
    "ConvTranspose",
    _conv_transpose_lowering,
    _conv_transpose_shape,
    {
        "t": lambda g, t_spec, weight, weight_spec, attributes: conv_kind(
            g, weight, **_conv_of(g, t_spec, weight_spec, attributes)
        ),
        "weight": lambda g, t, t_spec, weight_spec, attributes: _with_respect_to_weights(
            t, g, weight_spec, _conv_of(g, t_spec, weight_spec, attributes)
        ),
    },
    "ni,io->no",
)
