"""Functions and arithmetic on each number by itself; dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.poptorch.operators import Row, normal, positive, whole

_UNARY = (
    "abs asinh atan ceil clone cos cosh deg2rad detach exp exp2 expm1 floor frac neg positive rad2deg relu round sgn "
    "sigmoid sign sin sinc sinh square tan tanh trunc"
).split()
_OF_POSITIVE = ("log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sqrt")
_WITHIN_ONE = ("acos", "asin", "atanh")
_BINARY = "add sub mul div atan2 copysign fmod hypot logaddexp logaddexp2 remainder rsub".split()
_OF_INTEGERS = (
    "exp",
    "abs",
    "neg",
    "sign",
    "sgn",
    "square",
    "reciprocal",
    "ceil",
    "floor",
    "round",
    "trunc",
    "positive",
)

_ODD = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 2.5, -2.5])
_SIGNED = torch.tensor([-7, -4, 0, 3, 5])
_DIVISORS = torch.tensor([2, -3, 4, -2, 3])


def call(name: str) -> Callable[..., Any]:
    """The function of torch of that name."""
    return lambda *operands: getattr(torch, name)(*operands)


class _Swish(torch.autograd.Function):
    """A function that brings its own derivative, which is that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        x, gate = ctx.saved_tensors
        return g * (gate + x * gate * (1 - gate))


def _half_frozen(x: torch.Tensor) -> torch.Tensor:
    """Gradients flow through one factor."""
    with torch.no_grad():
        frozen = x.exp().neg()
    return x * frozen + x * x.tanh().detach()


def _converted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x.to(torch.int64),
        x.half(),
        x.float(),
        x.double(),
        x.int(),
        x.short(),
        x.char(),
        x.bool(),
        x.type_as(x.int()),
        x.type(torch.FloatTensor),
        x.abs().byte(),
    )


def _in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (x * 1).mul_(y).add_(1).sub_(y, alpha=0.5).div_(2).neg_()
    z += y
    z *= 2
    z -= x
    z /= y
    return z.addcmul_(y, y, value=0.5).lerp_(y, 0.25).tanh_()


