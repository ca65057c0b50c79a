"""Elementwise ops: arithmetic and functions. Comparisons and selections are in `popxl.ops.logic`.

Each is one declaration: the name, the JAX function, a sentence, and a gradient if it is not simply JAX's. A gradient
rule is written with ops, and its parameters name the values that it reads: `g`, the incoming gradient; an operand;
`out`, the result. Autodiff sums gradients of operands that were broadcast.

A new function of one tensor is one more line here, and one row in `tests/popxl/ops/rows`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl import dtypes
from popxl.core.create import constant, operand_beside, with_numbers
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, TensorLike, taken_back_on_failure
from popxl.core.traits import ShardingRule
from popxl.ops.convert import cast_if_needed
from popxl.ops.families import ELEMENTWISE, LINEAR_IN_GRADIENT, REAL, Unary, binary, inplace, unary
from popxl.ops.kernels.elements import of_elements, quotient, recompute
from popxl.ops.precision import is_half, round_once, widen
from popxl.values.shapes import broadcast, broadcast_shapes, like_first, meta_shape_of, number
from popxl.values.spec import TensorSpec

# Gradients that are one op of their own -----------------------------------------------------------------------------

zeros_grad = OpKind("ZerosGrad", jnp.zeros_like, shape=like_first)


def _abs_pullback(g: Any, t: Any) -> Any:
    """Gradient of the complex absolute value. JAX cannot differentiate it further via `jnp.sign`."""
    length = jnp.abs(t)
    return g * (jnp.conj(t) / jnp.where(length == 0, 1, length))


def _pullback(name: str, lowering: Callable[..., Any], shape: Callable[..., TensorSpec] = like_first) -> OpKind:
    """Declare the gradient of an elementwise op, one op of the incoming gradient `g` and of what it reads besides."""
    return OpKind(name, lowering, shape=shape, traits=[LINEAR_IN_GRADIENT])


abs_grad = _pullback("AbsGrad", _abs_pullback, lambda g, t: like_first(t))
relu_grad = _pullback("ReluGrad", lambda g, out: jnp.where(out <= 0, 0, g))
ties_grad = _pullback("TiesGrad", lambda g, x, out: jnp.where(x == out, g, 0), lambda g, x, out: g.spec)
rsqrt_grad = _pullback("RsqrtGrad", round_once(lambda g, out: g * -0.5 * out * out * out))
sigmoid_grad = _pullback("SigmoidGrad", round_once(lambda g, out: g * out * (1 - out)))
softplus_grad = _pullback("SoftplusGrad", round_once(lambda g, t: g * jax.nn.sigmoid(t)))
tanh_grad = _pullback("TanhGrad", round_once(lambda g, out: g * (1 - out * out)))
# Not (g · lhs) / rhs²: the square leaves the range of a float long before the quotients do.
divisor_grad = _pullback("DivisorGrad", round_once(lambda g, lhs, rhs: -g * (lhs / rhs / rhs)))


# The branch that `where` leaves out is differentiated as well, by zero, and so has to have a derivative.
@round_once
def _pow_base_pullback(g: Any, t: Any, e: Any) -> Any:
    base = jnp.where((t == 0) & ((e == 0) | (e == 1)), 1, t)
    return jnp.where(e == 0, 0, g * e * base ** (e - 1))


@round_once
def _pow_exponent_pullback(g: Any, t: Any, e: Any, out: Any) -> Any:
    is_flat = (t == 0) & (jnp.real(e) >= 0)
    return g * jnp.where(is_flat, 0, out * jnp.log(jnp.where(is_flat, 1, t)))


pow_base_grad = _pullback("PowBaseGrad", _pow_base_pullback)
pow_exponent_grad = _pullback("PowExponentGrad", _pow_exponent_pullback)


def _gradient_again(name: str, function: Callable[[Any], Any], costs: Callable[[Any], bool]) -> OpKind:
    """Gradient with recomputation of an elementwise function; saves `t` alone.

    Args:
        costs: predicate of `t`: whether a compiler would otherwise keep an intermediate value of the function, at the
            cost of memory.
    """

    def lowering(t: Any, g: Any) -> Any:
        given = recompute(t) if costs(t) else t
        _, pulled_back = jax.vjp(lambda t: round_once(function)(t).astype(t.dtype), given)
        return pulled_back(g)[0]

    return _pullback(name, lowering)


def _gelu(t: Any) -> Any:
    return jax.nn.gelu(t, approximate=True)


def _geluerf(t: Any) -> Any:
    return of_elements(functools.partial(jax.nn.gelu, approximate=False), t)


gelu_grad = _gradient_again("GeluGrad", _gelu, is_half)  # XLA recomputes tanh if it is no wider than `t`
geluerf_grad = _gradient_again("GeluErfGrad", _geluerf, lambda t: True)

# One operand --------------------------------------------------------------------------------------------------------

abs = unary(
    "abs",
    jnp.abs,
    "|t|; of complex numbers a real one. The gradient at 0 is 0.",
    lambda g, t: abs_grad(g, t) if t.dtype.is_complex else g * sign(t),
    shape=lambda t: TensorSpec(t.shape, t.dtype.component_dtype, t.meta_shape),
    see="numpy.abs",
)
ceil = unary(
    "ceil",
    jnp.ceil,
    "The next integer above. The gradient is zero.",
    lambda g: zeros_grad(g),
    see="numpy.ceil",
    traits=REAL,
)
cos = unary("cos", jnp.cos, "Cosine of an angle in radians.", see="numpy.cos")
erf = unary(
    "erf",
    lambda t: of_elements(lax.erf, t),
    "The error function, 2/√π times the integral of exp(-x²) from 0 to t.",
    see="scipy.special.erf",
    traits=REAL,
)
exp = unary("exp", jnp.exp, "e to the power of t.", lambda g, out: g * out, see="numpy.exp")
floor = unary(
    "floor",
    jnp.floor,
    "The next integer below. The gradient is zero.",
    lambda g: zeros_grad(g),
    see="numpy.floor",
    traits=REAL,
)
gelu = unary(
    "gelu",
    _gelu,
    "0.5 t (1 + tanh(√(2/π) (t + 0.044715 t³))), the tanh form of the Gaussian error linear unit.",
    lambda g, t: gelu_grad(t, g),
    see="torch.nn.functional.gelu(approximate='tanh')",
    traits=REAL,
)
geluerf = unary(
    "geluerf",
    _geluerf,
    "0.5 t (1 + erf(t / √2)), the exact Gaussian error linear unit.",
    lambda g, t: geluerf_grad(t, g),
    kind="GeluErf",
    see="torch.nn.functional.gelu",
    traits=REAL,
)
log = unary("log", jnp.log, "Natural logarithm.", lambda g, t: g / t, see="numpy.log")
negate: Unary = unary("negate", jnp.negative, "-t.", lambda g: negate(g), kind="Neg", linear=True, see="numpy.negative")
relu = unary(
    "relu",
    lambda t: jnp.maximum(t, 0),
    "max(t, 0). NaN stays NaN. The gradient at 0 is 0.",
    lambda g, out: relu_grad(g, out),
    see="torch.nn.functional.relu",
    traits=REAL,
)
rsqrt = unary("rsqrt", lax.rsqrt, "1 / √t.", lambda g, out: rsqrt_grad(g, out), see="torch.rsqrt")
sigmoid = unary(
    "sigmoid", jax.nn.sigmoid, "1 / (1 + exp(-t)).", lambda g, out: sigmoid_grad(g, out), see="torch.sigmoid"
)
sign: Unary = unary(
    "sign",
    lambda t: (t > 0).astype(t.dtype) - (t < 0).astype(t.dtype),
    "-1, 0 or 1; 0 for NaN. The gradient is zero.",
    lambda g: zeros_grad(g),
    see="numpy.sign",
    traits=REAL,
)
sin = unary("sin", jnp.sin, "Sine of an angle in radians.", see="numpy.sin")
softplus = unary(
    "softplus",
    jax.nn.softplus,
    "log(1 + exp(t)), in a form that does not overflow.",
    lambda g, t: softplus_grad(g, t),
    kind="SoftPlus",  # programs have declared an op of their own that is called Softplus
    see="torch.nn.functional.softplus",
    traits=REAL,
)
sqrt = unary("sqrt", jnp.sqrt, "Square root; NaN for negative t.", lambda g, out: g / (out * 2), see="numpy.sqrt")
square = unary("square", jnp.square, "t · t.", lambda g, t: g * t * 2, see="numpy.square")
swish = unary("swish", jax.nn.silu, "t / (1 + exp(-t)), also called SiLU.", see="torch.nn.functional.silu")
tanh = unary("tanh", jnp.tanh, "Hyperbolic tangent.", lambda g, out: tanh_grad(g, out), see="numpy.tanh")

exp_ = inplace(exp, "exp_", "exp_inplace_out")
gelu_ = inplace(gelu, "gelu_", "gelu_inplace_out")
geluerf_ = inplace(geluerf, "geluerf_", "geluerf_inplace_out")
relu_ = inplace(relu, "relu_", "relu_inplace_out")
swish_ = inplace(swish, "swish_", "swish_inplace_out")

# Two operands -------------------------------------------------------------------------------------------------------


def _product(lhs: Any, rhs: Any) -> TensorSpec:
    """Broadcast specs; float32 numbers may scale halves, giving halves."""
    for t, factor in ((lhs, rhs), (rhs, lhs)):
        if t.dtype.is_half and factor.dtype is dtypes.float32 and factor.nelms == 1:
            return TensorSpec(broadcast_shapes(lhs.shape, rhs.shape), t.dtype, meta_shape_of(lhs, rhs))
    return broadcast(lhs, rhs)


def _times(g: Tensor, factor: Tensor, spec: TensorSpec) -> Tensor:
    """g · factor for one operand; keeps full precision before summing broadcast halves."""
    if g.dtype.is_half and (spec.shape, spec.dtype) != (g.shape, g.dtype):
        g, factor = cast_if_needed(g, dtypes.float32), cast_if_needed(factor, dtypes.float32)
    return g * factor


add = binary(
    "add", jnp.add, "lhs + rhs.", {"lhs": lambda g: g, "rhs": lambda g: g}, linear=("lhs rhs",), see="numpy.add"
)
sub = binary(
    "sub",
    jnp.subtract,
    "lhs - rhs.",
    {"lhs": lambda g: g, "rhs": lambda g: negate(g)},
    linear=("lhs rhs",),
    see="numpy.subtract",
)
mul = binary(
    "mul",
    jnp.multiply,
    "lhs · rhs. A float16 or bfloat16 tensor may be multiplied by a float32 tensor of one element; its dtype stays.",
    {
        "lhs": lambda g, rhs, lhs_spec: _times(g, rhs, lhs_spec),
        "rhs": lambda g, lhs, rhs_spec: _times(g, lhs, rhs_spec),
    },
    shape=_product,
    linear=("lhs", "rhs"),
    see="numpy.multiply",
)
div = binary(
    "div",
    lambda lhs, rhs: (jnp.floor_divide if jnp.issubdtype(lhs.dtype, jnp.integer) else quotient)(lhs, rhs),
    "lhs / rhs. Integers stay integers: the quotient is rounded down, as PopXL documents it.",
    {"lhs": lambda g, rhs: g / rhs, "rhs": lambda g, lhs, rhs: divisor_grad(g, lhs, rhs)},
    linear=("lhs",),
    see="numpy.divide",
)
fmod = binary(
    "fmod",
    round_once(jnp.fmod),
    "Remainder of lhs / rhs with the sign of `lhs`, as in C. No gradient flows to `rhs`.",
    {"lhs": lambda g: g},
    see="numpy.fmod",
    traits=REAL,
)

add_ = inplace(add, "add_", "add_lhs_inplace_out")

# Other operands -----------------------------------------------------------------------------------------------------


_increment_mod = OpKind(
    "IncrementMod",
    lambda t, *, increment, modulus: _remainder(t, *(_number(n, t) for n in (increment, modulus))),
    shape=like_first,
    gradient=None,
    traits=REAL,
)
_increment_mod_ = _increment_mod.inplace("IncrementModInplace", "increment_mod_inplace_out")
_max = OpKind(
    "Max",
    lambda *ts: functools.reduce(jnp.maximum, ts),
    shape=broadcast,
    result="maximum_out",
    gradient={"ts": lambda g, operand, out: ties_grad(g, operand, out)},
    traits=[*REAL, ELEMENTWISE],
)
_min = OpKind(
    "Min",
    lambda *ts: functools.reduce(jnp.minimum, ts),
    shape=broadcast,
    result="minimum_out",
    gradient={"ts": lambda g, operand, out: ties_grad(g, operand, out)},
    traits=[*REAL, ELEMENTWISE],
)
_pow = OpKind(
    "Pow",
    round_once(lambda t, e: t**e),
    shape=broadcast,
    gradient={
        "t": lambda g, t, e: pow_base_grad(g, t, e),
        "e": lambda g, t, e, out: pow_exponent_grad(g, t, e, out),
    },
    traits=[ELEMENTWISE],
)


def _total(*ts: Any) -> Any:
    """Sum of broadcast arrays, rounded once. One addition does so in any dtype, and XLA fuses it into more kernels than
    one in float32 with a cast."""
    return functools.reduce(jnp.add, ts if len(ts) == 2 else map(widen, ts))


_sum = OpKind(
    "Sum",
    _total,
    shape=broadcast,
    gradient={"ts": lambda g: g},
    traits=[ShardingRule(linear=("ts",))],
)


def is_sum(op: Op) -> bool:
    """Whether an op is `add_n`."""
    return op.kind is _sum


def _number(value: float, t: Any) -> Any:
    """Convert a number to an array's dtype. Integers truncate and wrap around."""
    if not jnp.issubdtype(t.dtype, jnp.integer):
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(t.dtype)
    bits = 8 * t.dtype.itemsize
    return np.asarray(math.trunc(value) % 2**bits, f"uint{bits}").astype(t.dtype)


