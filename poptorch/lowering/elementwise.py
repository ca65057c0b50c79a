"""Elementwise ops: functions, arithmetic, dtype conversions.

Special functions are in `poptorch.lowering.special`, comparisons and choices in `poptorch.lowering.logic`, activations
in `poptorch.lowering.activations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import popxl
from poptorch.lowering.complex import sgn
from poptorch.lowering.emission import wanted
from poptorch.lowering.operands import cast_like, promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.arguments import camel
from popxl.extend.kernels import round_once, widen
from popxl.extend.ops import broadcast, like_first, predicate
from popxl.op import OpKind

Operand = popxl.Tensor | bool | int | float
Function = Callable[..., Any]

# Families -------------------------------------------------------------------------------------------------------------


def floating(t: popxl.Tensor) -> popxl.Tensor:
    """Promote integers and bools to float32, as PyTorch does for floating-point functions."""
    return t if t.dtype.is_inexact else ops.cast(t, popxl.float32)


def unary(names: str, op: Callable[..., popxl.Tensor], of_floats: bool = True) -> None:
    """Declare a unary op as a lowering, whatever PyTorch calls its operand: `input`, or `x`."""

    def lowering(**given: Any) -> popxl.Tensor:
        (name,) = (name for name, value in given.items() if isinstance(value, popxl.Tensor))
        t = given.pop(name)
        return op(floating(t) if of_floats else t, **given)

    lowers(*(f"aten.{name}" for name in names.split()))(lowering)


def binary(
    names: str,
    op: Callable[[popxl.Tensor, popxl.Tensor], popxl.Tensor],
    of_floats: bool = False,
    compares: bool = False,
) -> None:
    """Declare a binary op with operand promotion as a lowering."""

    def lowering(input: Operand, other: Operand) -> popxl.Tensor:
        return op(*promoted(input, other, are_bounds=compares, of_floats=of_floats))

    lowers(*(f"aten.{name}" for name in names.split()))(lowering)


def unary_op(name: str, function: Function, **settings: Any) -> OpKind:
    """Define an op from a JAX function of one array; float16 is computed in float32."""
    settings = dict[str, Any](shape=like_first, operands=("input",)) | settings
    return jax_op(title=camel(name.removeprefix("special_")), **settings)(round_once(function))


def binary_op(name: str, function: Function, **settings: Any) -> OpKind:
    """Define an op from a JAX function of two arrays; float16 is computed in float32."""
    return unary_op(name, function, **{"shape": broadcast, "operands": ("input", "other")} | settings)


# One operand ----------------------------------------------------------------------------------------------------------

for _name in ("exp", "log", "sqrt", "sin", "cos", "tanh"):
    unary(_name, getattr(ops, _name))
for _name in ("abs", "ceil", "floor", "isnan", "isinf"):
    unary(_name, getattr(ops, _name), of_floats=False)
unary("neg", ops.negate, of_floats=False)
unary("clone alias lift_fresh", ops.identity, of_floats=False)
unary("detach", ops.detach, of_floats=False)

for _name in ("cosh", "deg2rad", "exp2", "expm1", "log10", "log1p", "log2", "rad2deg", "sinc", "sinh", "tan"):
    unary(_name, unary_op(_name, getattr(jnp, _name)))

_OF_FLOATS: dict[str, Function] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "frac": lambda t: t - jnp.trunc(t),
    "reciprocal": lambda t: 1 / t,
    "sigmoid": jax.nn.sigmoid,
}
for _name, _function in _OF_FLOATS.items():
    unary(_name, unary_op(_name, _function))

rsqrt = unary_op("rsqrt", lambda t: 1 / jnp.sqrt(t), gradient={"input": lambda g, out: g * -0.5 * out * out * out})
unary("rsqrt", rsqrt)

_PREDICATES: dict[str, Function] = {
    "isneginf": lambda t: t == -jnp.inf,
    "isposinf": lambda t: t == jnp.inf,
    "signbit": jnp.signbit,
}
for _name, _function in _PREDICATES.items():
    unary(_name, unary_op(_name, _function, shape=predicate, gradient=None), of_floats=False)

unary("trunc", unary_op("trunc", jnp.trunc), of_floats=False)


@lowers("aten.angle")
def angle(input: popxl.Tensor) -> popxl.Tensor:
    return ops.angle(input) if input.dtype.is_complex else _angle(floating(input))


_angle = unary_op("angle", lambda t: jnp.where(jnp.isnan(t), t, jnp.where(t < 0, math.pi, 0)))


@lowers("aten.sign", "aten.sgn")
def sign(input: popxl.Tensor) -> popxl.Tensor:
    if input.dtype.is_complex:
        return sgn(input)
    return ops.identity(input) if input.dtype is popxl.bool else ops.sign(input)


@lowers("aten.round")
def round(input: popxl.Tensor, decimals: int = 0) -> popxl.Tensor:
    return _round(input, decimals=decimals) if input.dtype.is_floating_point else ops.identity(input)


def _rounded(input: Any, *, decimals: int) -> Any:
    """Round to a number of decimals, half to even."""
    if decimals < 0:  # as in PyTorch: dividing by a power of ten is not multiplying by its inverse
        return jnp.round(input / 10.0**-decimals) * 10.0**-decimals
    return jnp.round(input * 10.0**decimals) / 10.0**decimals if decimals else jnp.round(input)


_round = unary_op("round", _rounded)


@lowers("aten.nan_to_num")
def nan_to_num(
    input: popxl.Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> popxl.Tensor:
    if not input.dtype.is_inexact:
        return ops.identity(input)
    return _nan_to_num(input, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@jax_op(title="NanToNum", shape=like_first)
def _nan_to_num(input: Any, *, nan: float, posinf: float | None, neginf: float | None) -> Any:
    return jnp.nan_to_num(input, nan=nan, posinf=posinf, neginf=neginf)


_frexp_grad = jax_op(title="FrexpGrad", shape=like_first)(lambda g, exponent: jnp.ldexp(g, -exponent))


@jax_op("aten.frexp", gradient={"input": lambda gs, outs: _frexp_grad(gs[0], outs[1])})
def frexp(input: Any) -> Any:
    return jnp.frexp(input)


# Two operands ---------------------------------------------------------------------------------------------------------

binary("mul", ops.mul)
binary("gcd", binary_op("gcd", jnp.gcd, gradient=None))
binary("lcm", binary_op("lcm", jnp.lcm, gradient=None))
binary("ldexp", binary_op("ldexp", lambda input, other: input * 2.0**other), of_floats=True)


def _symmetric(name: str, function: Function, slope: Function) -> None:
    """Declare a commutative binary op, with its derivative by the first operand as `slope(first, second, result)`."""
    grad = unary_op(f"{name}_grad", lambda g, *given: g * slope(*given), operands=("g", "by", "other", "out"))
    rules = {
        "input": lambda g, input, other, out: grad(g, input, other, out),
        "other": lambda g, input, other, out: grad(g, other, input, out),
    }
    binary(name, binary_op(name, function, gradient=rules), of_floats=True)


# Where both are 0 or infinite, JAX's own slopes differ from PyTorch's.
_symmetric("hypot", jnp.hypot, lambda by, other, out: by / out)
_symmetric("logaddexp", jnp.logaddexp, lambda by, other, out: 1 / (1 + jnp.exp(other - by)))
_symmetric("logaddexp2", jnp.logaddexp2, lambda by, other, out: 1 / (1 + jnp.exp2(other - by)))

# Where both are 0, atan2 has no gradient in PyTorch, and NaN in JAX; copysign has none at 0, where JAX has one.
_atan2_grad = unary_op(
    "atan2_grad",
    lambda g, along, across: jnp.where((along == 0) & (across == 0), 0, g * along / (along**2 + across**2)),
    operands=("g", "along", "across"),
)
_atan2 = binary_op(
    "atan2",
    jnp.arctan2,
    gradient={
        "input": lambda g, input, other: _atan2_grad(g, other, input),
        "other": lambda g, input, other: -_atan2_grad(g, input, other),
    },
)
binary("atan2", _atan2, of_floats=True)

_copysign_grad = unary_op(
    "copysign_grad",
    lambda g, input, out: jnp.where(input == 0, 0, g * jnp.sign(input) * jnp.sign(out)),
    operands=("g", "input", "out"),
)
_copysign = binary_op("copysign", jnp.copysign, gradient={"input": lambda g, input, out: _copysign_grad(g, input, out)})
binary("copysign", _copysign, of_floats=True)

# Not as float32: the next float16 is another number.
_nextafter = jax_op(title="Nextafter", shape=broadcast, gradient={"input": lambda g: g})(
    lambda input, other: jnp.nextafter(input, other)
)
binary("nextafter", _nextafter)


def _scaled(input: Operand, other: Operand, alpha: float) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Promote both operands, then scale the second by `alpha`: a fractional `alpha` cannot scale integers."""
    lhs, rhs = promoted(input, other)
    return lhs, rhs if alpha == 1 else rhs * cast_like(alpha, rhs.dtype)


