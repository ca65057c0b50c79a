"""Ops that scale gradients: loss unscaling, clipping by the global norm, and the loss scale's own updates."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

import popxl
from poptorch.program.formulas import Array, Number
from poptorch.program.rules import op_kind, real_parts
from popxl.op import Colocated, Overwrites


def _summary(name: str, each: Callable[[Array], Array], combine: Callable[[list[Array]], Array]) -> popxl.OpKind:
    """Declare an op that reduces any number of tensors to one number."""
    return op_kind(name, lambda *ts: combine([each(real_parts(t)) for t in ts]))


sum_of_squares = _summary("SumOfSquares", lambda t: jnp.sum(t * t), sum)
largest_magnitude = _summary(
    "LargestMagnitude",
    lambda t: jnp.max(jnp.where(jnp.isnan(t), jnp.inf, jnp.abs(t)), initial=0),  # infinities become NaN
    lambda ms: jnp.max(jnp.stack(ms)),
)


def _unscaling_factor(loss_scale: Number = 1.0, squares: Array | None = None, limit: Number = math.inf) -> Array:
    """Gradient scale factor: undo loss scaling, and clip global norms greater than `limit`."""
    if squares is None:
        return 1 / loss_scale
    return jnp.minimum(1, limit / (jnp.sqrt(squares) / loss_scale + 1e-6)) / loss_scale  # as in torch's clip_grad_norm_


gradient_scale = op_kind("GradientScale", _unscaling_factor)

_TOO_LARGE = 65504 / 8  # an eighth of float16's range
_LOSS_SCALES = 2.0**-15, 2.0**15


def _next_factor(factor: Array, largest: Array, loss_scaling: Number = 1.0) -> tuple[Array]:
    """Double the loss scale while gradients stay well within float16's range; halve it on overflow or NaN."""
    scale = factor * loss_scaling
    scale = jnp.clip(jnp.where(largest <= _TOO_LARGE, scale * 2, scale / 2), *_LOSS_SCALES)
    return (scale / loss_scaling,)


adjust_loss_scale = op_kind(
    "LossScaleUpdate",
    _next_factor,
    shape=lambda *operands: (),
    traits=[Overwrites("factor", aliased=False), Colocated()],
)
