"""The table of ops: for each, samples, what it means in NumPy, and what it refuses.

`test_rows.py` makes the tests of them. A new op is one more row here; an op without a row makes the suite fail. What an
op means is said with NumPy and `math` alone, never with code of ours.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import popxl
from popxl import ops

Array = np.ndarray

FLOATS = "float32 float16"
NUMBERS = "float32 float16 int32 uint32 int8"
ANY = "float32 float16 int32 uint32 int8 bool"


@dataclass(frozen=True)
class Sample:
    """Arguments of an op. Arrays stand for tensors, also in lists; everything else is passed as it is."""

    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    expect: Any = None  # the result, where the row's meaning does not say
    dtype: str | None = None  # of the results that are floats, where it is not that of the first operand
    torch: bool = True  # whether torch takes it

    def __repr__(self) -> str:
        shown = [f"{a.dtype}{list(a.shape)}" if isinstance(a, Array) else repr(a) for a in self.operands]
        return f"({', '.join(shown + [f'{name}={value}' for name, value in self.attributes.items()])})"


@dataclass(frozen=True)
class Fed:
    """Stands for a stream from the host that is fed with an array."""

    data: Array


@dataclass(frozen=True)
class Bad:
    """Arguments that an op refuses."""

    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Rule:
    """A gradient that is a choice: at a kink, for ties, below an epsilon. `gives` is by operand; `None`: not asked."""

    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    g: Any
    gives: tuple[Any, ...]


@dataclass(frozen=True)
class Inplace:
    """The form of an op that overwrites its first operand, or that is a view of its operands."""

    name: str
    kind: str
    result: str
    view: bool = False


@dataclass(frozen=True)
class Row:
    """One op.

    `result` names the result tensors and `kinds` the ops that are added; `{0}` stands for the name of the first
    operand. `adds` counts the new tensors, where they are not the results alone. `differentiable` lists the operands
    that get a gradient; `refused` means that autodiff raises; `steps`, that differences say nothing of it. `keeps` is
    the number of forward tensors that the gradient reads, where that is promised. `numbers` are operands that may be
    plain numbers. `build` stands in for the op where its arguments cannot be written as a sample.
    """

    name: str
    meaning: Callable[..., Any]
    samples: list[Sample]
    kinds: str
    result: str
    adds: int | None = None
    differentiable: tuple[int, ...] = ()
    refused: bool = False
    keeps: int | None = None
    rules: list[Rule] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    inplace: Inplace | None = None
    overwrites: bool = False
    numbers: tuple[int, ...] = ()
    steps: bool = False
    aliases: tuple[str, ...] = ()
    tolerance: float = 2e-6
    torch: Callable[..., Any] | None = None
    build: Callable[..., Any] | None = None
    colocated: bool = True

    def __repr__(self) -> str:
        return self.name

    @property
    def op(self) -> Callable[..., Any]:
        return function_of(self.name)


def function_of(name: str) -> Callable[..., Any]:
    """The public function of this name."""
    return getattr(ops, name, None) or getattr(ops.var_updates, name)


# Writing samples ----------------------------------------------------------------------------------------------------


def values(dtype: str, shape: tuple[int, ...], low: float = -2, high: float = 2, seed: int = 0) -> Array:
    """Numbers that are always the same, and all different where they are floats. Integers reach four times as far."""
    random = np.random.default_rng(zlib.crc32(repr((dtype, shape, seed)).encode()))
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return random.integers(0 if dtype[0] == "u" and low < 0 else int(4 * low), int(4 * high) + 1, shape).astype(
            dtype
        )
    return np.asarray(random.uniform(low, high, shape), dtype)


def over(dtypes: str, *shapes: tuple[int, ...], low: float = -2, high: float = 2, **attributes: Any) -> list[Sample]:
    """A sample for each dtype, with an operand for each shape."""
    return [
        Sample(tuple(values(dtype, shape, low, high, seed=i) for i, shape in enumerate(shapes)), attributes)
        for dtype in dtypes.split()
    ]


def sample(
    *operands: Any, expect: Any = None, dtype: str | None = None, torch: bool = True, **attributes: Any
) -> Sample:
    return Sample(operands, attributes, expect, dtype, torch)


def bad(error: type[Exception], message: str, *operands: Any, **attributes: Any) -> Bad:
    return Bad(operands, attributes, error, message)


def rule(*operands: Any, g: Any, gives: tuple[Any, ...], **attributes: Any) -> Rule:
    return Rule(operands, attributes, g, gives)


def f32(*numbers: Any) -> Array:
    return np.array(numbers, np.float32)


def f16(*numbers: Any) -> Array:
    return np.array(numbers, np.float16)


def scalar(number: float, dtype: str = "float32") -> Array:
    return np.array(number, dtype)


def i32(*numbers: Any) -> Array:
    return np.array(numbers, np.int32)


def u32(*numbers: Any) -> Array:
    return np.array(numbers, np.uint32)


X = values("float32", (2, 3))
Y = values("float32", (3,))
INTS = values("int32", (2, 3))
PopxlError = popxl.errors.PopxlError
MIXED = bad(PopxlError, "different dtypes, float32 and int32", X, INTS)
UNFIT = bad(PopxlError, r"shapes \(2, 3\) and \(2,\) do not broadcast", X, values("float32", (2,)))


# Families of rows ---------------------------------------------------------------------------------------------------


def unary(
    name: str, meaning: Callable[..., Any], kind: str, samples: list[Sample] | None = None, **settings: Any
) -> Row:
    """An op of one tensor. By default it is for floats and has a gradient."""
    settings = {"differentiable": (0,)} | settings
    samples = over(FLOATS, (2, 3)) + over("float32", ()) if samples is None else samples
    if settings.pop("inplace", False):
        settings["inplace"] = Inplace(f"{name}_", f"{kind}Inplace", f"{name}_inplace_out")
    return Row(name, meaning, samples, kind, f"{name}_out", **settings)


def binary(name: str, meaning: Callable[..., Any], kind: str, samples: list[Sample], **settings: Any) -> Row:
    """Arithmetic of two tensors."""
    settings = {"differentiable": (0, 1), "bad": [MIXED, UNFIT]} | settings
    return Row(name, meaning, samples, kind, f"{name}_out", **settings)


def axes(t: Array, axis: Any) -> tuple[int, ...]:
    """The axes of a reduction, as NumPy takes them."""
    if axis is None:
        return tuple(range(t.ndim))
    return tuple({a % t.ndim for a in ([axis] if isinstance(axis, int) else axis)})


def reduced(of: Callable[..., Any]) -> Callable[..., Any]:
    """The meaning of a reduction, of `of(t, axis, keepdims)` with a tuple of axes."""
    return lambda t, axis=None, keepdims=False: of(t, axes(t, axis), keepdims)


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
    samples += over(first, (), low=low) + over(" ".join(others), (2, 3), low=low, axis=0)
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
            bad(PopxlError, "axis 0 does not exist in a tensor of rank 0", scalar(1.0, "float32"), axis=0),
        ],
    } | settings
    kind = f"Reduce{kinds.get(name, name.capitalize())}"
    return Row(name, reduced(of), samples, kind, settings.pop("result", f"{name}_out"), **settings)


# What ops mean ------------------------------------------------------------------------------------------------------

erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(t: Array) -> Array:
    return 0.5 * t * (1 + np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))


def divided(lhs: Array, rhs: Array) -> Array:
    return np.floor_divide(lhs, rhs) if lhs.dtype.kind in "iu" else np.divide(lhs, rhs)


def converted(t: Array, data_type: Any) -> Array:
    wanted = data_type.as_numpy()
    if wanted.kind in "iu" and t.dtype.kind == "f":
        limits = np.iinfo(wanted)
        return np.trunc(np.clip(t, limits.min, limits.max)).astype(wanted)
    return t.astype(wanted)


def incremented(t: Array, increment: float, modulus: float) -> Array:
    change, by = np.asarray(increment).astype(t.dtype), np.asarray(modulus).astype(t.dtype)
    return np.fmod(t + change, by)


def mean(t: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    if t.dtype.kind in "iu":
        total = np.sum(t.astype(np.int64), axis=axis, keepdims=keepdims)
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


def sliced(t: Array, start: Any = None, stop: Any = None, step: Any = None, axis: Any = None) -> Array:
    given = [[v] if isinstance(v, int) else v for v in (start, stop, step, axis)]
    count = max(len(v) for v in given if v is not None)
    at = range(count) if given[3] is None else given[3]
    begin, end, by = ([None] * count if v is None else v for v in given[:3])
    cuts = [slice(None)] * t.ndim
    for a, *cut in zip(at, begin, end, by, strict=True):
        cuts[a] = slice(*cut)
    return t[tuple(cuts)]


def softmax(t: Array, axis: int) -> Array:
    """Over `axis` and everything after it."""
    over_all = tuple(range(axis % t.ndim, t.ndim))
    e = np.exp(t - t.max(axis=over_all, keepdims=True))
    return e / e.sum(axis=over_all, keepdims=True)


def picked(probs: Array, labels: Array) -> Array:
    inside = (labels >= 0) & (labels < probs.shape[-1])
    chosen = np.take_along_axis(probs, np.where(inside, labels, 0).astype(int)[..., None], -1)[..., 0]
    return np.where(inside, chosen, 0)


def counted(losses: Array, labels: Array, ignore_index: int | None, reduction: str) -> Array:
    counts = np.ones(labels.shape, bool) if ignore_index is None else labels.astype(int) != ignore_index
    losses = losses * counts
    if reduction == "none":
        return losses
    return losses.sum() / max(counts.sum(), 1) if reduction == "mean" else losses.sum()


def nll(
    probs: Array, labels: Array, ignore_index: int | None = None, reduction: str = "mean", log_prob: bool = False
) -> Array:
    p = picked(probs, labels)
    return counted(-p if log_prob else -np.log(np.maximum(p, 1e-7)), labels, ignore_index, reduction)


def fused(
    probs: Array, labels: Array, loss_grad: Any = 1.0, ignore_index: int | None = None, reduction: str = "mean"
) -> tuple[Array, Array]:
    counts = np.ones(labels.shape) if ignore_index is None else (labels.astype(int) != ignore_index).astype(float)
    hot = labels[..., None] == np.arange(probs.shape[-1])
    scale = counts / (max(counts.sum(), 1) if reduction == "mean" else 1)
    loss = counted(-np.log(picked(probs, labels) + 1e-7), labels, ignore_index, reduction)
    return loss, (probs - hot) * (np.asarray(loss_grad) * scale)[..., None]


def accumulated(t: Array, X: Array, f: Any = None) -> Array:
    return t + X if f is None else t + f * X


def gathered(t: Array, indices: Array, axis: int = 0, zero_OOR: bool = False, **hints: Any) -> Array:
    size = t.shape[axis]
    indices = indices.astype(np.int64)
    inside = (indices >= 0) & (indices < size)
    taken = np.take(t, np.where(inside, indices, 0), axis=axis)
    rows = inside.reshape((1,) * (axis % t.ndim) + inside.shape + (1,) * (t.ndim - axis % t.ndim - 1))
    return np.where(rows, taken, 0).astype(t.dtype) if zero_OOR else taken


def cut(t: Array, splits: Any, axis: int = 0) -> list[Array]:
    return np.split(t, splits if isinstance(splits, int) else np.cumsum(splits)[:-1], axis)


def flat_cross_entropy(probs: Any, labels: Any, ignore_index: int | None = None, reduction: str = "mean") -> Any:
    """The loss of torch, which has the classes on axis 1 and takes logarithms."""
    import torch

    flat = torch.nn.functional.nll_loss(
        probs.log().reshape(-1, probs.shape[-1]),
        labels.reshape(-1).long(),
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
    )
    return flat.reshape(labels.shape) if reduction == "none" else flat


def torch_function(path: str, **fixed: Any) -> Callable[..., Any]:
    """A function of torch, which is imported when it is called."""

    def call(*operands: Any, **attributes: Any) -> Any:
        import torch

        return functools.reduce(getattr, path.split("."), torch)(*operands, **fixed, **attributes)

    return call


# The rows -----------------------------------------------------------------------------------------------------------

PROBS = softmax(values("float32", (2, 3, 4)), -1)
LABELS = i32([3, 0, 2], [1, 1, 2])
SPLIT = [values("float32", shape, seed=i) for i, shape in enumerate([(2, 1, 4), (2, 3, 4), (2, 2, 4)])]
SPECIALS = f32(0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan)
BIG = 3.4e38


def doubled(x: Any, y: Any) -> Any:
    return x * 2 + y


def stepped(x: Any, y: Any) -> Any:
    return x * 0.5 + y


ELEMENTWISE = [
    unary("abs", np.abs, "Abs", over("float32 float16 int32 int8", (2, 3)), torch=torch_function("abs"),
          rules=[rule(f32(-2, 0, 2), g=f32(1, 2, 3), gives=(f32(-1, 0, 3),))]),
    unary("ceil", np.ceil, "Ceil", [*over(FLOATS, (2, 3)), sample(SPECIALS)], torch=torch_function("ceil")),
    unary("floor", np.floor, "Floor", [*over(FLOATS, (2, 3)), sample(SPECIALS)], torch=torch_function("floor")),
    unary("cos", np.cos, "Cos", torch=torch_function("cos")),
    unary("sin", np.sin, "Sin", torch=torch_function("sin")),
    unary("exp", np.exp, "Exp", inplace=True, torch=torch_function("exp"), keeps=1),
    unary("gelu", gelu, "Gelu", inplace=True, torch=torch_function("nn.functional.gelu", approximate="tanh")),
    unary("geluerf", lambda t: 0.5 * t * (1 + erf(t / math.sqrt(2))), "GeluErf", inplace=True,
          torch=torch_function("nn.functional.gelu")),
    unary("isinf", np.isinf, "IsInf", [*over(FLOATS, (2, 3)), sample(SPECIALS)], differentiable=(),
          torch=torch_function("isinf")),
    unary("isnan", np.isnan, "IsNaN", [*over(FLOATS, (2, 3)), sample(SPECIALS)], differentiable=(),
          torch=torch_function("isnan")),
    Row("isfinite", np.isfinite, [*over(FLOATS, (2, 3)), sample(SPECIALS)], "IsNaN IsInf Or Not Identity",
        "isfinite_out", adds=5, torch=torch_function("isfinite")),
    unary("log", np.log, "Log", over(FLOATS, (2, 3), low=0.2), torch=torch_function("log"), keeps=1),
    Row("log2", np.log2, over(FLOATS, (2, 3), low=0.2), "Log Log Div", "div_out", adds=4, differentiable=(0,),
        torch=torch_function("log2")),
    unary("negate", np.negative, "Neg", over("float32 float16 int32 int8", (2, 3)), keeps=0,
          torch=torch_function("neg")),
    unary("relu", lambda t: np.where(t > 0, t, 0), "Relu", over("float32 float16 int32", (2, 3)), inplace=True,
          torch=torch_function("nn.functional.relu"),
          rules=[rule(f32(-1, 0, 2), g=f32(5, 6, 7), gives=(f32(0, 0, 7),))]),
    unary("sign", lambda t: np.where(t > 0, 1, np.where(t < 0, -1, 0)).astype(t.dtype), "Sign",
          [*over(NUMBERS, (2, 3)), sample(SPECIALS)]),
    unary("sqrt", np.sqrt, "Sqrt", over(FLOATS, (2, 3), low=0.2), torch=torch_function("sqrt")),
    unary("swish", lambda t: t / (1 + np.exp(-t)), "Swish",
          [*over(FLOATS, (2, 3)), sample(f32(BIG, -BIG, 0), expect=f32(BIG, 0, 0))], inplace=True,
          torch=torch_function("nn.functional.silu")),
    unary("tanh", np.tanh, "Tanh", torch=torch_function("tanh")),
    binary("add", np.add, "Add",
           over(NUMBERS, (2, 3), (2, 3)) + over(NUMBERS, (4, 2, 3), (2, 1)) + over("float32", (2, 3), ()),
           inplace=Inplace("add_", "AddLhsInplace", "add_lhs_inplace_out"), keeps=0, torch=torch_function("add")),
    binary("sub", np.subtract, "Sub", over(NUMBERS, (2, 3), (3,)) + over("float32", (1, 3), (2, 1)), keeps=0,
           torch=torch_function("sub")),
    binary("mul", np.multiply, "Mul",
           [*over(NUMBERS, (2, 3), (3,)), *over("float32", (1, 3), (2, 1)),
            sample(f16(1.5, -2.5), f32([0.3]), expect=f16([0.45, -0.75])),
            sample(scalar(3.0, "float32"), f16(1.5, -2.5), expect=f16(4.5, -7.5), dtype="float16")],
           torch=torch_function("mul"),
           bad=[MIXED, UNFIT, bad(PopxlError, "different dtypes", values("float16", (3,)), X)]),
    binary("div", divided, "Div",
           [*over(FLOATS, (2, 3), (3,), low=0.3), *over("float32", (1, 3), (2, 1), low=0.3),
            *over("uint32", (2, 3), (3,), low=0.3),
            sample(i32(-7, 7, -7, 7, 6), i32(2, 2, -2, -2, 3)), sample(f32(1, -1, 0), f32(0, 0, 0))]),
    binary("fmod", np.fmod, "Fmod",
           [*over(FLOATS, (2, 3), (3,), low=0.3), *over("uint32", (2, 3), (3,), low=0.3),
            sample(f32(7.5, -7.5, 7.5, -7.5, 1), f32(2, 2, -2, -2, 0)), sample(i32(7, -7, 7, -7), i32(3, 3, -3, -3)),
            *over("float32", (1, 3), (2, 1), low=0.3)],
           differentiable=(0,), torch=torch_function("fmod")),
    binary("equal", np.equal, "Equal",
           [*over(ANY, (2, 3), (3,)), sample(f32(0.0, np.nan, 1), f32(-0.0, np.nan, 1)), sample(INTS, INTS)],
           differentiable=(), refused=True, bad=[UNFIT], torch=torch_function("eq")),
    binary("greater", np.greater, "Greater",
           [*over(NUMBERS, (2, 3), (3,)), sample(f32(0.0, np.nan, 2), f32(-0.0, 1, 1))],
           differentiable=(), refused=True, bad=[UNFIT], torch=torch_function("gt")),
    Row("clip", lambda t, min=-np.inf, max=np.inf: np.minimum(np.maximum(t, min), max),
        [*over(FLOATS, (2, 3), min=-0.7, max=1), *over(FLOATS, (2, 3), min=0), *over(FLOATS, (2, 3), max=0.5),
         sample(SPECIALS, min=-1, max=1), sample(SPECIALS, torch=False), sample(f16(np.inf, -np.inf, 1)),
         sample(f16(np.inf, -np.inf, 1), min=0, expect=f16(65504, 0, 1)),
         sample(f16(np.inf, -np.inf, 1), min=-1e6, max=1e6, expect=f16(65504, -65504, 1)),
         sample(i32(16777217, -5), min=0, max=2**31 - 1), sample(i32(16777217, -16777219), min=-16777217),
         sample(i32(-3, 1, 5), min=-1.5, max=2.5, expect=i32(-1, 1, 2)), sample(i32(-3, 5), expect=i32(-3, 5)),
         sample(i32(-3, 2**31 - 1), min=-1e12, max=np.float32(1e12), expect=i32(-3, 2**31 - 1)),
         sample(np.array([-100, 100], np.int8), min=np.int64(-300), max=50, expect=np.array([-100, 50], np.int8)),
         sample(u32(1, 2**32 - 1), min=-1, max=2**32 - 2, expect=u32(1, 2**32 - 2))],
        "Clip", "clip_out", aliases=("clamp",), differentiable=(0,), torch=torch_function("clip"),
        rules=[rule(f32(-2, -1, 0, 1, 2), min=-1, max=1, g=f32(1, 2, 3, 4, 5), gives=(f32(0, 0, 3, 0, 0),)),
               rule(f32(-2, 0.1, 3), min=0.1, g=f32(1, 2, 3), gives=(f32(0, 0, 3),)),
               rule(f16(np.inf, 3), max=1e6, g=f16(1, 2), gives=(f16(0, 2),))]),
    Row("increment_mod", incremented,
        [*over("float32 float16 int32 uint32", (2, 3), increment=3, modulus=4),
         sample(f32(5, -5, 10), increment=3, modulus=4.5),
         sample(i32(5, -5, 10), increment=1.7, modulus=4.2), sample(u32(2**32 - 1, 7), increment=3, modulus=5),
         sample(u32(2, 7), increment=-1, modulus=5)],
        "IncrementMod", "increment_mod_out",
        inplace=Inplace("increment_mod_", "IncrementModInplace", "increment_mod_inplace_out")),
    Row("logical_and", np.logical_and, [*over("bool", (2, 3), (3,)), *over(ANY, (2, 3), (3,), high=0),
        sample(SPECIALS, SPECIALS), sample(INTS, X)], "And", "and_out", refused=True, bad=[UNFIT],
        torch=torch_function("logical_and")),
    Row("logical_or", np.logical_or, [*over("bool", (2, 3), (3,)), *over(ANY, (2, 3), (3,), high=0),
        sample(SPECIALS, SPECIALS), sample(INTS, X)], "Or", "or_out", refused=True, bad=[UNFIT],
        torch=torch_function("logical_or")),
    Row("logical_not", np.logical_not, [*over("bool", (2, 3)), *over(ANY, (2, 3)), sample(SPECIALS)], "Not", "not_out",
        refused=True, torch=torch_function("logical_not")),
    Row("maximum", lambda *ts: functools.reduce(np.maximum, ts),
        over(NUMBERS, (2, 3), (2, 3)) + over("float32", (2, 3), (4, 1, 3), (1,)) + over("float32", (2, 3)), "Max",
        "maximum_out", differentiable=(0, 1, 2), bad=[MIXED, UNFIT, bad(ValueError, "at least one tensor")],
        rules=[rule(f32(1, 2, 3), f32(1, 0, 3), g=f32(5, 6, 7), gives=(f32(5, 6, 7), f32(5, 0, 7)))]),
    Row("add_n", lambda *ts: functools.reduce(np.add, ts),
        over(NUMBERS, (2, 3), (2, 3)) + over("float32", (2, 3), (4, 1, 3), (1,)) + over("float32", (2, 3)), "Sum",
        "sum_out", differentiable=(0, 1, 2), keeps=0,
        bad=[MIXED, UNFIT, bad(ValueError, "at least one tensor")]),
    Row("pow", np.power,
        [*over(FLOATS, (2, 3), (3,), low=0.3), *over("float32", (1, 3), (2, 1), low=0.3),
         sample(f32(-2, 0, 3), 2), sample(f16(-2, 0, 3), 3.0), sample(i32(-3, 2), i32(3, 4)), sample(i32(-3, 2), 2),
         sample(f32(0, -1, -8), f32(0, 0.5, 3)), sample(values("float32", (2, 3), low=0.3), f32([2], [3]))],
        "Pow", "pow_out", differentiable=(0, 1), numbers=(1,), torch=torch_function("pow"),
        bad=[MIXED, UNFIT, bad(PopxlError, "different dtypes, int32 and float32", INTS, 2.5),
             bad(PopxlError, "different dtypes, float32 and int32", X, [1, 2, 3])],
        rules=[rule(f32(0, 2, 0), f32(0, 0, 2), g=f32(1, 1, 1),
                    gives=(f32(0, 0, 0), f32(0, math.log(2), 0)))]),
    Row("where", np.where,
        [sample(values("bool", (2, 3)), X, Y, dtype="float32"),
         sample(values("bool", (2, 3)), INTS, i32(1, 2, 3), dtype="int32"),
         sample(values("bool", (2, 1)), values("float16", (3,)), values("float16", (4, 1, 1)), dtype="float16"),
         sample(values("bool", (2, 3)), values("bool", (3,)), values("bool", (3,), seed=1)),
         sample(i32(0, -1, 2), X, Y, dtype="float32"), sample(SPECIALS, SPECIALS, -SPECIALS)],
        "Where", "where_out", differentiable=(1, 2), torch=lambda c, x, y: torch_function("where")(c != 0, x, y),
        bad=[bad(PopxlError, "different dtypes, float32 and int32", values("bool", (2, 3)), X, INTS),
             bad(PopxlError, "do not broadcast", values("bool", (2,)), X, X)]),
    Row("scaled_add", lambda X, Y, a=1.0, b=1.0: a * X + b * Y,
        [*over("float32 float16 int32 uint32", (2, 3), (2, 3)), sample(X, X * 3, 0.5, -2), sample(X, X + 1, b=2),
         sample(X, X - 1, f32(0.5), scalar(3, "float32")), sample(X, X * 2, 2.0, scalar(0.5, "float16")),
         sample(X, X * 2, f32(3.0), 1), sample(values("float16", (2,)), values("float32", (2,)), 0.3, 0.7),
         sample(values("float32", (2,)), values("float16", (2,)), b=f16(0.5)),
         sample(f16(60000), f16(50000), 2, -2, expect=f16(20000)),  # the terms are beyond float16
         sample(i32(2**30 + 1, 5), i32(2**30 - 3, 6))],
        "ScaledAdd", "scaled_add_out", numbers=(2, 3),
        inplace=Inplace("scaled_add_", "ScaledAddLhsInplace", "scaled_add__{0}")),
]  # fmt: skip

CONVERT = [
    Row("cast", converted,
        [sample(f32(2.7, -2.7, 0.5, 300, -5, 1e10, -1e10, 0), data_type=to) for to in
         (popxl.int32, popxl.uint8, popxl.int8, popxl.int16, popxl.uint16, popxl.uint32, popxl.bool, popxl.float32)]
        + [sample(f32(2.7, 1 / 3, 65519, 2049, 6e-8), data_type=popxl.float16, dtype="float16")]
        + [sample(f16(2.7, -2.7, 300, np.inf), data_type=to, dtype="float32")
           for to in (popxl.uint8, popxl.uint32, popxl.bool, popxl.float32)]
        + [sample(i32(300, -1, 0, 2**31 - 1), data_type=to, dtype="float32")
           for to in (popxl.uint8, popxl.int8, popxl.uint32, popxl.bool, popxl.float32)]
        + [sample(i32(300, -1), data_type=popxl.float16, dtype="float16")]
        + [sample(np.array([True, False]), data_type=to, dtype="float32") for to in (popxl.int8, popxl.float32)]
        + [sample(f32(np.nan, 0), data_type=popxl.bool, expect=np.array([True, False]))],
        "Cast", "{0}_int32", differentiable=(0,), tolerance=0, steps=True,
        rules=[rule(f16(1, 2), data_type=popxl.float32, g=f32(0.1, 3), gives=(f16(0.1, 3),)),
               rule(f32(1, 2), data_type=popxl.float32, g=f32(1, 3), gives=(f32(1, 3),)),
               rule(f32(1, 2), data_type=popxl.float16, g=f16(0.1, 3), gives=(f32(np.float16(0.1), 3),))],
        bad=[bad(TypeError, "float8_143; float8 is converted with a scale", X, data_type=popxl.float8_143),
             bad(TypeError, "float8_152", X, data_type=popxl.float8_152),
             bad(TypeError, "`data_type` must be a popxl dtype", X, data_type=np.float16)]),
    Row("detach", lambda t: t, over(ANY, (2, 3)), "Detach", "detach_out", tolerance=0,
        inplace=Inplace("detach_", "DetachInplace", "detach_out", view=True)),
    Row("identity", lambda t, output_name=None: t, over(ANY, (2, 3)) + [sample(X, "renamed"), sample(X, "")],
        "Identity", "identity_{0}", aliases=("rename",), differentiable=(0,), keeps=0, tolerance=0),
    Row("ipu_copy", lambda t, destination, source=None: t, over(ANY, (2, 3), destination=1, source=0), "IpuCopy",
        "{0}_c1", tolerance=0, differentiable=(0,),
        bad=[bad(ValueError, r"Could not infer the ipu.*Please specify `source`", X, 1)]),
    Row("io_tile_copy", lambda t: t, over(ANY, (2, 3)), "IoTileCopy", "{0}_iotilecopy", tolerance=0),
]  # fmt: skip

REDUCE = [
    reduction("sum", lambda t, axis, keepdims: np.sum(t, axis=axis, keepdims=keepdims, dtype=t.dtype), keeps=0),
    reduction("mean", mean, "float32 float16 int32 int8", keeps=0,
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
              rules=[rule(f32([0, 0], [3, 4]), axis=1, g=f32(1, 5), gives=(f32([np.nan, np.nan], [3, 4]),))]),
    reduction("logsum", lambda t, axis, keepdims: np.log(np.sum(t, axis=axis, keepdims=keepdims)), FLOATS, low=0.2),
    reduction("logsumexp", logsumexp, FLOATS),
    reduction("median", median, result="median_out", adds=2,
              rules=[rule(f32(4, 1, 3, 2), g=np.float32(5), gives=(f32(0, 0, 0, 5),))]),
    Row("lamb_square", lambda t: np.sum(np.square(t.astype(np.float32))),
        [sample(values(dtype, shape), dtype="float32") for dtype in FLOATS.split() for shape in ((2, 3), ())]
        + [sample(f16(300, 300), expect=np.float32(180000), dtype="float32")], "LambSquare", "lamb_square_out"),
]  # fmt: skip

SHAPE = [
    Row("reshape", lambda t, shape: t.reshape(shape),
        [*over(ANY, (2, 6), shape=(3, 4)), *over("float32", (2, 6), shape=[-1, 3]), *over("float32", (), shape=(1, 1)),
         *over("float32", (1,), shape=())],
        "Reshape", "{0}_reshaped", differentiable=(0,), keeps=0, tolerance=0,
        inplace=Inplace("reshape_", "ReshapeInplace", "{0}_reshaped", view=True),
        bad=[bad(ValueError, r"Invalid shape value in reshape.*\(0, 4\)", X, (0, 4)),
             bad(ValueError, r"Invalid shape value in reshape.*\[-2, 3\]", X, [-2, 3]),
             bad(ValueError, r"Reshape shape can contain at most one '-1' value.*\(-1, -1\)", X, (-1, -1)),
             bad(PopxlError, r"a tensor of 6 elements cannot have the shape \(2, 4\)", X, (2, 4)),
             bad(PopxlError, r"cannot have the shape \(4, -1\)", X, (4, -1)),
             bad(TypeError, r"^reshape: `shape` must be a sequence of integers; got 6 \(int\)", X, 6),
             bad(TypeError, r"^reshape: `shape` must hold integers; got 2\.0 \(float\)", X, (2.0, 3))]),
    Row("flatten", lambda t: t.reshape(-1), over(ANY, (2, 3)) + over("float32", ()), "Reshape", "{0}_reshaped",
        differentiable=(0,), keeps=0, tolerance=0, torch=torch_function("ravel"),
        inplace=Inplace("flatten_", "ReshapeInplace", "{0}_reshaped", view=True)),
    Row("squeeze", lambda t, axes=None: np.squeeze(t, None if axes is None else tuple(axes)),
        [*over(ANY, (1, 2, 1, 3)), *over("float32", (1, 2, 1, 3), axes=[-2]),
         *over("float32", (1, 2, 1, 3), axes=[2, 0]),
         *over("float32", (2, 3)), *over("float32", (2, 1), axes=[])],
        "Reshape", "{0}_reshaped", differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "names a dimension twice", values("float32", (1, 2)), [0, -2]),
             bad(ValueError, "no dimension 1 of size 1", values("float32", (1, 2)), [1]),
             bad(ValueError, "no dimension 2 of size 1", values("float32", (1, 2)), [2]),
             bad(ValueError, "no dimension -1 of size 1", values("float32", (1, 2)), [-3])]),
    Row("transpose", lambda t, permutation=None: np.transpose(t, permutation or None),
        [*over(ANY, (2, 3, 4)), *over("float32", (2, 3, 4), permutation=(2, 0, 1)),
         *over("float32", (2, 3, 4), permutation=[0, 2, 1]), *over("float32", (2, 3), permutation=()),
         *over("float32", ())],
        "Transpose", "{0}_T", differentiable=(0,), keeps=0, tolerance=0,
        inplace=Inplace("transpose_", "TransposeInplace", "{0}_T", view=True),
        bad=[bad(ValueError, r"Values in permutation must be less than.*rank 4.*\(7, 9\)",
                 values("float32", (2, 3, 1, 4)), (0, 7, 2, 9)),
             bad(PopxlError, "does not name all 2 dimensions", X, (0,)),
             bad(ValueError, "each dimension", X, (0, 0)), bad(ValueError, "each dimension", X, (0, -1))]),
    Row("slice", sliced,
        [*over(ANY, (5, 3), start=1, stop=4), *over("float32", (6,), start=-2, step=-1),
         *over("float32", (6,), stop=3, step=-1), *over("float32", (5, 3), start=[1, None], stop=[None, 2]),
         *over("float32", (8, 3, 4), start=[0, 5], stop=[2, 2], step=[1, -1], axis=[2, 0]),
         *over("float32", (5, 3), start=-100, stop=100, axis=-1), *over("float32", (5, 3), step=[-1], axis=[1]),
         *over("float32", (5, 3), start=[None], stop=[None]), *over("float32", (4,), stop=-1),
         *over("float32", (4,), start=3, stop=1, step=-1)],
        "Slice", "slice_out", differentiable=(0,), keeps=0, tolerance=0,
        inplace=Inplace("slice_", "SliceInplace", "slice_out", view=True),
        bad=[bad(ValueError, "different lengths.*'start': 1, 'stop': 2", X, [0], [1, 2]),
             bad(PopxlError, "axis 2 does not exist", X, 0, 1, None, 2),
             bad(PopxlError, "axis 2 does not exist", X, [0, 0, 0]),
             bad(ValueError, r"names a dimension twice: \(1, -1\)", X, [0, 0], [1, 2], None, [1, -1]),
             bad(ValueError, "steps are 1 or -1", X, 0, 2, 2), bad(ValueError, "steps are 1 or -1", X, 0, 2, 0)]),
    Row("subsample", lambda t, strides: t[tuple(slice(None, None, s) for s in np.atleast_1d(strides))],
        [*over(ANY, (5, 3), strides=2), *over("float32", (5, 4), strides=[2, 3]),
         *over("float32", (5, 4), strides=(1, 9)),
         *over("float32", (5, 4), strides=np.array([3, 1])), *over("float32", (5, 4), strides=[])],
        "Subsample", "subsample_out", differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "3 entries for a tensor of rank 2", X, [1, 1, 1]),
             bad(PopxlError, "contains 0", X, [1, 0]),
             bad(ValueError, "negative entries", X, -1)]),
    Row("split", cut,
        [*over(ANY, (6, 2), splits=3), *over("float32", (2, 6, 1), splits=[1, 3, 2], axis=1),
         *over("float32", (2, 6), splits=2, axis=-1), *over("float32", (2, 3), splits=[2])],
        "Split", "{0}_split_0 {0}_split_1 {0}_split_2", differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "cannot be cut into 2 equal parts", X, 2, 1), bad(ValueError, "into 0 equal parts", X, 0),
             bad(PopxlError, r"the parts \(1, 1\) do not add up", X, [1, 1], 1),
             bad(PopxlError, "axis 2 does not exist", X, [1, 1], 2),
             bad(PopxlError, "axis -3 does not exist", X, 2, -3),
             bad(PopxlError, "rank 0", scalar(1, "float32"), 2)]),
    Row("concat", lambda ts, axis=0: np.concatenate(ts, axis),
        [sample([values(d, (2, 3)), values(d, (1, 3)), values(d, (2, 3), seed=1)]) for d in ANY.split()]
        + [sample(SPLIT, axis=1), sample(SPLIT, axis=-2), sample([X]), sample((Y, Y))],
        "Concat", "concat_out", differentiable=(0, 1, 2), keeps=0, tolerance=0,
        torch=lambda ts, axis=0: torch_function("cat")(ts, dim=axis),
        inplace=Inplace("concat_", "ConcatInplace", "concat_out", view=True),
        bad=[bad(TypeError, "^All inputs to a concat operation must have the same type", [X, INTS]),
             bad(ValueError, "at least one tensor", []), bad(PopxlError, "differ in more than dimension 0", [X, Y]),
             bad(PopxlError, "differ in more than dimension 1", [X, values("float32", (3, 3))], 1),
             bad(PopxlError, "axis 2 does not exist", [X, X], 2), bad(PopxlError, "axis -3 does not exist", [X, X], -3),
             bad(PopxlError, "rank 0", [scalar(1, "float32")])]),
    Row("gather", gathered,
        [*(sample(values(d, (4, 3)), i32(3, 0, 3)) for d in ANY.split()), sample(X, i32([0, 2], [1, 1]), axis=1),
         sample(values("float32", (2, 3, 4)), u32(2, 0), axis=-2), sample(X, scalar(1, "int32")),
         sample(X, i32(1, 7, -1, 0), zero_OOR=True), sample(X, u32(1, 2**32 - 1), zero_OOR=True),
         sample(X, i32([-1, 2]), axis=1, zero_OOR=True, available_memory_proportion=0.3),
         sample(values("float32", (300, 1)), np.array([255, 3], np.uint8), zero_OOR=True)],
        "Gather", "gather_out", differentiable=(0,), tolerance=0,
        rules=[rule(f32(1, 2, 3), i32(0, 2, 0), g=f32(1, 2, 3), gives=(f32(4, 0, 2), None)),
               rule(f32(1, 2, 3), i32(-1, 1, 9), zero_OOR=True, g=f32(1, 2, 3), gives=(f32(0, 2, 0), None))],
        bad=[bad(PopxlError, "axis 2 does not exist", X, i32(0), 2), bad(PopxlError, "axis -3", X, i32(0), -3),
             bad(PopxlError, "rank 0", scalar(1, "float32"), i32(0))]),
]  # fmt: skip

NN = [
    Row("matmul", lambda lhs, rhs, **hints: np.matmul(lhs, rhs),
        [*over("float32 float16 int32", (2, 3), (3, 4)), *over("float32", (3,), (3,)),
         *over("float32", (3,), (2, 3, 4)),
         *over("float32", (2, 3, 4), (4,)), *over("float32", (3,), (3, 4)), *over("float32", (2, 1, 2, 3), (4, 3, 2)),
         sample(values("float16", (2, 3)), values("float16", (3, 4)), output_type=popxl.float32, dtype="float32"),
         sample(X, values("float32", (3, 4)), output_type=popxl.float16, partials_type=popxl.float16, dtype="float16"),
         sample(X, values("float32", (3, 4)), available_memory_proportion=0.1, partials_type=popxl.float32)],
        "MatMul", "matmul_out", differentiable=(0, 1), keeps=2, torch=torch_function("matmul"),
        bad=[bad(PopxlError, r"inner dimensions differ; expected `rhs` to have 3 rows, and it has 2.*"
                 r"`lhs` is f32\[2, 3\], `rhs` is f32\[2, 3\]", X, X),
             bad(PopxlError, "scalar", X, scalar(1, "float32")), bad(PopxlError, "scalar", scalar(1, "float32"), X),
             bad(PopxlError, "different dtypes", X, INTS.reshape(3, 2)),
             bad(PopxlError, "do not broadcast", values("float32", (2, 2, 3)), values("float32", (4, 3, 2))),
             bad(TypeError, "`output_type` must be a popxl dtype", X, X.T.copy(), output_type=np.float16),
             bad(ValueError, "expected popxl.float16 or popxl.float32", X, X.T.copy(), partials_type=popxl.int32)]),
    Row("softmax", softmax,
        [*over(FLOATS, (2, 3), axis=-1), *over(FLOATS, (2, 3, 4), axis=1), *over("float32", (2, 3), axis=0),
         *over("float32", (3,), axis=0), sample(f32(1000, 0, 1000), axis=0), sample(f16(60000, 0, 60000), axis=0)],
        "Softmax", "softmax_out", differentiable=(0,),
        bad=[bad(PopxlError, "axis 2 does not exist", X, 2), bad(PopxlError, "axis -3 does not exist", X, -3)]),
    Row("nll_loss", nll,
        [*(sample(PROBS, LABELS, reduction=r, ignore_index=ignored)
           for r in ("mean", "sum", "none") for ignored in (None, 1, -100)),
         sample(PROBS.astype(np.float16), LABELS.astype(np.uint32)),
         sample(PROBS, LABELS.astype(np.uint32), ignore_index=-100),
         sample(PROBS.astype(np.float16), LABELS.astype(np.int8), reduction="none"),
         sample(np.log(PROBS), LABELS, log_prob=True), sample(PROBS, i32([9, -1, 2], [1, 1, 2]), torch=False),
         sample(PROBS, LABELS * 0 + 1, ignore_index=1, torch=False), sample(PROBS[0, 0], scalar(2, "int32")),
         sample(values("float32", (2, 300), low=0.1), np.array([200, 44], np.uint8), reduction="none"),
         sample(f16([0, 1]), i32(0), expect=np.float16(-math.log(6.104e-5))),
         sample(f32([0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]), i32(0, 1, 2), expect=np.float32(0.475705)),
         sample(f32([0, 1]), i32(0), expect=np.float32(16.1181))],
        "Nll", "loss", differentiable=(0,), tolerance=4e-6,
        torch=lambda probs, labels, log_prob=False,
        **how: flat_cross_entropy(probs.exp() if log_prob else probs, labels, **how),
        rules=[rule(f32([1e-9, 1], [0, 1]), i32(0, 0), g=np.float32(1), reduction="sum",
                    gives=(f32([-1e9, 0], [-1e10, 0]), None)),
               rule(f16([1e-5, 1]), i32(0), g=np.float16(1), gives=(f16([-1 / 6.104e-5, 0]), None)),
               rule(f32([0.5, 0.5]), i32(7), g=np.float32(1), gives=(f32([0, 0]), None))],
        bad=[bad(ValueError, "`reduction` is 'max'; expected 'mean', 'sum' or 'none'", PROBS, LABELS, reduction="max"),
             bad(PopxlError, "one dimension, the classes, more than `labels`", PROBS, i32(1, 2)),
             bad(PopxlError, "one dimension", scalar(1, "float32"), scalar(1, "int32")),
             bad(PopxlError, "labels are integers; these are float32", PROBS, LABELS.astype(np.float32))]),
    Row("nll_loss_with_softmax_grad", fused,
        [*(sample(PROBS, LABELS, loss_grad=3, reduction=r, ignore_index=ignored)
           for r in ("mean", "sum", "none") for ignored in (None, 1, -100)),
         sample(PROBS, LABELS, values("float32", (2, 3)), reduction="none"), sample(PROBS, LABELS.astype(np.uint32)),
         sample(PROBS.astype(np.float16), LABELS, scalar(64, "float32")), sample(PROBS, i32([9, -1, 2], [1, 1, 2])),
         sample(PROBS, LABELS * 0 + 1, ignore_index=1)],
        "NlllWithSoftmaxGradDirect", "loss dx", adds=3, numbers=(2,), tolerance=4e-6,
        bad=[bad(ValueError, "`reduction` is 'max'", PROBS, LABELS, reduction="max"),
             bad(PopxlError, "one dimension, the classes, more than `labels`", PROBS, i32(1, 2))]),
]  # fmt: skip

VAR_UPDATES = [
    Row("accumulate_", accumulated,
        [*over("float32 float16 int32 uint32", (2, 3), (2, 3)), sample(X, X * 3, 0.5), sample(X, X * 3, f32(0.5)),
         sample(X, values("float16", (2, 3)), scalar(0.5, "float16")),
         sample(values("float16", (2, 3)), X), sample(values("float16", (2, 3)), X, 0.1),
         sample(f32(1, 2), f32(np.inf, np.nan), 0, expect=f32(1, 2))],
        "Accumulate", "accumulate__{0}", overwrites=True, numbers=(2,),
        bad=[bad(PopxlError, "the same shape; nothing is broadcast", X, Y)]),
    Row("copy_var_update_", lambda t, X: X, over(ANY, (2, 3), (2, 3)), "CopyVarUpdate", "updated__{0}", overwrites=True,
        tolerance=0, bad=[bad(PopxlError, "the same shape; nothing is broadcast", X, Y), MIXED]),
]  # fmt: skip


def stored(t: Any) -> Any:
    ops.host_store(popxl.d2h_stream(t.shape, t.dtype, "passed"), t)
    return t


def called(*operands: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(doubled, *operands)
    return ops.call(graph, *operands)[0]


def called_with_info(*operands: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(doubled, *operands)
    return ops.call_with_info(graph, *operands).outputs[0]


def repeated(x: Any, y: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(stepped, x, y)
    return ops.repeat(graph, 3, x, y)[0]


def repeated_with_info(x: Any, y: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(stepped, x, y)
    return ops.repeat_with_info(graph, 3, x, y).outputs[0]


GRAPHS = [
    Row("host_load", lambda stream, name=None: stream, [sample(Fed(values(d, (2, 3)))) for d in ANY.split()]
        + [sample(Fed(X), "x"), sample(Fed(scalar(2, "float32")))],
        "Init HostLoad", "{0}_hostload", adds=2, tolerance=0),
    Row("host_store", lambda t: t, over(ANY, (2, 3)), "HostStore", "", adds=0, tolerance=0, build=stored),
    Row("init", lambda shape, dtype, *how: np.zeros(shape, dtype.as_numpy()),
        [sample((2, 3), popxl.float32, dtype="float32"), sample([], popxl.int32),
         sample((4,), popxl.bool, "acc", "zero")],
        "Init", "t", bad=[bad(ValueError, "expected 'zero' or 'undef'", (2,), popxl.float32, "acc", "one")]),
    Row("print_tensor", lambda t, title=None, **style: t, over(ANY, (2, 3), title="shown"), "PrintTensor", "print_out",
        differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "`separator` must be a single character; got ', '", X, separator=", "),
             bad(ValueError, "`open_bracket`", X, open_bracket=""),
             bad(ValueError, "`close_bracket`", X, close_bracket="))"),
             bad(KeyError, "`float_format` is 'short'", X, float_format="short")]),
    Row("call", doubled, over("float32 float16 int32", (2, 3), (3,)), "Call", "add_out", build=called,
        differentiable=(0, 1), keeps=0, colocated=False),
    Row("call_with_info", doubled, over("float32", (2, 3), (3,)), "Call", "add_out", build=called_with_info,
        colocated=False),
    Row("repeat", lambda x, y: stepped(stepped(stepped(x, y), y), y), over(FLOATS, (2, 3), (3,)), "Loop", "add_out",
        build=repeated, colocated=False),
    Row("repeat_with_info", lambda x, y: stepped(stepped(stepped(x, y), y), y), over("float32", (2, 3), (3,)), "Loop",
        "add_out", build=repeated_with_info, colocated=False),
]  # fmt: skip

ROWS: Iterable[Row] = [*ELEMENTWISE, *CONVERT, *REDUCE, *SHAPE, *NN, *VAR_UPDATES, *GRAPHS]
