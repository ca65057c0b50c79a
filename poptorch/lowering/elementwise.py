"""Ops that act on each number by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import popxl
from popxl import ops
from popxl.ops.precision import rounded_once
from poptorch.lowering.operands import promoted, together
from poptorch.lowering.registry import jax_op, lowers

Operand = popxl.Tensor | bool | int | float


def _floating(input: popxl.Tensor) -> popxl.Tensor:
    return input if input.dtype.is_floating_point else ops.cast(input, popxl.float32)


# One operand ----------------------------------------------------------------------------------------------------------


def _unary(names: str, op: Callable[[popxl.Tensor], popxl.Tensor], of_floats: bool = True) -> None:
    def lowering(input: popxl.Tensor) -> popxl.Tensor:
        return op(_floating(input) if of_floats else input)

    lowers(*(f"aten.{name}" for name in names.split()))(lowering)


for _name in ("exp", "log", "log2", "sqrt", "sin", "cos", "tanh"):
    _unary(_name, getattr(ops, _name))
for _name in ("abs", "ceil", "floor", "relu", "sign", "isnan", "isinf", "isfinite"):
    _unary(_name, getattr(ops, _name), of_floats=False)
_unary("neg", ops.negate, of_floats=False)
_unary("clone alias lift_fresh contiguous", ops.identity, of_floats=False)
_unary("detach", ops.detach, of_floats=False)

for _name, _function in {
    "sigmoid": lambda t: 1 / (1 + jnp.exp(-t)),
    "rsqrt": lambda t: 1 / jnp.sqrt(t),
    "reciprocal": lambda t: 1 / t,
    "log1p": jnp.log1p,
    "expm1": jnp.expm1,
}.items():
    _unary(_name, jax_op(title=_name.capitalize())(rounded_once(_function)))


# Two operands ---------------------------------------------------------------------------------------------------------


def _binary(names: str, op: Callable[[popxl.Tensor, popxl.Tensor], popxl.Tensor]) -> None:
    def lowering(input: Operand, other: Operand) -> popxl.Tensor:
        return op(*promoted(input, other))

    lowers(*(f"aten.{name}" for name in names.split()))(lowering)


_binary("mul", ops.mul)
_binary("maximum", ops.maximum)
_binary("eq", ops.equal)
_binary("gt", ops.greater)
_binary("lt", lambda input, other: ops.greater(other, input))
_binary("ne", lambda input, other: ops.logical_not(ops.equal(input, other)))


def _scaled(other: Operand, alpha: float) -> Operand:
    return other if alpha == 1 else other * alpha


@lowers("aten.add")
def add(input: Operand, other: Operand, alpha: float = 1) -> popxl.Tensor:
    return ops.add(*promoted(input, _scaled(other, alpha)))


@lowers("aten.sub")
def sub(input: Operand, other: Operand, alpha: float = 1) -> popxl.Tensor:
    return ops.sub(*promoted(input, _scaled(other, alpha)))


@lowers("aten.div")
def div(input: Operand, other: Operand, rounding_mode: str | None = None) -> popxl.Tensor:
    lhs, rhs = promoted(input, other)
    if rounding_mode is None:
        return ops.div(_floating(lhs), _floating(rhs))
    return divided(lhs, rhs, towards_zero=rounding_mode == "trunc")


@jax_op(title="DivideRounded")
def divided(lhs: Any, rhs: Any, *, towards_zero: bool) -> Any:
    if not towards_zero:
        return jnp.floor_divide(lhs, rhs)
    return jnp.trunc(lhs / rhs) if jnp.issubdtype(lhs.dtype, jnp.floating) else jnp.sign(lhs) * jnp.sign(rhs) * (
        jnp.abs(lhs) // jnp.abs(rhs)
    )


@lowers("aten.pow")
def pow(input: Operand, exponent: Operand) -> popxl.Tensor:
    return ops.pow(*promoted(input, exponent))


# Dtypes ---------------------------------------------------------------------------------------------------------------


@lowers("aten._to_copy", "aten.to")
def to(input: popxl.Tensor, dtype: popxl.dtype | None = None, copy: bool = False) -> popxl.Tensor:
    return ops.identity(input) if dtype is None else together(input, dtype)


@lowers("aten.copy_", "aten.copy")
def copy(src: popxl.Tensor, input: popxl.Tensor | None = None) -> popxl.Tensor:
    return ops.identity(src)


@lowers("aten.clamp")
def clamp(input: popxl.Tensor, min: Operand | None = None, max: Operand | None = None) -> popxl.Tensor:
    bounds = [bound for bound in (min, max) if bound is not None]
    tensors = iter(promoted(input, *bounds))
    return clamped(next(tensors), *(None if bound is None else next(tensors) for bound in (min, max)))


@jax_op(title="Clamp")
def clamped(input: Any, min: Any = None, max: Any = None) -> Any:
    return jnp.clip(input, min, max)
