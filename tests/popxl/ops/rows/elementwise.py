"""Rows of elementwise arithmetic and logic, and of `scaled_add`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    ANY,
    FLOATS,
    INTEGERS,
    INTS,
    LIMITS,
    MIXED,
    NUMBERS,
    SPECIALS,
    UNFIT,
    Array,
    Inplace,
    PopxlError,
    Row,
    Sample,
    X,
    Y,
    bad,
    f16,
    f32,
    i32,
    over,
    rule,
    sample,
    scalar,
    torch_function,
    u32,
    values,
)


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
    """Arithmetic of two tensors, or of a tensor and a number."""
    settings = {"differentiable": (0, 1), "bad": [MIXED, UNFIT], "numbers": (0, 1)} | settings
    return Row(name, meaning, samples, kind, f"{name}_out", **settings)


def at_limits(other: Array | None = None) -> list[Sample]:
    """Samples of two operands: the smallest and the largest integers of each dtype, and them reversed, or `other`."""
    return [sample(limits, limits[::-1].copy() if other is None else other.astype(d)) for d, limits in LIMITS.items()]


erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(t: Array) -> Array:
    return 0.5 * t * (1 + np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))


def divided(lhs: Array, rhs: Array) -> Array:
    return np.floor_divide(lhs, rhs) if lhs.dtype.kind in "iu" else np.divide(lhs, rhs)


def incremented(t: Array, increment: float, modulus: float) -> Array:
    change, by = np.asarray(increment).astype(t.dtype), np.asarray(modulus).astype(t.dtype)
    return np.fmod(t + change, by)


BIG = 3.4e38


ELEMENTWISE = [
    unary("abs", np.abs, "Abs", over(NUMBERS, (2, 3)) + list(map(sample, LIMITS.values())), torch=torch_function("abs"),
          rules=[rule(f32(-2, 0, 2), g=f32(1, 2, 3), gives=(f32(-1, 0, 3),))]),
    unary("ceil", np.ceil, "Ceil", [*over(FLOATS, (2, 3)), sample(SPECIALS)], torch=torch_function("ceil")),
    unary("floor", np.floor, "Floor", [*over(FLOATS, (2, 3)), sample(SPECIALS)], torch=torch_function("floor")),
    unary("cos", np.cos, "Cos", torch=torch_function("cos")),
    unary("sin", np.sin, "Sin", torch=torch_function("sin")),
    unary("erf", erf, "Erf", torch=torch_function("erf")),
    unary("rsqrt", lambda t: 1 / np.sqrt(t), "Rsqrt", over(FLOATS, (2, 3), low=0.2), keeps=1,
          torch=torch_function("rsqrt")),
    unary("sigmoid", lambda t: 1 / (1 + np.exp(-t)), "Sigmoid", keeps=1, torch=torch_function("sigmoid")),
    unary("softplus", lambda t: np.log1p(np.exp(-np.abs(t))) + np.maximum(t, 0), "SoftPlus",
          [*over(FLOATS, (2, 3)), sample(f32(-1e4, 0, 1e4))], torch=torch_function("nn.functional.softplus")),
    unary("square", np.square, "Square", [*over(NUMBERS, (2, 3)), *map(sample, LIMITS.values())],
          torch=torch_function("square")),
    unary("exp", np.exp, "Exp", [*over(FLOATS, (2, 3)), sample(SPECIALS)], inplace=True, keeps=1,
          torch=torch_function("exp")),
    unary("gelu", gelu, "Gelu", [*over(FLOATS, (2, 3)), sample(f16(-3, -4), expect=gelu(np.array([-3.0, -4.0])))],
          inplace=True, torch=torch_function("nn.functional.gelu", approximate="tanh")),
    unary("geluerf", lambda t: 0.5 * t * (1 + erf(t / math.sqrt(2))), "GeluErf", inplace=True,
          torch=torch_function("nn.functional.gelu")),
    unary("isinf", np.isinf, "IsInf", [*over(FLOATS, (2, 3)), sample(SPECIALS), *over("int8", (2, 3))],
          differentiable=(),
          torch=torch_function("isinf")),
    unary("isnan", np.isnan, "IsNaN", [*over(FLOATS, (2, 3)), sample(SPECIALS), *over("int8", (2, 3))],
          differentiable=(),
          torch=torch_function("isnan")),
    Row("isfinite", np.isfinite, [*over(FLOATS, (2, 3)), sample(SPECIALS)], "IsNaN IsInf Or Not Identity",
        "isfinite_out", adds=5, torch=torch_function("isfinite")),
    unary("log", np.log, "Log", [*over(FLOATS, (2, 3), low=0.2), sample(SPECIALS)],
          torch=torch_function("log"), keeps=1),
    Row("log2", np.log2, over(FLOATS, (2, 3), low=0.2), "Log Log Div", "div_out", adds=4, differentiable=(0,),
        torch=torch_function("log2")),
    unary("negate", np.negative, "Neg", [*over(NUMBERS, (2, 3)), *map(sample, LIMITS.values())], keeps=0,
          torch=torch_function("neg")),
    unary("relu", lambda t: np.where(t > 0, t, 0), "Relu",
          [*over(NUMBERS, (2, 3)), sample(f32(np.nan, np.inf, -np.inf), expect=f32(np.nan, np.inf, 0))], inplace=True,
          torch=torch_function("nn.functional.relu"),
          rules=[rule(f32(-1, 0, 2), g=f32(5, 6, 7), gives=(f32(0, 0, 7),))]),
    unary("sign", lambda t: np.where(t > 0, 1, np.where(t < 0, -1, 0)).astype(t.dtype), "Sign",
          [*over(NUMBERS, (2, 3)), sample(SPECIALS)]),
    unary("sqrt", np.sqrt, "Sqrt", [*over(FLOATS, (2, 3), low=0.2), sample(SPECIALS)], keeps=1,
          torch=torch_function("sqrt")),
    unary("swish", lambda t: t / (1 + np.exp(-t)), "Swish",
          [*over(FLOATS, (2, 3)), sample(f32(BIG, -BIG, 0), expect=f32(BIG, 0, 0))], inplace=True,
          torch=torch_function("nn.functional.silu")),
    unary("tanh", np.tanh, "Tanh", torch=torch_function("tanh"), keeps=1,
          rules=[rule(f16(2.65625), g=f16(1), gives=(f16(1 - float(np.float16(np.tanh(2.65625))) ** 2),))]),
    binary("add", np.add, "Add",
           over(NUMBERS, (2, 3), (2, 3)) + over(NUMBERS, (4, 2, 3), (2, 1)) + over("float32", (2, 3), ()) + at_limits()
           + at_limits(np.array([1])) + [sample(X, 1.5), sample(INTS, 7)],
           inplace=Inplace("add_", "AddLhsInplace", "add_lhs_inplace_out"), keeps=0, torch=torch_function("add")),
    binary("sub", np.subtract, "Sub", over(NUMBERS, (2, 3), (3,)) + over("float32", (1, 3), (2, 1)) + at_limits(),
           keeps=0,
           torch=torch_function("sub")),
    binary("mul", np.multiply, "Mul",
           [*over(NUMBERS, (2, 3), (3,)), *over("float32", (1, 3), (2, 1)), *at_limits(),
            sample(f16(1.5, -2.5), f32([0.3]), expect=f16([0.45, -0.75])),
            sample(scalar(0.3, "float32"), values("bfloat16", (2, 3)), dtype="bfloat16"),
            sample(scalar(3.0, "float32"), f16(1.5, -2.5), expect=f16(4.5, -7.5), dtype="float16")],
           torch=torch_function("mul"), keeps=2,
           # The gradient of the number is finer than float16, and beyond it.
           rules=[rule(np.full(300, 0.1, np.float16), f32(1), g=np.full(300, 40, np.float16),
                       gives=(None, f32(300 * 40 * float(np.float16(0.1))))),
                  rule(f16(300, 300), f16(1), g=f16(300, -299), gives=(None, f16(300))),
                  rule(f32(8), np.full(300, 30, np.float16), g=np.full(300, 40, np.float16),
                       gives=(f32(360000), None))],
           bad=[MIXED, UNFIT, bad(PopxlError, "different dtypes", values("float16", (3,)), X)]),
    binary("div", divided, "Div",
           [*over(NUMBERS, (2, 3), (3,), low=0.3), *over("float32", (1, 3), (2, 1), low=0.3), *at_limits(np.array([3])),
            *[sample(np.array([-7, 7, -7, 7, 6], d), np.array([2, 2, -2, -2, 3], d))
             for d in ("int8", "int16", "int32")],
            sample(f32(1, -1, 0, np.inf, 1), f32(0, 0, 0, np.inf, np.inf))],
           rules=[rule(f16(3, 2, 1e-3), f16(300, 1e-3, 1e-3), g=f16(5, 1, 1e-3),  # the squares are out of range
                       gives=(f16(5 / 300, 1000, 1), f16(-1 / 6000, -np.inf, -1))),
                  rule(f32(1e30), f32(1e25), g=f32(1), gives=(f32(1e-25), f32(-1e-20)))]),
    binary("fmod", np.fmod, "Fmod",
           [*over(NUMBERS, (2, 3), (3,), low=0.3), *at_limits(np.array([3])),
            sample(f32(7.5, -7.5, 7.5, -7.5, 1), f32(2, 2, -2, -2, 0)), sample(i32(7, -7, 7, -7), i32(3, 3, -3, -3)),
            *over("float32", (1, 3), (2, 1), low=0.3)],
           differentiable=(0,), keeps=0, torch=torch_function("fmod")),
    binary("equal", np.equal, "Equal",
           [*over(ANY, (2, 3), (3,)), sample(f32(0.0, np.nan, 1), f32(-0.0, np.nan, 1)), sample(INTS, INTS),
            *at_limits()],
           differentiable=(), refused=True, bad=[UNFIT], torch=torch_function("eq")),
    binary("greater", np.greater, "Greater",
           [*over(ANY, (2, 3), (3,)), sample(f32(0.0, np.nan, 2), f32(-0.0, 1, 1)), *at_limits(),
            sample(0.5, X, torch=False)],
           differentiable=(), refused=True, bad=[UNFIT], torch=torch_function("gt")),
    *(binary(name, getattr(np, name), kind,
             [*over(ANY, (2, 3), (3,)), sample(f32(0.0, np.nan, 2), f32(-0.0, 1, 1)), *at_limits(), sample(X, 0.5)],
             differentiable=(), refused=True, torch=torch_function(short))
      for name, kind, short in (("greater_equal", "GreaterEqual", "ge"), ("less", "Less", "lt"),
                                ("less_equal", "LessEqual", "le"), ("not_equal", "NotEqual", "ne"))),
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
               rule(f16(np.inf, 3), max=1e6, g=f16(1, 2), gives=(f16(0, 2),))],
        bad=[bad(TypeError, r"^clip: `min` must be a number; got None \(NoneType\)", X, None),
             bad(TypeError, "^clip: `max` must be a number", X, max=[1.0])]),
    Row("increment_mod", incremented,
        [*over(NUMBERS, (2, 3), increment=3, modulus=4),
         *over("float32 int32", (2, 3), increment=np.float32(3), modulus=np.int64(4)),
         sample(f16(1000.5, -1000.5), increment=0.25, modulus=8),  # the sum is finer than float16
         sample(f32(5, -5, 10), increment=3, modulus=4.5),
         sample(i32(5, -5, 10), increment=1.7, modulus=4.2), sample(u32(2**32 - 1, 7), increment=3, modulus=5),
         sample(u32(2, 7), increment=-1, modulus=5)],
        "IncrementMod", "increment_mod_out",
        bad=[bad(TypeError, "`increment` must be a number", X, None, 1),
             bad(TypeError, "`modulus` must be", X, 1, "2")],
        inplace=Inplace("increment_mod_", "IncrementModInplace", "increment_mod_inplace_out")),
    Row("logical_and", np.logical_and, [*over("bool", (2, 3), (3,)), *over(ANY, (2, 3), (3,), high=0),
        sample(SPECIALS, SPECIALS), sample(INTS, X)], "And", "and_out", refused=True, bad=[UNFIT],
        numbers=(0, 1), torch=torch_function("logical_and")),
    Row("logical_or", np.logical_or, [*over("bool", (2, 3), (3,)), *over(ANY, (2, 3), (3,), high=0),
        sample(SPECIALS, SPECIALS), sample(INTS, X)], "Or", "or_out", refused=True, bad=[UNFIT],
        numbers=(0, 1), torch=torch_function("logical_or")),
    Row("logical_not", np.logical_not, [*over("bool", (2, 3)), *over(ANY, (2, 3)), sample(SPECIALS)], "Not", "not_out",
        refused=True, torch=torch_function("logical_not")),
    *(Row(f"{which}imum", lambda *ts, of=of: functools.reduce(of, ts),
        over(NUMBERS, (2, 3), (2, 3)) + over("float32", (2, 3), (4, 1, 3), (1,)) + over("float32", (2, 3))
        + at_limits() + [sample(X, 0.5, Y), sample(1, INTS)], which.capitalize(),
        f"{which}imum_out", differentiable=(0, 1, 2), numbers=(0, 1, 2),
        bad=[MIXED, UNFIT, bad(ValueError, "at least one tensor"),
             bad(TypeError, r"`ts\[0\]` must be a Tensor; got 1", 1, 2),
             bad(TypeError, "must be a Tensor; got None", X, None)],
        rules=[rule(sign * f32(1, 2, 3), sign * f32(1, 0, 3), g=f32(5, 6, 7), gives=(f32(5, 6, 7), f32(5, 0, 7)))])
      for which, of, sign in (("max", np.maximum, 1), ("min", np.minimum, -1))),
    Row("add_n", lambda *ts: functools.reduce(np.add, ts),
        over(NUMBERS, (2, 3), (2, 3)) + over("float32", (2, 3), (4, 1, 3), (1,)) + over("float32", (2, 3))
        + [sample(f16(2048), *[f16(1)] * 4, expect=f16(2052)),
           sample(f16(60000), f16(60000), f16(-60000), expect=f16(60000))],
        "Sum",
        "sum_out", differentiable=(0, 1, 2), keeps=0,
        bad=[MIXED, UNFIT, bad(ValueError, "at least one tensor")]),
    Row("pow", np.power,
        [*over(FLOATS, (2, 3), (3,), low=0.3), *over("float32", (1, 3), (2, 1), low=0.3),
         sample(f32(-2, 0, 3), 2), sample(f16(-2, 0, 3), 3.0), sample(i32(-3, 2), i32(3, 4)), sample(i32(-3, 2), 2),
         sample(f32(-2, 0, 3), np.int64(2)), sample(f16(-2, 0, 3), np.float32(3)), sample(f32(-2, 3), True),
         *[sample(limits, 3) for limits in LIMITS.values()],
         *at_limits(np.array([0, 1, 2, 3, 5])), sample(f32(-2, -2, 0, np.inf), f32(0.5, 3, -1, 0), torch=False),
         sample(f32(0, -1, -8), f32(0, 0.5, 3)), sample(values("float32", (2, 3), low=0.3), f32([2], [3]))],
        "Pow", "pow_out", differentiable=(0, 1), numbers=(1,), torch=torch_function("pow"),
        bad=[MIXED, UNFIT, bad(PopxlError, "different dtypes, int32 and float32", INTS, 2.5),
             bad(PopxlError, "different dtypes, float32 and int32", X, [1, 2, 3])],
        rules=[rule(f32(0, 2, 0), f32(0, 0, 2), g=f32(1, 1, 1),
                    gives=(f32(0, 0, 0), f32(0, math.log(2), 0)))]),
    Row("where", np.where,
        [sample(values("bool", (2, 3)), X, Y, dtype="float32"),
         *[sample(values("bool", (2, 3)), values(d, (2, 3)), values(d, (3,))) for d in INTEGERS.split()],
         *[sample(values("bool", (2, 1)), values(d, (3,)), values(d, (4, 1, 1)), dtype=d)
           for d in ("float16", "bfloat16")],
         sample(values("bool", (2, 3)), values("bool", (3,)), values("bool", (3,), seed=1)),
         sample(i32(0, -1, 2), X, Y, dtype="float32"),
         sample(values("bool", (2, 3)), X, -1, dtype="float32"), sample(values("bool", (2, 3)), 2, INTS),
         sample(SPECIALS, SPECIALS, -SPECIALS)],
        "Where", "where_out", differentiable=(1, 2), numbers=(1, 2),
        torch=lambda c, x, y: torch_function("where")(c != 0, x, y),
        bad=[bad(PopxlError, "different dtypes, float32 and int32", values("bool", (2, 3)), X, INTS),
             bad(PopxlError, "do not broadcast", values("bool", (2,)), X, X)]),
    Row("scaled_add", lambda X, Y, a=1.0, b=1.0: a * X + b * Y,
        [*over(NUMBERS, (2, 3), (2, 3)), sample(X, X * 3, 0.5, -2), sample(X, X + 1, b=2), sample(X, X, np.float32(2)),
         sample(X, X - 1, f32(0.5), scalar(3, "float32")), sample(X, X * 2, 2.0, scalar(0.5, "float16")),
         sample(X, X * 2, f32(3.0), 1), sample(values("float16", (2,)), values("float32", (2,)), 0.3, 0.7),
         sample(values("float32", (2,)), values("float16", (2,)), 1.0, f16(0.5)),
         sample(i32(2**30 + 1, 7), i32(2**29 + 1, -3), 3, -2, expect=i32(2**31 + 1 - 2**32, 27)),
         sample(f16(60000), f16(50000), 2, -2, expect=f16(20000)),  # the terms are beyond float16
         sample(i32(2**30 + 1, 5), i32(2**30 - 3, 6))],
        "ScaledAdd", "scaled_add_out", numbers=(2, 3),
        bad=[bad(PopxlError, "a number or a tensor of one element", X, X, 1.0, Y),
             bad(TypeError, "`b` must be a number or a Tensor", X, X, b="2")],
        inplace=Inplace("scaled_add_", "ScaledAddLhsInplace", "scaled_add__{0}")),
]  # fmt: skip