@round_once
def _remainder(t: Any, increment: Any, modulus: Any) -> Any:
    return jnp.fmod(t + increment, modulus)


def increment_mod(t: Tensor, increment: float, modulus: float) -> Tensor:
    """Remainder of (t + increment) / modulus, with the sign of the sum, as in C. No gradient flows.

    Args:
        t: tensor of any shape.
        increment, modulus: plain numbers; they are converted to the dtype of `t` first, for integers without their
            fraction.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        TypeError: if one of them is not a number.

    Example:
        >>> step = ops.increment_mod(step, 1, 4)
    """
    return _increment_mod(t, **_step("increment_mod", increment, modulus))


def increment_mod_(t: Tensor, increment: float, modulus: float) -> Tensor:
    """`increment_mod`, written over `t`. Returns an alias of `t`.

    Example:
        >>> ops.increment_mod_(step, 1, 4)
    """
    return _increment_mod_(t, **_step("increment_mod_", increment, modulus))


def _step(name: str, increment: float, modulus: float) -> dict[str, Any]:
    return {"increment": number(increment, f"{name}: `increment`"), "modulus": number(modulus, f"{name}: `modulus`")}


def log2(t: Tensor) -> Tensor:
    """Logarithm to base 2, made of other ops: log(t) / log(2), each rounded to the dtype of `t`.

    Args:
        t: tensor of any shape.

    Returns:
        A new tensor of the same shape and dtype.

    See also: `numpy.log2`.

    Example:
        >>> y = ops.log2(x)
    """
    return div(log(t), log(constant(2, t.dtype)))


