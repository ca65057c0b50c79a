"""Rows of reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    FLOATS,
    LIMITS,
    NUMBERS,
    Array,
    PopxlError,
    Row,
    X,
    bad,
    f16,
    f32,
    over,
    rule,
    sample,
    scalar,
    values,
)


def axes(t: Array, axis: Any) -> tuple[int, ...]:
    """The axes of a reduction, as NumPy takes them."""
    if axis is None:
        return tuple(range(t.ndim))
    return tuple({a % t.ndim for a in ([axis] if isinstance(axis, int) else axis)})


def reduced(of: Callable[..., Any]) -> Callable[..., Any]:
    """The meaning of a reduction, of `of(t, axis, keepdims)` with a tuple of axes."""
    return lambda t, axis=None, keepdims=False: of(t, axes(t, axis), keepdims)


def normed(t: Array, ord: float = 2, axis: Any = None, keepdims: bool = False) -> Array:
    powers = np.abs(t) ** (1 if ord == math.inf else ord)
    total = (np.max if ord == math.inf else np.sum)(powers, axis=axis, keepdims=keepdims)
    return np.sqrt(total) if ord == 2 else total


AXES: list[dict[str, Any]] = [
    {},
    {"axis": 1},
    {"axis": -3, "keepdims": True},
    {"axis": [2, 0]},
    {"axis": (-1, 2, 1), "keepdims": True},
    {"axis": []},
]


def reduction(name: str, of: Callable[..., Any], dtypes: str = NUMBERS, low: float = -2, **settings: Any) -> Row:
    """A reduction, over all kinds of axes."""
    kinds = {"logsum": "LogSum", "logsumexp": "LogSumExp", "sumsquare": "SumSquare"}
    first, *others = dtypes.split()
    samples = [s for attributes in AXES for s in over(first, (2, 3, 4), low=low, **attributes)]
    samples += over(first, (18, 3), low=low, axis=0) + over(first, (4, 5, 3), low=low, axis=[0, 1], keepdims=True)
    samples += over(first, (), low=low) + over(" ".join(others), (2, 3), low=low, axis=0)
    samples += [sample(limits, **settings.pop("at_limits", {})) for d, limits in LIMITS.items() if d in others]
    settings = {
        "differentiable": (0,),
        "bad": [
            bad(
                PopxlError,
                r"axis 2 does not exist in a tensor of rank 2; expected -2 to 1.*`t` is f32\[2, 3\]",
                X,
                axis=2,
            ),
            bad(PopxlError, "axis -3 does not exist", X, axis=(0, -3)),
            bad(TypeError, "`keepdims` must be True or False; got 'no'", X, keepdims="no"),
            bad(TypeError, "`keepdims` must be True or False; got 2", X, keepdims=2),
            bad(PopxlError, "axis 0 does not exist in a tensor of rank 0", scalar(1.0, "float32"), axis=0),
        ],
    } | settings
    kind = f"Reduce{kinds.get(name, name.capitalize())}"
    return Row(name, reduced(of), samples, kind, settings.pop("result", f"{name}_out"), **settings)


def mean(t: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    if t.dtype.kind in "iu":
        bits = max(32, 8 * t.dtype.itemsize)
        total = np.sum(t, axis=axis, keepdims=keepdims, dtype=f"{'u' if t.dtype.kind == 'u' else ''}int{bits}")
        return np.trunc(total / (t.size / total.size)).astype(t.dtype)
    return np.mean(t, axis=axis, keepdims=keepdims)


def median(t: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    """Of an even number, the lower of the two in the middle."""
    others = [d for d in range(t.ndim) if d not in axis]
    rows = np.moveaxis(t, others, range(len(others))).reshape([t.shape[d] for d in others] + [-1])
    picked = np.sort(rows, axis=-1)[..., (rows.shape[-1] - 1) // 2]
    return np.expand_dims(picked, tuple(a % t.ndim for a in axis)) if keepdims else picked


def logsumexp(t: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.log(np.sum(np.exp(t), axis=axis, keepdims=keepdims))


REDUCE = [
    reduction("sum", lambda t, axis, keepdims: np.sum(t, axis=axis, keepdims=keepdims, dtype=t.dtype), keeps=0),
    reduction("mean", mean, keeps=0,
              rules=[rule(np.ones(70000, np.float16), g=scalar(1024, "float16"),  # their number is beyond float16
                          gives=(np.full(70000, 1024 / 70000, np.float16),))]),
    reduction("max", lambda t, axis, keepdims: np.max(t, axis=axis, keepdims=keepdims),
              rules=[rule(f32([1, 3, 3], [4, 0, 2]), axis=1, g=f32(5, 6), gives=(f32([0, 5, 5], [6, 0, 0]),))]),
    reduction("min", lambda t, axis, keepdims: np.min(t, axis=axis, keepdims=keepdims),
              rules=[rule(f32([1, 1, 3], [4, 0, 2]), axis=1, g=f32(5, 6), gives=(f32([5, 5, 0], [0, 6, 0]),))]),
    reduction("prod", lambda t, axis, keepdims: np.prod(t, axis=axis, keepdims=keepdims, dtype=t.dtype), tolerance=1e-5,
              rules=[rule(f32(0, 2, 3), g=np.float32(1), gives=(f32(6, 0, 0),))]),
    reduction("sumsquare", lambda t, axis, keepdims: np.sum(t * t, axis=axis, keepdims=keepdims, dtype=t.dtype)),
    reduction("l1", lambda t, axis, keepdims: np.sum(np.abs(t), axis=axis, keepdims=keepdims, dtype=t.dtype),
              rules=[rule(f32(-2, 0, 3), g=np.float32(5), gives=(f32(-5, 0, 5),))]),
    reduction("l2", lambda t, axis, keepdims: np.sqrt(np.sum(t * t, axis=axis, keepdims=keepdims)), FLOATS,
              rules=[rule(f32([0, 0], [3, 4]), axis=1, g=f32(1, 5), gives=(f32([np.nan, np.nan], [3, 4]),)),
                     rule(f16(150, 200), g=scalar(1000, "float16"), gives=(f16(600, 800),))]),  # no overflow
    reduction("std", lambda t, axis, keepdims: np.std(t, axis=axis, keepdims=keepdims), FLOATS,
              rules=[rule(f32([2, 2], [1, 3]), axis=1, g=f32(5, 6), gives=(f32([0, 0], [-3, 3]),))]),
    reduction("var", lambda t, axis, keepdims: np.var(t, axis=axis, keepdims=keepdims), FLOATS),
    Row("norm", normed,
        [*over(FLOATS, (2, 3)), *over("float32", (2, 3, 4), ord=1, axis=(0, 2)),
         *over("float32", (2, 3, 4), ord=math.inf), *over("float32", (2, 3, 4), ord=2, axis=-1, keepdims=True)],
        "ReduceL2", "l2_out", differentiable=(0,),
        bad=[bad(ValueError, r"`ord` is 3; expected 1, 2 or math\.inf", X, 3),
             bad(PopxlError, "axis 2 does not exist", X, axis=2)]),
    reduction("logsum", lambda t, axis, keepdims: np.log(np.sum(t, axis=axis, keepdims=keepdims)), FLOATS, low=0.2,
              keeps=1),
    reduction("logsumexp", logsumexp, FLOATS),
    reduction("median", median, result="median_out", adds=2, keeps=1,
              rules=[rule(f32([4, 1, 3, 2], [1, 1, 0, 1]), axis=1, keepdims=True, g=f32([5], [6]),
                          gives=(f32([0, 0, 0, 5], [6, 0, 0, 0]),)),
                     rule(f32(4, 1, 3, 2), g=np.float32(5), gives=(f32(0, 0, 0, 5),))]),
    Row("lamb_square", lambda t: np.sum(np.square(t.astype(np.float32))),
        [sample(values(dtype, shape), dtype="float32") for dtype in FLOATS.split() for shape in ((2, 3), ())]
        + [sample(f16(300, 300), expect=np.float32(180000), dtype="float32")], "LambSquare", "lamb_square_out"),
]  # fmt: skip