@lowers("aten.add")
def add(input: Operand, other: Operand, alpha: float = 1) -> popxl.Tensor:
    return ops.add(*_scaled(input, other, alpha))


@lowers("aten.sub")
def sub(input: Operand, other: Operand, alpha: float = 1) -> popxl.Tensor:
    return ops.sub(*_scaled(input, other, alpha))


@lowers("aten.rsub")
def rsub(input: Operand, other: Operand, alpha: float = 1) -> popxl.Tensor:
    return sub(other, input, alpha)


@lowers("aten.div")
def div(input: Operand, other: Operand, rounding_mode: str | None = None) -> popxl.Tensor:
    lhs, rhs = promoted(input, other, of_floats=rounding_mode is None)
    if rounding_mode is None:
        return ops.div(lhs, rhs)
    _refuse_zero(lhs, other)
    return _divided(lhs, rhs, towards_zero=rounding_mode == "trunc")


@lowers("aten.floor_divide")
def floor_divide(input: Operand, other: Operand) -> popxl.Tensor:
    return div(input, other, "floor")


def _refuse_zero(input: popxl.Tensor, divisor: Operand) -> None:
    if not isinstance(divisor, popxl.Tensor) and divisor == 0 and not input.dtype.is_inexact:
        raise ValueError("ZeroDivisionError: integers cannot be divided by 0. Convert the first operand: `t.float()`.")