def maximum(*ts: TensorLike) -> Tensor:
    """The largest of several tensors, elementwise.

    Every operand that is equal to the largest receives the whole gradient there; ties are not split.

    Args:
        *ts: one or more tensors of one dtype, whose shapes broadcast. Beside a tensor there may be numbers and arrays,
            which become constants of its dtype.

    Returns:
        A new tensor of the broadcast shape.

    Raises:
        ValueError: if no tensor is given.
        PopxlError: if the shapes do not broadcast or the dtypes differ.

    See also: `numpy.maximum`.

    Example:
        >>> z = ops.maximum(x, 0.0)
    """
    if not ts:
        raise ValueError("maximum: at least one tensor is needed; none was given.")
    return with_numbers(_max, *ts)


def minimum(*ts: TensorLike) -> Tensor:
    """The smallest of several tensors, elementwise: as `maximum`.

    See also: `numpy.minimum`.

    Example:
        >>> z = ops.minimum(x, 6.0)
    """
    if not ts:
        raise ValueError("minimum: at least one tensor is needed; none was given.")
    return with_numbers(_min, *ts)


def pow(t: Tensor, e: float | int | TensorLike) -> Tensor:
    """t to the power of `e`, elementwise.

    Args:
        t: tensor of any shape.
        e: exponent: a tensor of the dtype of `t` whose shape broadcasts with that of `t`, or a number. A number becomes
            a constant of the dtype of `t`; or of its own dtype, if `t` holds integers and the number is not one.
            Negative exponents of integers are undefined.

    Returns:
        A new tensor of the broadcast shape.

    Raises:
        PopxlError: if the shapes do not broadcast or the dtypes differ.

    See also: `numpy.power`.

    Example:
        >>> y = ops.pow(x, 3)
    """
    if isinstance(e, Tensor):
        return _pow(t, e)
    exponent = operand_beside(t, e) if isinstance(t, Tensor) and t.dtype.holds(e) else constant(e)
    with taken_back_on_failure(exponent):
        return _pow(t, exponent)


def add_n(*ts: Tensor) -> Tensor:
    """The sum of any number of tensors in one op. Gradient graphs use it for tensors that are read several times.

    Args:
        *ts: one or more tensors of one dtype, whose shapes broadcast.

    Returns:
        A new tensor of the broadcast shape.

    Raises:
        ValueError: if no tensor is given.
        PopxlError: if the shapes do not broadcast or the dtypes differ.

    Example:
        >>> total = ops.add_n(a, b, c)
    """
    if not ts:
        raise ValueError("add_n: at least one tensor is needed; none was given.")
    return _sum(*ts)