def _at_zero(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where JAX's gradient is another than PyTorch's."""
    return torch.atan2(x, y), torch.copysign(x, y), x.abs(), torch.sinc(x)


ROWS = [
    *(Row(name, call(name), (normal(2, 3),)) for name in _UNARY),
    *(Row(name, call(name), (positive(2, 3),)) for name in _OF_POSITIVE),
    *(Row(name, call(name), (normal(2, 3).tanh(),)) for name in _WITHIN_ONE),
    Row("acosh", torch.acosh, (positive(2, 3) + 1,)),
    *(Row(f"{name} of integers", call(name), (whole(4) + 1,)) for name in _OF_INTEGERS),
    Row("sign of bools", torch.sign, (torch.tensor([True, False]),)),
    Row("angle", torch.angle, (normal(2, 3),)),
    Row("round to decimals", lambda x: (x.round(decimals=1), x.mul(100).round(decimals=-1)), (normal(2, 3),)),
    Row("nan_to_num", torch.nan_to_num, (_ODD,)),
    Row("nan_to_num, given", lambda x: x.nan_to_num(nan=1.5, posinf=2.5, neginf=-3.5), (_ODD,)),
    Row("nan_to_num of integers", torch.nan_to_num, (whole(3),)),
    Row("frexp", torch.frexp, (normal(2, 3),)),
    Row("isnan, isinf, isfinite", lambda x: [torch.isnan(x), torch.isinf(x), torch.isfinite(x)], (_ODD,)),
    Row("isposinf, isneginf", lambda x: [torch.isposinf(x), torch.isneginf(x), torch.isreal(x)], (_ODD,)),
    Row("signbit", torch.signbit, (_ODD,)),
    Row("signbit of integers", torch.signbit, (_SIGNED,)),
    *(Row(name, call(name), (normal(2, 3), normal(3))) for name in _BINARY),
    *(Row(f"{name} of mixed dtypes", call(name), (normal(2, 3), whole(3) + 1)) for name in _BINARY[:5]),
    *(
        Row(f"{name} with a number", call(name), (whole(3), 2.5))
        for name in ("add", "sub", "mul", "div", "fmod", "rsub")
    ),
    Row("two dtypes", lambda x, y: x.half() * y, (normal(2, 3), normal(3)), tolerance=1e-3),
    Row("a number and a tensor", lambda x: (1 - x, 2 / x), (positive(2, 3),)),
    Row("remainder of a number", lambda x: (3 % x, torch.remainder(2, x)), (positive(2, 3),), gradient=False),
    Row(
        "add, sub, rsub: alpha",
        lambda x, y: (torch.add(x, y, alpha=2), x.sub(y, alpha=0.5), torch.rsub(x, y, alpha=3)),
        (normal(3), normal(3)),
    ),
    Row("add and mul of bools", lambda x, y: (x + y, x * y), (torch.tensor([True, False]), torch.tensor([True, True]))),
    Row("in place", _in_place, (positive(2, 3), positive(3))),
    Row("at zero", _at_zero, (torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, -1.0, 0.0]))),
    Row(
        "floor division",
        lambda x, y: (x // y, torch.floor_divide(x, y), x.div(y, rounding_mode="floor")),
        (_SIGNED, _DIVISORS),
    ),
    Row("truncated division", lambda x, y: x.div(y, rounding_mode="trunc"), (_SIGNED, _DIVISORS)),
    Row("remainders of integers", lambda x, y: (x % y, torch.fmod(x, y)), (_SIGNED, _DIVISORS)),
    Row("floor division of floats", lambda x: (x // 0.75, x // -0.75), (normal(2, 3),), gradient=False),
    Row("division by zero, rounded", lambda x: torch.div(x, 0.0, rounding_mode="floor"), (normal(2, 3),)),
    Row("truncated division of floats", lambda x: torch.div(x, 0.75, rounding_mode="trunc"), (normal(2, 3),)),
    Row("ldexp", torch.ldexp, (normal(2, 3), whole(3))),
    Row(
        "gcd, lcm", lambda x, y: (torch.gcd(x, y), torch.lcm(x, y)), (torch.tensor([4, 6, -9]), torch.tensor([6, 9, 3]))
    ),
    Row("nextafter", torch.nextafter, (normal(2, 3), normal(3)), half=False),
    *(Row(f"pow {e}", lambda x, e=e: x**e, (positive(2, 3),)) for e in (0, 0.5, 1, 2, 3, -1, -2, 2.5)),
    Row("pow of negative numbers", lambda x: (x**2, x**3, x**-1), (normal(2, 3),)),
    Row("pow of a number", lambda x: 2.0**x, (normal(2, 3),)),
    Row("pow of tensors", torch.pow, (positive(2, 3), normal(3))),
    Row("pow at zero", lambda x: (x**2, x**1, x**0, x**3), (torch.zeros(3),)),
    Row(
        "pow of integers",
        lambda x, y: (x**2, x**3, x**y, 2**y, x**0.5, y**-1.0),
        (torch.tensor([1, 2, 3]), torch.tensor([3, 1, 4])),
    ),
    Row(
        "pow of integers, negative exponents", torch.pow, (torch.tensor([1, -1, -1, 3]), torch.tensor([-2, -2, -3, -1]))
    ),
    Row("float_power", lambda x: (torch.float_power(x, 2), torch.float_power(3, x)), (positive(2, 3),)),
    Row(
        "addcmul, addcdiv",
        lambda x, y, z: (torch.addcmul(x, y, z, value=0.5), x.addcdiv(y, z), x.addcmul(y, z)),
        (normal(2, 3), normal(3), positive(2, 1)),
    ),
    Row("addcmul of integers", torch.addcmul, (whole(3), whole(3, seed=1), whole(3, seed=2))),
    Row(
        "lerp",
        lambda x, y, w: (torch.lerp(x, y, 0.25), x.lerp(y, 0.75), x.lerp(y, w)),
        (normal(2, 3), normal(2, 3, seed=1), normal(3)),
    ),
    Row("to", lambda x: x.to(torch.int64) + x.half(), (normal(2, 3),)),
    Row("conversions", _converted, (normal(2, 3) * 3,)),
    Row(
        "conversions of what does not fit",
        lambda x, b: (x.int(), x.to(torch.uint8), x.char(), x.short(), b.copy_(x)),
        (torch.tensor([300.0, -1.5, 70000.0, 3e9, -3e9, math.nan, math.inf]), torch.zeros(7, dtype=torch.uint8)),
        half=False,
    ),
    Row("copy_", lambda x, y: x.copy_(y), (normal(2, 3), normal(3))),
    Row("autograd function", lambda x: _Swish.apply(x * 2) * x, (normal(2, 3),)),
    Row("no_grad, detach", _half_frozen, (normal(2, 3),)),
    Row("fake_quantize", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, -2, 6), (normal(4, 5),)),
    *(
        Row(
            f"fake_quantize by a tensor, enabled {enabled}",
            lambda x, scale, zero, enabled=enabled: torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                x, scale.detach(), zero, torch.tensor([enabled]), -2, 6
            ),
            (normal(4, 5), torch.tensor([0.25]), torch.tensor([3], dtype=torch.int32)),
            half=False,
        )
        for enabled in (0, 1)
    ),
    *(
        Row(
            f"fake_quantize that is learnt, {title}",
            lambda x, scale, zero, function=function, axis=axis: function(x, scale, zero, *axis, -3, 4, 0.5),
            (normal(4, 3), scale, zero),
            half=False,
        )
        for title, function, axis, scale, zero in (
            (
                "of a tensor",
                torch._fake_quantize_learnable_per_tensor_affine,
                (),
                torch.tensor([0.25]),
                torch.tensor([1.2]),
            ),
            (
                "of channels",
                torch._fake_quantize_learnable_per_channel_affine,
                (1,),
                torch.tensor([0.25, 0.5, 0.125]),
                torch.tensor([0.0, -1.3, 9.0]),
            ),
        )
    ),
    Row(
        "fake_quantize of channels",
        lambda x, scale, zero: torch.fake_quantize_per_channel_affine(x, scale.detach(), zero, 1, 0, 7),
        (normal(4, 3), torch.tensor([0.25, 0.5, 0.125]), torch.tensor([0, 3, 1], dtype=torch.int32)),
        half=False,
    ),
    Row(
        "bytes beside numbers that are none",
        lambda x: (x / -3, 300 / x, torch.xlogy(x, 300), x / torch.tensor(-300), torch.copysign(x, torch.tensor(-3))),
        (whole(3, 4, high=255).to(torch.uint8) + 1,),
        half=False,
    ),
]
