"""Ops with gradients of their own as JAX functions with custom derivatives, forward and reverse.

`popxl.from_jax` recognises such a function by its file, and imports it as a single op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl.base.arrays import Array
from popxl.core.recording import Op
from popxl.errors import PopxlError
from popxl.options import SessionOptions
from popxl.program.rule_graph import RuleGraph, rule_graph
from runtime.lowering.channels import FAILURE, Channels
from runtime.lowering.context import Context
from runtime.lowering.lower import Lowering, cast_to_declared
from runtime.lowering.platform_hooks import PlatformHooks


def _op_function(op: Op) -> Callable[..., Any]:
    """An op as a function of operands, with results in declared dtypes."""

    def function(*operands: Array) -> tuple[Array, ...]:
        results = op.apply(operands)
        several = results if isinstance(results, tuple | list) else (results,)
        return tuple(cast_to_declared(t, value, op) for t, value in zip(op.outputs, several, strict=True))

    function.__name__ = function.__qualname__ = op.op_type
    return function


def not_differentiable(op: Op) -> Callable[..., Any]:
    """An op as a function that raises under differentiation."""

    function = jax.custom_vjp(_op_function(op))

    def backward(operands: Any, gradients: Any) -> Any:
        raise PopxlError(
            f"jax.grad: a gradient reaches the op {op.name} ({op.source}), which has none. Pass the tensor through "
            "`ops.detach`."
        )

    function.defvjp(lambda *operands: (function(*operands), ()), backward)
    return function


def with_rules(op: Op) -> Callable[..., Any]:
    """An op with gradient rules as a `jax.custom_jvp` function.

    A rule is linear in the incoming gradients, so that JAX can transpose it: the derivative serves forward and reverse
    mode, and can be differentiated again.
    """

    function = jax.custom_jvp(_op_function(op))
    ir = op.graph.ir  # JAX may ask for the derivative when nothing else refers to it

    @function.defjvp
    def derivative(operands: Sequence[Array], tangents: Sequence[Array]) -> Any:
        results = function(*operands)
        rules = rule_graph(op)
        specs = [jax.ShapeDtypeStruct(results[k].shape, results[k].dtype) for k in rules.gradient_outputs]

        def pull(*gs: Array) -> tuple[Array, ...]:
            return _pull_back(rules, op, ir.options, operands, results, gs)

        moved = jax.linear_transpose(pull, *specs)(tuple(tangents[i] for i in rules.wanted)) if rules.wanted else ()
        found = dict(zip(rules.gradient_outputs, moved, strict=False))
        return results, tuple(found.get(k, _no_tangent(value)) for k, value in enumerate(results))

    return function


def _no_tangent(value: Array) -> Array:
    """The zero tangent of an independent or integer result."""
    return jnp.zeros_like(value) if jnp.issubdtype(value.dtype, jnp.inexact) else np.zeros(value.shape, jax.float0)


class _PlainLowering(Lowering):
    """Lowering with plain kernels, for JAX to transpose.

    Those of GPUs have barriers, behind which JAX takes everything for linear in a gradient that goes through them.
    """

    hooks = PlatformHooks()


def _pull_back(
    rules: RuleGraph,
    op: Op,
    options: SessionOptions,
    operands: Sequence[Array],
    results: Sequence[Array],
    gs: Sequence[Array],
) -> tuple[Array, ...]:
    """Apply gradient rules. Returns operand gradients in operand shapes and dtypes."""
    known = dict(zip((*op.inputs, *op.outputs), (*operands, *results), strict=True))  # one tensor may be two operands
    lowering = _PlainLowering(rules.graph.ops, options)
    channels = Channels({FAILURE: (jnp.asarray(FAILURE.start), 0)})
    outputs = lowering.lower_call(rules.graph, [*known.values(), *gs], Context(channels)).outputs
    return tuple(_unbroadcast(gradient, operands[i]) for i, gradient in zip(rules.wanted, outputs, strict=True))


def _unbroadcast(gradient: Array, operand: Array) -> Array:
    """Sum a gradient over broadcast dimensions, and cast it to its operand's dtype."""
    if gradient.shape != operand.shape:
        added = gradient.ndim - operand.ndim
        repeated = [added + d for d, size in enumerate(operand.shape) if gradient.shape[added + d] != size]
        gradient = gradient.sum((*range(added), *repeated)).reshape(operand.shape)
    return gradient if gradient.dtype == operand.dtype else gradient.astype(operand.dtype)
