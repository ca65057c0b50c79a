"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.operands import axis_of, promoted
from poptorch.lowering.random import uniform
from poptorch.lowering.registry import jax_op, lowers
from popxl import OpKind, ops
from popxl.extend.arguments import camel
from popxl.extend.kernels import of_elements, round_once
from popxl.extend.ops import broadcast, like_first

lowers("aten.relu")(lambda input: ops.relu(input))
lowers("aten.silu")(lambda input: ops.swish(input))


@lowers("aten.gelu")
def gelu(input: popxl.Tensor, approximate: str = "none") -> popxl.Tensor:
    return ops.gelu(input) if approximate == "tanh" else ops.geluerf(input)


def _activation(function: Callable[..., Any]) -> OpKind:
    """Declare an activation op named after `function`, with a tensor operand and scalar parameters."""
    name = function.__name__
    return jax_op(f"aten.{name}", title=camel(name), shape=like_first)(round_once(function))


# Branches that are not taken must be finite too, for the gradient to be right: hence `below`. At NaN the gradient is
# NaN on smooth pieces, and 0 where PyTorch compares with an edge.


def _flat_at_nan(t: Any) -> Any:
    return jnp.where(jnp.isnan(t), lax.stop_gradient(t), t)


@_activation
def elu(input: Any, *, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    is_below = ~(input > 0)
    below = jnp.where(is_below, input, 0)
    return jnp.where(is_below, scale * alpha * jnp.expm1(below * input_scale), scale * input)


@lowers("aten.celu")
def celu(input: popxl.Tensor, alpha: float = 1) -> popxl.Tensor:
    return elu(input, alpha=alpha, input_scale=1 / alpha)


@_activation
def hardshrink(input: Any, *, lambd: float = 0.5) -> Any:
    return jnp.where((input >= -lambd) & (input <= lambd), 0, _flat_at_nan(input))


@_activation
def hardsigmoid(input: Any) -> Any:
    return jnp.where(input <= -3, 0, jnp.where(input >= 3, 1, _flat_at_nan(input) / 6 + 0.5))


@_activation
def hardswish(input: Any) -> Any:
    is_beyond = (input <= -3) | (input >= 3)
    within = jnp.where(is_beyond, 0, input)
    low = jnp.where(input == -jnp.inf, jnp.nan, 0)  # 0 times infinity
    return jnp.where(is_beyond, jnp.where(input < 0, low, input), within * (within + 3) / 6)


@_activation
def hardtanh(input: Any, *, min_val: float = -1, max_val: float = 1) -> Any:
    return jnp.where(input <= min_val, min_val, jnp.where(input >= max_val, max_val, _flat_at_nan(input)))


@_activation
def leaky_relu(input: Any, *, negative_slope: float = 0.01) -> Any:
    return jnp.where(input > 0, input, input * negative_slope)


@_activation
def log_sigmoid_forward(input: Any) -> Any:
    return jax.nn.log_sigmoid(input)


@_activation
def mish(input: Any) -> Any:
    return of_elements(lambda t: t * jnp.tanh(jax.nn.softplus(t)), input)


@_activation
def softplus(input: Any, *, beta: float = 1, threshold: float = 20) -> Any:
    return jnp.where(input * beta > threshold, input, jax.nn.softplus(input * beta) / beta)


@_activation
def softshrink(input: Any, *, lambd: float = 0.5) -> Any:
    is_small = (input >= -lambd) & (input <= lambd)
    return jnp.where(is_small, input * 0, _flat_at_nan(input) - jnp.where(input < -lambd, -lambd, lambd))


@_activation
def threshold(input: Any, *, threshold: float, value: float) -> Any:
    return jnp.where(input <= threshold, value, input)


@jax_op("aten._prelu_kernel", title="LeakyReluWithSlopes", prepare=promoted, shape=broadcast)
@round_once
def prelu(input: Any, weight: Any) -> Any:
    return jnp.where(input > 0, input, weight * input)


@lowers("aten.rrelu_with_noise")
def rrelu(
    input: popxl.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **noise: popxl.Tensor
) -> popxl.Tensor:
    """Randomised leaky ReLU; training draws a random slope per element."""
    if not training:
        return leaky_relu(input, negative_slope=(lower + upper) / 2)
    return prelu(input, uniform(lower, upper))


@lowers("aten.glu")
def glu(input: popxl.Tensor, dim: int = -1) -> popxl.Tensor:
    return _glu(input, axis=axis_of(input, dim))


@jax_op(title="Glu")
@round_once
def _glu(input: Any, *, axis: int) -> Any:
    kept, gate = jnp.split(input, 2, axis)
    return kept * jax.nn.sigmoid(gate)