def _rest(name: str, function: Function) -> None:
    op = binary_op(name, function)

    @lowers(f"aten.{name}")
    def lowering(input: Operand, other: Operand) -> popxl.Tensor:
        lhs, rhs = promoted(input, other)
        _refuse_zero(lhs, other)
        return op(lhs, rhs)


_rest("fmod", jnp.fmod)
_rest("remainder", jnp.remainder)


@jax_op(title="DivideRounded", shape=broadcast, gradient=None)
@round_once
def _divided(lhs: Any, rhs: Any, *, towards_zero: bool) -> Any:
    is_float = jnp.issubdtype(lhs.dtype, jnp.floating)
    if not towards_zero:
        down = jnp.floor_divide(lhs, rhs)
        return jnp.where(rhs == 0, lhs / rhs, down) if is_float else down
    quotient = jax.lax.div(*jnp.broadcast_arrays(lhs, rhs))
    return jnp.trunc(quotient) if is_float else quotient


@lowers("aten.pow")
def pow(input: Operand, exponent: Operand) -> popxl.Tensor:
    base, power = promoted(input, exponent)
    if not isinstance(exponent, popxl.Tensor):
        if exponent < 0 and not base.dtype.is_inexact:
            raise ValueError("Integers to negative integer powers are not allowed. Convert the base: `t.float()`.")
        if exponent == 2:
            return ops.mul(base, base)
        if abs(exponent) == 0.5:  # for -0.0 and negative infinity, the power is another number
            return ops.sqrt(base) if exponent > 0 else rsqrt(base)
    return ops.pow(base, power) if base.dtype.is_inexact else _integer_pow(base, power)


@jax_op(title="IntegerPow", shape=broadcast, gradient=None)
def _integer_pow(base: Any, exponent: Any) -> Any:
    """Integer powers. Negative exponents give reciprocals, rounded towards zero."""
    power = base ** jnp.maximum(exponent, 0)
    sign = jnp.where(exponent % 2 == 0, 1, base)
    return jnp.where(exponent >= 0, power, jnp.where(jnp.abs(base) == 1, sign, 0))


# Three operands -------------------------------------------------------------------------------------------------------


@jax_op("aten.addcmul", prepare=promoted, shape=broadcast)
@round_once
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return input + value * tensor1 * tensor2


@jax_op("aten.addcdiv", prepare=promoted, shape=broadcast)
@round_once
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return input + value * (tensor1 / tensor2)


@jax_op("aten.lerp", prepare=promoted, shape=broadcast)
@round_once
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """Interpolate from the nearer endpoint."""
    difference = end - input
    return jnp.where(jnp.abs(weight) < 0.5, input + weight * difference, end - difference * (1 - weight))


# Dtypes ---------------------------------------------------------------------------------------------------------------


