"""Rows of the ops that slide windows over spatial axes: convolutions and pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import popxl
from tests.popxl.ops.rows.float8 import BAD_SCALES, decoded, float8, scale
from tests.popxl.ops.rows.schema import (
    INTS,
    Array,
    Bad,
    PopxlError,
    Row,
    X,
    bad,
    f16,
    f32,
    i32,
    over,
    rule,
    sample,
    values,
)


def positions(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


# Convolutions -------------------------------------------------------------------------------------------------------


def padded(t: Array, before: Sequence[int], after: Sequence[int]) -> Array:
    """With zeros around the spatial axes; negative numbers crop."""
    for axis, (b, e) in enumerate(zip(before, after, strict=True), 2):
        t = np.pad(t, [(max(b, 0), max(e, 0)) if a == axis else (0, 0) for a in range(t.ndim)])
        t = np.take(t, range(max(-b, 0), t.shape[axis] - max(-e, 0)), axis)
    return t


def conv(
    t: Array,
    weight: Array,
    stride: Any = (1, 1),
    padding: Any = (0, 0, 0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
    pad_type: str = "not_set",
    *hints: Any,
    **more: Any,
) -> Array:
    """Every position of the result, one after the other."""
    n = t.ndim - 2
    stride, dilation = stride or (1,) * n, dilation or (1,) * n
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    before, after = ([0] * n, [0] * n) if not padding or pad_type == "valid" else (padding[:n], padding[n:])
    if "same" in pad_type:
        totals = [
            max((math.ceil(d / s) - 1) * s + r - d, 0) for d, s, r in zip(t.shape[2:], stride, reach, strict=True)
        ]
        small, large = [p // 2 for p in totals], [p - p // 2 for p in totals]
        before, after = (small, large) if pad_type == "same_upper" else (large, small)
    x = padded(t, before, after)
    sizes = [math.floor((d - r) / s) + 1 for d, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    channels, filters = t.shape[1] // groups, weight.shape[0] // groups
    out = np.zeros((t.shape[0], weight.shape[0], *sizes))
    for at in positions(sizes):
        cut = tuple(slice(a * s, a * s + r, d) for a, s, r, d in zip(at, stride, reach, dilation, strict=True))
        for j in range(groups):
            ins, outs = slice(j * channels, (j + 1) * channels), slice(j * filters, (j + 1) * filters)
            out[(slice(None), outs, *at)] = np.tensordot(
                x[(slice(None), ins, *cut)], weight[outs], (range(1, n + 2), range(1, n + 2))
            )
    return out


def conv_transpose(
    t: Array,
    weight: Array,
    stride: Any = (1, 1),
    padding: Any = (0, 0, 0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
    pad_type: str = "not_set",
    output_padding: Any = (),
    output_shape: Any = (),
    **hints: Any,
) -> Array:
    """Every element of `t` adds the kernel, times itself, to the result."""
    n = t.ndim - 2
    stride, more = [*stride, 1, 1, 1][:n], [*output_padding, 0, 0, 0][:n]
    crops = [*padding, *[0] * 2 * n][: 2 * n]
    kernel, channels = weight.shape[2:], t.shape[1] // groups
    sizes = [s * (d - 1) + k + o for s, d, k, o in zip(stride, t.shape[2:], kernel, more, strict=True)]
    out = np.zeros((t.shape[0], groups, weight.shape[1], *sizes))
    for at in positions(t.shape[2:]):
        cut = tuple(slice(a * s, a * s + k) for a, s, k in zip(at, stride, kernel, strict=True))
        for j in range(groups):
            ins = slice(j * channels, (j + 1) * channels)
            part = np.tensordot(t[(slice(None), ins, *at)], weight[ins], (1, 0))
            out[(slice(None), j, slice(None), *cut)] += part
    out = out.reshape(t.shape[0], -1, *sizes)
    before, after = crops[:n], crops[n:]
    left = tuple(size - b - e for size, b, e in zip(sizes, before, after, strict=True))
    if output_shape and not (len(output_shape) == n + 2 and tuple(output_shape[2:]) == left):
        totals = [size - wish for size, wish in zip(sizes, output_shape[-n:], strict=True)]
        small, large = [p // 2 for p in totals], [p - p // 2 for p in totals]
        before, after = (large, small) if pad_type == "same_upper" else (small, large)
    return padded(out, [-b for b in before], [-e for e in after])


def scaled(of: Callable[..., Array]) -> Callable[..., Array]:
    return lambda t, weight, log2_scale, *rest, **how: (
        of(decoded(t), decoded(weight), *rest, **how) * 2.0 ** int(log2_scale)
    )


def pairs(dtype: str, t: tuple[int, ...], weight: tuple[int, ...], **attributes: Any) -> list[Any]:
    return over(dtype, t, weight, low=-1, high=1, **attributes)


def of_float8(
    first: popxl.dtype, t: tuple[int, ...], second: popxl.dtype, weight: tuple[int, ...], k: int, **how: Any
) -> Any:
    return sample(float8(first, *t), float8(second, *weight, seed=1), scale(k), dtype="float16", **how)


F143, F152 = popxl.float8_143, popxl.float8_152
LINE: dict[str, Any] = {"stride": (), "padding": (), "dilation": ()}
T, W = values("float32", (2, 4, 5, 6)), values("float32", (6, 4, 3, 2))
V = values("float32", (4, 3, 3, 2))  # the weight of a transposed convolution
T8, W8, V8 = float8(F143, 1, 2, 3, 4), float8(F152, 3, 2, 2, 2), float8(F152, 2, 3, 2, 2)


def bad_scaled(name: str, weight: Array) -> list[Bad]:
    """What is checked before anything else, and in which order."""
    broken = {"stride": (1,), "pad_type": "same"}
    return [
        *(bad(error, f"^{name}: .*{message}", T8, weight, k, **broken) for error, message, k in BAD_SCALES),
        bad(TypeError, f"^{name}: `t` must be float8_143 or float8_152; it is float32", T, weight, i32(1, 2), **broken),
        bad(TypeError, f"^{name}: `weight` must be float8_143 or float8_152; it is float32", T8, W, i32(1, 2)),
        bad(
            ValueError, "`pad_type` is 'same'; expected 'not_set', 'same_upper'", T8, weight, scale(0), pad_type="same"
        ),
        bad(PopxlError, "channels", T8, weight, scale(0), groups=3),
    ]


# Pooling ------------------------------------------------------------------------------------------------------------


def pooled(of: Callable[..., Array]) -> Callable[..., Array]:
    """The meaning of a pooling op: `of` the elements of each window that are no padding."""

    def pool(
        t: Array,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = None,
        auto_pad: str | None = None,
        ceil_mode: bool = False,
        **neutral: Any,
    ) -> Array:
        n = t.ndim - 2
        stride, pads = [*(stride or ()), 1, 1, 1][:n], [*(padding or ()), *[0] * 2 * n]
        starts, sizes = [], []
        for axis, (d, k, s) in enumerate(zip(t.shape[2:], kernel_size, stride, strict=True)):
            if auto_pad == "valid":
                size, begin = math.ceil((d - k + 1) / s), 0
            elif auto_pad in ("same_upper", "same_lower"):
                size = math.ceil(d / s)
                total = max((size - 1) * s + k - d, 0)
                begin = math.floor(total / 2) if auto_pad == "same_upper" else math.ceil(total / 2)
            else:
                begin = pads[axis]
                size = (math.ceil if ceil_mode else math.floor)((d + begin + pads[n + axis] - k) / s) + 1
            starts.append(begin)
            sizes.append(size)
        out = np.zeros((*t.shape[:2], *sizes), t.dtype)
        for at in positions(sizes):
            cut = []
            for a, s, k, begin, d in zip(at, stride, kernel_size, starts, t.shape[2:], strict=True):
                cut.append(slice(min(max(a * s - begin, 0), d), max(a * s - begin + k, 0)))
            window = t[(slice(None), slice(None), *cut)].reshape(*t.shape[:2], -1)
            if window.size:
                out[(slice(None), slice(None), *at)] = of(window, axis=-1)
        return out

    return pool


POOLS = [
    *over("float32 float16 bfloat16", (2, 3, 5, 6), kernel_size=(2, 3)),
    *over("float32", (2, 3, 7), kernel_size=(3,), stride=(2,), padding=(1,)),
    *over("float32", (2, 3, 7), kernel_size=[2], stride=[3], padding=[1, 2], auto_pad=""),
    *over("float32", (1, 2, 3, 4, 5), kernel_size=(2, 3, 1), stride=(1, 2, 3)),
    *over("float32", (1, 2, 3, 4, 5), kernel_size=(2, 3, 4), stride=(2,), padding=(1, 0, 2, 0, 1, 1)),
    *over("float32", (2, 3, 5, 6), kernel_size=(5, 6)),
    *over("float32", (1, 2, 5, 7), kernel_size=(2, 3), stride=(2, 3), ceil_mode=True, auto_pad=None),
    *over("float32", (1, 2, 5, 7), kernel_size=(2, 2), stride=(3, 2), padding=(1, 0, 0, 1), ceil_mode=True),
    *over("float32", (2, 3, 3), kernel_size=(2,), stride=(2,), padding=(0, 3)),  # the last window is padding alone
    *over("float32", (2, 3, 3), kernel_size=(2,), stride=(3,), padding=(4, 1), ceil_mode=True),  # the first
    *over("float32", (1, 2, 5, 7), kernel_size=(3, 2), stride=(2, 1), padding=(9, 9), auto_pad="valid"),
    *over("float32", (1, 2, 5, 6), kernel_size=(2, 4), auto_pad="same_upper", padding=(9, 9)),
    *over("float32", (1, 2, 5, 6), kernel_size=(2, 4), stride=(2, 3), auto_pad="same_lower", ceil_mode=True),
    *over("float32", (1, 2, 9), kernel_size=(2,), stride=(4,), auto_pad="same_lower"),
    *over("float32", (1, 2, 4), kernel_size=(2,), out_pads=(0,), dilation=(1,), in_dilations=(1, 1)),
    # A batch that fills vectors, and windows that are long.
    *over("float32 float16 bfloat16", (9, 2, 5, 4), kernel_size=(3, 2), stride=(2, 1), padding=(1, 0, 2, 1)),
    *over("float32", (9, 2, 20, 3), kernel_size=(18, 2)),
]
IMAGE = values("float32", (1, 2, 4, 5))


def bad_pools(name: str) -> list[Bad]:
    neutral = {"out_pads": 0, "dilation": 1, "in_dilations": 1}
    return [
        *(
            bad(ValueError, rf"^{name}: `{a}` is \({v}, 2\); only {v} is supported", IMAGE, (2, 2), **{a: (v, 2)})
            for a, v in neutral.items()
        ),
        bad(KeyError, f"{name}: `auto_pad` is 'same'; expected 'not_set', 'same_upper'", IMAGE, (2,), auto_pad="same"),
        bad(PopxlError, r"`kernel_size` is \(2,\); `t` has 2 spatial axes, expected 2 entries", IMAGE, (2,)),
        bad(PopxlError, r"`kernel_size` is \(2, 2, 2\)", IMAGE, (2, 2, 2)),
        bad(PopxlError, r"`stride` is \(1, 1, 1\); .* expected 2 entries", IMAGE, (2, 2), (1, 1, 1)),
        bad(PopxlError, r"`padding` is \(0, 0, 0, 0, 0\); .* expected 4 entries", IMAGE, (2, 2), None, (0,) * 5),
        bad(PopxlError, r"`kernel_size` is \(2, 0\); expected numbers of 1 or more", IMAGE, (2, 0)),
        bad(PopxlError, r"`stride` is \(0, 1\)", IMAGE, (2, 2), (0,)),
        bad(PopxlError, r"`padding` is \(0, 0, 0, -1\); expected numbers of 0", IMAGE, (2, 2), None, (0, 0, 0, -1)),
        bad(PopxlError, r"spatial sizes \(0, 4\); the window does not fit into `t`", IMAGE, (5, 2)),
        bad(PopxlError, "at least one spatial axis", X, ()),
        bad(TypeError, f"^{name}: `kernel_size` must be a sequence of integers; got 2", IMAGE, 2),
    ]


WINDOWS = [
    Row("conv", conv,
        [*pairs("float32 float16 bfloat16", (2, 4, 5, 6), (6, 4, 3, 2)),
         *pairs("float32", (2, 4, 5, 6), (6, 2, 3, 2), stride=(2, 1), padding=(1, 0, 2, 1), dilation=(1, 2), groups=2),
         *pairs("float32", (1, 3, 5, 4), (6, 1, 2, 2), groups=3, stride=[1, 3], dilation=[2, 1]),
         *pairs("float32", (2, 3, 7), (4, 3, 2), **LINE),
         *pairs("float32", (2, 3, 7), (4, 3, 3), stride=(2,), padding=(1, 2), dilation=(2,)),
         *pairs("float32", (1, 2, 3, 4, 5), (3, 2, 2, 1, 3), stride=(1, 2, 1), padding=(), dilation=()),
         *pairs("float32", (1, 2, 3, 4, 5), (4, 1, 2, 3, 2), stride=(2, 1, 2), padding=(0, 1, 2, 1, 0, 1),
                dilation=(1, 2, 3), groups=2),
         *(s for pad_type in ("valid", "same_upper", "same_lower") for more in (
             {}, {"stride": (2, 3), "padding": (9, 9, 9, 9)}, {"stride": (2, 2), "dilation": (2, 3)})
           for s in pairs("float32", (1, 2, 5, 7), (3, 2, 2, 3), pad_type=pad_type, **more)),
         *pairs("float32", (1, 2, 9), (3, 2, 2), stride=(4,), padding=(), dilation=(), pad_type="same_upper"),
         *pairs("float32", (1, 2, 6), (3, 2, 2), stride=(), padding=(-1, 2), dilation=()),
         sample(values("float16", (1, 2, 3, 3)), values("float32", (2, 2, 2, 2))),
         sample(values("float32", (1, 2, 3, 3)), values("float16", (2, 2, 2, 2))),
         sample(f16([[1] * 4098]), f16([[1] * 4096]), **LINE, expect=f16([[4096] * 3])),
         sample(f32([[1, 2, 3, 4, 5]]), f32([[1, 10]]), stride=(1,), padding=(0, 0), dilation=(1,),
                pad_type="same_upper", expect=f32([[21, 32, 43, 54, 5]])),
         *pairs("float32", (1, 2, 3, 3), (2, 2, 2, 2), available_memory_proportions=[0.2], partials_types=["half"],
                enable_conv_dithering=[1])],
        "Conv", "conv_out", differentiable=(0, 1), keeps=2, tolerance=5e-6,
        bad=[bad(ValueError, r"^Conv: `pad_type` is 'same'; expected 'not_set'.* `weight` is f32\[6, 4, 3, 2\]",
                 T, W, pad_type="same"),
             bad(PopxlError, r"`stride` is \(1,\); expected 2 entries for the 2 spatial axes of `t`, or \(\)\. Here",
                 T, W, (1,)),
             bad(PopxlError, r"`padding` is \(1, 1\); expected 4 entries", T, W, padding=(1, 1)),
             bad(PopxlError, r"`padding` is \(1, 1, 1\)", T, W, padding=(1, 1, 1), pad_type="valid"),
             bad(PopxlError, r"`dilation` is \(1, 1, 1\)", T, W, dilation=(1, 1, 1)),
             bad(PopxlError, r"`stride` is \(1, 1\); expected 1 .* or \(\)\. The defaults are for two axes",
                 values("float32", (1, 4, 5)), W[..., 0]),
             bad(PopxlError, r"`stride` is \(1, 0\); expected numbers of 1", T, W, stride=(1, 0)),
             bad(PopxlError, r"`dilation` is \(-1, 1\); expected numbers of 1", T, W, dilation=(-1, 1)),
             bad(PopxlError, "`t` has 4 channels, `groups` is 2 and `weight` has 4 .* expected 8 channels",
                 T, W, groups=2),
             bad(PopxlError, "expected 3 channels", T, W[:, :3]), bad(PopxlError, "`groups` is 0", T, W, groups=0),
             bad(PopxlError, "the 5 output channels of `weight` cannot be divided into 2", T, W[:5, :2], groups=2),
             bad(PopxlError, "at least one spatial axis", X, X),
             bad(PopxlError, "float8 is convolved with a scale", T8, W8),
             bad(PopxlError, "float8 is convolved with a scale", T, W8),
             bad(TypeError, "^conv: `stride` must be a sequence of integers; got None", T, W, None),
             bad(TypeError, "^conv: `groups` must be an integer; got None", T, W, groups=None),
             bad(TypeError, "^`partials_types` must be a list, with an entry for each convolution; got 'half'",
                 T, W, partials_types="half")]),
    Row("conv_pow2scaled", scaled(conv),
        [*(of_float8(a, (1, 2, 3, 4), b, (3, 2, 2, 2), k) for a in (F143, F152) for b in (F143, F152)
           for k in (0, -3)),
         of_float8(F143, (2, 4, 5), F152, (6, 2, 3), 2, stride=(2,), padding=(1, 0), dilation=(1,), groups=2),
         of_float8(F143, (1, 1, 3, 4, 2), F143, (1, 1, 2, 2, 2), -32, **LINE, pad_type="same_upper"),
         of_float8(F152, (1, 2, 3, 4), F143, (3, 2, 2, 2), 1, available_memory_proportions=[0.1])],
        "Conv", "conv_out", refused=True,
        bad=[*bad_scaled("conv_pow2scaled", W8), bad(PopxlError, r"`stride` is \(1,\)", T8, W8, scale(0), (1,))]),
    Row("conv_transpose", conv_transpose,
        [*pairs("float32 float16 bfloat16", (2, 4, 3, 2), (4, 5, 2, 3)),
         *pairs("float32", (2, 4, 3, 2), (4, 3, 2, 3), stride=(2, 3), padding=(1, 0, 0, 2), groups=2),
         *pairs("float32", (1, 3, 3, 2), (3, 1, 2, 2), stride=[3, 2], output_padding=[2, 1], groups=3),
         *pairs("float32", (1, 2, 3, 2), (2, 3, 2, 2), padding=(2, 1, 0, 0), output_padding=(1,)),
         *pairs("float32", (2, 3, 4), (3, 2, 3)), *pairs("float32", (2, 3, 4), (3, 2, 3), stride=(2,), padding=(1,)),
         *pairs("float32", (2, 3, 4), (3, 2, 3), padding=(-1, -2)),
         *pairs("float32", (1, 2, 2, 3, 2), (2, 3, 2, 1, 3), stride=(1, 2, 3), padding=(0, 0, 1, 1, 0, 1)),
         *(s for pad_type in ("not_set", "same_upper", "same_lower")
           for shape in ((3, 6), (1, 6, 5, 4), (9, 8), (1, 6, 6, 7)) for s in pairs(
               "float32", (1, 2, 3, 2), (2, 3, 2, 3), stride=(2, 3), output_padding=(1, 0), output_shape=shape,
               padding=(0, 1, 2, 0), pad_type=pad_type, groups=2)),
         *pairs("float32", (2, 3, 4), (3, 2, 3), stride=(2,), output_shape=(6,)),
         *(s for pad_type in ("valid", "same_upper", "same_lower")
           for s in pairs("float32", (1, 2, 2, 3), (2, 3, 2, 2), pad_type=pad_type)),
         *pairs("float32", (1, 2, 2, 3), (2, 3, 2, 2), pad_type="valid", output_shape=(1, 3, 3, 4)),
         sample(f32([[[1, 2], [3, 4]]]), f32([[[1, 2], [2, 1]]]), output_shape=(2, 2), pad_type="same_upper",
                expect=f32([[[15, 10], [11, 4]]])),
         sample(np.ones((1, 4096, 1), np.float16), np.ones((4096, 1, 1), np.float16), expect=f16([[4096]])),
         *pairs("float32", (1, 2, 2, 2), (2, 2, 2, 2), available_memory_proportions=[0.2], partials_types=["float"],
                enable_conv_dithering=[])],
        "ConvTranspose", "convtranspose_out", differentiable=(0, 1), keeps=2, tolerance=5e-6,
        bad=[bad(ValueError, "^ConvTranspose: `pad_type` is None", T, V, pad_type=None),
             bad(PopxlError, r"`dilation` is \(1, 2\); expected ones", T, V, dilation=(1, 2)),
             bad(PopxlError, "`groups` is 0", T, V, groups=0), bad(PopxlError, r"`stride` is \(0,\)", T, V, (0,)),
             bad(PopxlError, "`t` has 4 channels and `weight` has 6 input channels, on its first axis", T, W),
             bad(PopxlError, "the 4 channels of `t` cannot be divided into 3 groups", T, V, groups=3),
             bad(PopxlError, "`output_shape` is given and `pad_type` is 'valid'", T, V, pad_type="valid",
                 output_shape=(5, 5)),
             bad(PopxlError, "`pad_type` is 'valid'", T, V, pad_type="valid", output_shape=(2, 3, 5, 5)),
             bad(PopxlError, r"`output_shape` is \(5,\); expected the 2 spatial sizes, or all 4", T, V,
                 output_shape=(5,)),
             bad(PopxlError, r"expected it to begin with \(2, 6\)", T, V, groups=2, output_shape=(2, 3, 5, 5)),
             bad(PopxlError, "float8 is convolved with a scale", T8, V8),
             bad(TypeError, "^conv_transpose: `output_padding` must be a sequence", T, V, output_padding=None)]),
    Row("conv_transpose_pow2scaled", scaled(conv_transpose),
        [*(of_float8(a, (1, 2, 3, 4), b, (2, 3, 2, 2), k) for a in (F143, F152) for b in (F143, F152)
           for k in (0, -3)),
         of_float8(F143, (2, 4, 5), F152, (4, 2, 3), 2, stride=(2,), padding=(1, 0), groups=2, output_padding=(1,)),
         of_float8(F143, (1, 2, 2, 2), F152, (2, 1, 3, 2), 1, output_shape=(3, 2), pad_type="same_lower"),
         of_float8(F152, (1, 2, 3, 4), F143, (2, 3, 2, 2), -32, available_memory_proportions=[0.1])],
        "ConvTranspose", "convtranspose_out", refused=True,
        bad=[*bad_scaled("conv_transpose_pow2scaled", V8),
             bad(PopxlError, r"`dilation` is \(2,\)", T8, V8, scale(0), dilation=(2,))]),
    Row("average_pool", pooled(np.mean),
        [*POOLS, sample(np.full((1, 1, 5000), 16, np.float16), (5000,), expect=f16([[16]]))],
        "AveragePool", "averagepool_out", differentiable=(0,), keeps=0, bad=bad_pools("average_pool"),
        rules=[rule(f32([[1, 2, 3]]), (2,), (1,), (1, 0), g=f32([[1, 10, 100]]), gives=(f32([[6, 55, 50]]),)),
               rule(f32([[1, 2]]), (2,), (2,), (0, 2), g=f32([[1, 10]]), gives=(f32([[0.5, 0.5]]),))]),
    Row("max_pool", pooled(np.max),
        [*POOLS, sample(f32([[-np.inf, -np.inf, -1, np.nan]]), (2,), expect=f32([[-np.inf, -1, np.nan]])),
         sample(INTS.reshape(1, 1, -1), (2,)), sample(f32([[1, 2]]), (2,), storage_order="row", expect=f32([[2]]))],
        "MaxPool", "maxpool_out", differentiable=(0,), keeps=1, tolerance=0,
        rules=[rule(f32([[1, 3, 3, 2]]), (2,), g=f32([[1, 10, 100]]), gives=(f32([[0, 11, 110, 0]]),)),
               rule(f32([[[0, 5, 5], [5, 1, 5]]]), (2, 2), g=f32([[[1, 10]]]),
                    gives=(f32([[[0, 11, 10], [1, 0, 10]]]),)),
               rule(f32([[0, -0.0, 7, 0]]), (2,), (3,), (0, 4), g=f32([[1, 10, 100]]), gives=(f32([[1, 1, 0, 10]]),)),
               rule(f32([[-np.inf, -np.inf, 2]]), (2,), (1,), (1, 0), g=f32([[1, 10, 100]]),
                    gives=(f32([[11, 10, 100]]),)),
               rule(f16([[1] * 5]), (3,), g=f16([[2048, 1, 1]]), gives=(f16([[2048, 2048, 2050, 2, 1]]),))],
        bad=[*bad_pools("max_pool"),
             bad(PopxlError, "`storage_order` is 'column'; expected 'row'", IMAGE, (2, 2), storage_order="column")]),
]  # fmt: skip
