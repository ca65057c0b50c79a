"""Predicates, boolean and bitwise logic, and selection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.elementwise import Operand, binary, binary_op, unary, unary_op
from poptorch.lowering.operands import cast_like, promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.ops import broadcast, predicate

# Predicates -----------------------------------------------------------------------------------------------------------

_greater_equal = binary_op("greater_equal", jnp.greater_equal, shape=predicate, gradient=None)

_COMPARISONS: dict[str, Callable[..., popxl.Tensor]] = {
    "eq": ops.equal,
    "ne": lambda input, other: ops.logical_not(ops.equal(input, other)),
    "gt": ops.greater,
    "lt": lambda input, other: ops.greater(other, input),
    "ge": _greater_equal,
    "le": lambda input, other: _greater_equal(other, input),
}
for _name, _function in _COMPARISONS.items():
    binary(_name, _function, compares=True)

# Truth values and bits ------------------------------------------------------------------------------------------------

unary("logical_not", ops.logical_not, of_floats=False)
binary("logical_and", ops.logical_and)
binary("logical_or", ops.logical_or)
binary("logical_xor", binary_op("xor", jnp.logical_xor, shape=predicate, gradient=None))

unary("bitwise_not", unary_op("bitwise_not", jnp.bitwise_not, gradient=None), of_floats=False)
_OF_BITS: dict[str, Callable[..., Any]] = {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_left_shift __lshift__ __ilshift__": jnp.left_shift,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_right_shift __rshift__ __irshift__": jnp.right_shift,
    "bitwise_xor": jnp.bitwise_xor,
}
for _names, _function in _OF_BITS.items():
    binary(_names, binary_op(_names.split()[0], _function, gradient=None))

# Maximum and minimum --------------------------------------------------------------------------------------------------

_larger_grad = unary_op(
    "larger_grad",
    lambda g, larger, smaller: jnp.where(larger < smaller, 0, jnp.where(larger == smaller, g / 2, g)),
    operands=("g", "larger", "smaller"),
)


def _to_larger(larger: str, smaller: str) -> dict[str, Callable[..., popxl.Tensor]]:
    """Gradients of a maximum or minimum: ties share the gradient equally."""
    rules = (
        lambda g, input, other: _larger_grad(g, input, other),
        lambda g, input, other: _larger_grad(g, other, input),
    )
    return dict(zip((larger, smaller), rules, strict=True))


def _first_if(chosen: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Selection between two numbers: ties choose the first, as in PyTorch 2.13; NaN loses to a number."""
    return lambda lhs, rhs: jnp.where(chosen(lhs, rhs) | jnp.isnan(rhs), lhs, rhs)


binary("maximum", binary_op("maximum", jnp.maximum, gradient=_to_larger("input", "other")))
binary("minimum", binary_op("minimum", jnp.minimum, gradient=_to_larger("other", "input")))
binary("fmax", binary_op("fmax", _first_if(jnp.greater_equal)))
binary("fmin", binary_op("fmin", _first_if(jnp.less_equal)))

# Selection ------------------------------------------------------------------------------------------------------------


@lowers("aten.where")
def where(condition: popxl.Tensor, input: Operand, other: Operand) -> popxl.Tensor:
    return ops.where(condition, *promoted(input, other))


@lowers("aten.masked_fill")
def masked_fill(input: popxl.Tensor, mask: popxl.Tensor, value: Operand) -> popxl.Tensor:
    return ops.where(mask, cast_like(value, input.dtype), input)


def limited(input: Any, min: Any = None, max: Any = None) -> Any:
    """Clamp to `min`, then to `max`. Elements at a bound keep their gradient, as in PyTorch 2.13; NaN elements or
    bounds give none.
    """
    result = input
    if min is not None:
        result = jnp.where((result < min) | jnp.isnan(min), min, result)
    if max is not None:
        result = jnp.where((result > max) | jnp.isnan(max), max, result)
    return jnp.where(jnp.isnan(result), lax.stop_gradient(result), result)


jax_op("aten.clamp", "aten.clamp_min", "aten.clamp_max", title="Clamp", prepare=partial(promoted, are_bounds=True))(
    limited
)


@jax_op("aten.heaviside", prepare=promoted, shape=broadcast, gradient=None)
def heaviside(input: Any, values: Any) -> Any:
    return jnp.where(input == 0, values, (input > 0).astype(input.dtype))