@lowers("aten._to_copy")
def to(input: popxl.Tensor, dtype: popxl.dtype | None = None, copy: bool = False) -> popxl.Tensor:
    if dtype is None:
        return ops.identity(input)
    loses = input.dtype.is_complex and not (dtype.is_complex or dtype is popxl.bool)
    real = ops.real(input) if loses else input
    return (
        _to_integers(real, data_type=dtype) if dtype.is_int and real.dtype.is_floating_point else cast_like(real, dtype)
    )


@jax_op(
    title="CastToIntegers", shape=lambda input, *, data_type: popxl.TensorSpec(input.shape, data_type), gradient=None
)
def _to_integers(input: Any, *, data_type: popxl.dtype) -> Any:
    """Floats as integers, without their fraction. What int32 cannot hold, NaN too, is its lowest number, and what a
    smaller dtype cannot hold wraps, as in PyTorch on x86; `popxl.ops.cast` saturates."""
    lowest = jnp.iinfo(jnp.int32).min
    numbers = widen(input)
    fits = jnp.abs(numbers) < -float(lowest)
    truncated = jnp.where(fits, numbers, 0).astype(jnp.int32)
    return jnp.where(fits, truncated, lowest).astype(data_type.as_jax())


@lowers("aten.copy_", "aten.copy")
def copy(src: popxl.Tensor, input: popxl.Tensor | None = None) -> popxl.Tensor:
    return to(src, None if src.dtype == wanted().dtype else wanted().dtype)


# Simulated quantisation in training -----------------------------------------------------------------------------------


@lowers(
    "aten.fake_quantize_per_tensor_affine_cachemask",
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten.fake_quantize_per_channel_affine_cachemask",
)
def fake_quantise(
    input: popxl.Tensor,
    scale: popxl.Tensor | float,
    zero_point: popxl.Tensor | int,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
    fake_quant_enabled: popxl.Tensor | None = None,
) -> tuple[popxl.Tensor, ...]:
    scale, zero_point = (cast_like(t, popxl.float32) for t in (scale, zero_point))
    return _fake_quantise(
        input, scale, zero_point, fake_quant_enabled, quant_min=quant_min, quant_max=quant_max, axis=axis
    )


@jax_op(title="FakeQuantise")
@round_once
def _fake_quantise(
    input: Any, scale: Any, zero_point: Any, enabled: Any = None, *, quant_min: int, quant_max: int, axis: int | None
) -> Any:
    """Fake quantisation, and the mask of in-range elements; only these receive gradients."""
    if axis is not None:
        by_channel = [-1 if i == axis else 1 for i in range(input.ndim)]
        scale, zero_point = jnp.reshape(scale, by_channel), jnp.reshape(zero_point, by_channel)
    steps = jnp.round(input * (1 / scale)) + zero_point
    in_range = (steps >= quant_min) & (steps <= quant_max)
    quantised = (jnp.clip(steps, quant_min, quant_max) - zero_point) * scale
    if enabled is not None:
        in_range, quantised = in_range | (enabled == 0), jnp.where(enabled == 0, input, quantised)
    passed = jnp.where(in_range, input, 0)
    return jax.lax.stop_gradient(quantised) + (passed - jax.lax.stop_gradient(passed)), in_range


@jax_op(
    "aten._fake_quantize_learnable_per_tensor_affine",
    "aten._fake_quantize_learnable_per_channel_affine",
    title="FakeQuantiseLearnable",
)
@round_once
def _fake_quantise_learnable(
    input: Any,
    scale: Any,
    zero_point: Any,
    *,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
    axis: int | None = None,
) -> Any:
    """Fake quantisation with learnable scale and zero point; gradients ignore rounding (straight-through estimator)."""

    def scale_gradient(t: Any) -> Any:
        slow = grad_factor * t + jax.lax.stop_gradient(t - grad_factor * t)
        return slow if axis is None else jnp.reshape(slow, [-1 if i == axis else 1 for i in range(input.ndim)])

    def straight_through(t: Any, rounded: Any) -> Any:
        return t + jax.lax.stop_gradient(rounded - t)

    scale, zero = scale_gradient(scale), scale_gradient(zero_point)
    rounded_zero = jnp.round(zero) if axis is not None else jnp.trunc(zero + 0.5)  # as PyTorch does
    zero = straight_through(zero, jnp.clip(rounded_zero, quant_min, quant_max))
    ratio = input / scale
    steps = straight_through(ratio, jnp.round(ratio)) + zero
    in_range = (steps >= quant_min) & (steps <= quant_max)
    return (jnp.where(in_range, steps, jax.lax.stop_gradient(jnp.clip(steps, quant_min, quant_max))) - zero) * scale
