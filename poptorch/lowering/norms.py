"""Normalisations: one op over different axes, with two-pass variances in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import popxl
from poptorch.lowering.operands import Optional, cast_like
from poptorch.lowering.reductions import norm
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.kernels import round_once, sums, wide_dtype, widen
from popxl.extend.ops import RecomputedFrom, like_first

# The common op --------------------------------------------------------------------------------------------------------


def _normalised(
    input: Any, weight: Any = None, bias: Any = None, *, axes: tuple[int, ...], eps: float
) -> tuple[Any, Any, Any]:
    """`(input - mean) / sqrt(var + eps) * weight + bias`; mean and variance keep their reduced axes."""
    x = input.astype(wide_dtype(input))
    mean = x.mean(axes, keepdims=True)
    x = x - mean
    var = (x * x).mean(axes, keepdims=True)
    return _scaled(x * lax.rsqrt(var + eps), weight, bias).astype(input.dtype), mean, var


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * widen(weight)
    return x if bias is None else x + widen(bias)


def _backward(
    g: Any, input: Any, mean: Any, var: Any, weight: Any = None, *, axes: tuple[int, ...], spread: Any, eps: float
) -> tuple[Any, ...]:
    """Gradients of `input`, and of optional `weight` and `bias`, summed over their broadcast axes."""
    g, inverse = widen(g), lax.rsqrt(var + eps)
    x = (widen(input) - mean) * inverse
    scaled = g if weight is None else g * widen(weight)
    level, slope = scaled.mean(axes, keepdims=True), (scaled * x).mean(axes, keepdims=True)
    gradient = (inverse * (scaled - level - x * slope)).astype(input.dtype)
    return gradient, *(() if spread is None else (sums.summed(t, spread, keepdims=True) for t in (g * x, g)))


def _gradient(forward: Any, gs: tuple[Optional, ...]) -> dict[int, popxl.Tensor]:
    """Normalisation gradients from one op; statistics contribute no gradient."""
    op = forward.op
    if gs[0] is None:
        return {}
    operands = dict(zip(op.operand_names(), op.inputs, strict=True))
    affine = [operands[name].shape for name in ("weight", "bias") if name in operands]
    weight = forward.read(operands["weight"]) if "weight" in operands else None
    made = _normalise_grad(
        gs[0],
        forward.read(operands["input"]),
        *map(forward.read, op.outputs[1:]),
        weight,
        axes=op.attributes["axes"],
        spread=tuple(axis for axis, size in enumerate(affine[0]) if size == 1) if affine else None,
        eps=op.attributes["eps"],
    )
    gradients = dict(zip(("input", "weight", "bias"), made, strict=False))
    return {i: cast_like(gradients[name], t.dtype) for i, (name, t) in enumerate(operands.items()) if forward.wants(i)}


def _normalised_again(
    mean: popxl.Tensor, var: popxl.Tensor, *, input: popxl.Tensor, axes: tuple[int, ...], **how: Any
) -> popxl.Tensor:
    return cast_like(_normalised_by(input=input, mean=mean, var=var, **how), input.dtype)


_normalise = jax_op(
    title="Normalise",
    gradient=_gradient,
    result=("normalised", "mean", "variance"),
    traits=[RecomputedFrom((1, 2), _normalised_again)],
)(_normalised)
_normalise_grad = jax_op(title="NormaliseGrad")(_backward)


def _shaped(shape: Sequence[int], *tensors: Optional) -> tuple[Optional, ...]:
    return tuple(None if t is None else ops.reshape(t, tuple(shape)) for t in tensors)


def _by_channel(input: popxl.Tensor) -> tuple[int, ...]:
    """Shape of a per-channel tensor that broadcasts against the input."""
    return (1, -1, *(1,) * (len(input.shape) - 2))


# Layers and groups ----------------------------------------------------------------------------------------------------


@lowers("torch.layer_norm")
def layer_norm(
    input: popxl.Tensor, normalized_shape: Sequence[int], weight: Optional, bias: Optional, eps: float, **backend: Any
) -> popxl.Tensor:
    rank, n = len(input.shape), len(normalized_shape)
    weight, bias = _shaped((*(1,) * (rank - n), *normalized_shape), weight, bias)
    out, _, _ = _normalise(input, weight, bias, axes=tuple(range(rank - n, rank)), eps=eps)
    return out


@lowers("torch.group_norm")
def group_norm(
    input: popxl.Tensor, num_groups: int, weight: Optional, bias: Optional, eps: float, **backend: Any
) -> popxl.Tensor:
    batch, channels, *sizes = input.shape
    grouped = ops.reshape(input, (batch, num_groups, channels // num_groups, *sizes))
    weight, bias = _shaped((1, num_groups, channels // num_groups, *(1,) * len(sizes)), weight, bias)
    out, _, _ = _normalise(grouped, weight, bias, axes=tuple(range(2, len(grouped.shape))), eps=eps)
    return ops.reshape(out, input.shape)


# PyTorch's internal ops, which return the mean and the reciprocal deviation. Those of groups have gradients.


@lowers("aten.native_layer_norm")
def native_layer_norm(
    input: popxl.Tensor, normalized_shape: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[popxl.Tensor, ...]:
    axes = tuple(range(len(input.shape) - len(normalized_shape), len(input.shape)))
    statistics = map(ops.detach, _statistics(input, axes=axes, eps=eps))
    return layer_norm(input, normalized_shape, weight, bias, eps), *statistics


@lowers("aten.native_group_norm")
def native_group_norm(
    input: popxl.Tensor, weight: Optional, bias: Optional, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[popxl.Tensor, ...]:
    by_group = ops.reshape(input, (N, group, -1))
    return group_norm(input, group, weight, bias, eps), *_statistics(by_group, axes=(2,), eps=eps)


@jax_op(title="Statistics")
def _statistics(input: Any, *, axes: tuple[int, ...], eps: float) -> tuple[Any, Any]:
    _, mean, var = _normalised(input, axes=axes, eps=eps)
    return mean, lax.rsqrt(var + eps)


@lowers("torch.rms_norm")
def rms_norm(input: popxl.Tensor, normalized_shape: Sequence[int], weight: Optional, eps: float | None) -> popxl.Tensor:
    rank = len(input.shape)
    eps = float(np.finfo(np.float32).eps) if eps is None else eps
    return _rms_norm(input, weight, axes=tuple(range(rank - len(normalized_shape), rank)), eps=eps)


@jax_op(title="RmsNorm", shape=like_first)
@round_once
def _rms_norm(input: Any, weight: Any = None, *, axes: tuple[int, ...], eps: float) -> Any:
    return _scaled(input * lax.rsqrt((input * input).mean(axes, keepdims=True) + eps), weight, None)


# With running statistics ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BatchStatistics:
    """Axes of batch statistics, and how they update running statistics."""

    axes: tuple[int, ...]
    momentum: float | popxl.Tensor = 0.0


def _by_statistics(
    input: popxl.Tensor,
    weight: Optional,
    bias: Optional,
    eps: float,
    running_mean: Optional = None,
    running_var: Optional = None,
    batch: _BatchStatistics | None = None,
) -> tuple[popxl.Tensor, ...]:
    """Normalise by batch statistics, and update running statistics; without the former, normalise by the latter."""
    weight, bias = _shaped(_by_channel(input), weight, bias)
    if batch is None:
        mean, var = _shaped(_by_channel(input), running_mean, running_var)
        return (_normalised_by(input, mean, var, weight, bias, eps=eps),)
    out, mean, var = _normalise(input, weight, bias, axes=batch.axes, eps=eps)
    count = math.prod(input.shape[axis] for axis in batch.axes)
    updated = [out]
    for running, new, scale in ((running_mean, mean, 1), (running_var, var, count / max(count - 1, 1))):
        if running is not None:
            per_channel = ops.mean(new, (0, *range(2, len(new.shape))))
            old = cast_like(running, popxl.float32)
            updated.append(old + (per_channel * scale - old) * batch.momentum)
    return tuple(updated)


def _of_channels(input: popxl.Tensor) -> tuple[int, ...]:
    """Axes of the channels' elements: all but the channel axis."""
    return (0, *range(2, len(input.shape)))


@lowers("torch.batch_norm")
def batch_norm(
    input: popxl.Tensor, training: bool, momentum: float | popxl.Tensor, cudnn_enabled: bool = True, **by: Any
) -> tuple[popxl.Tensor, ...]:
    return _by_statistics(input, batch=_BatchStatistics(_of_channels(input), momentum) if training else None, **by)


@lowers("torch.instance_norm")
def instance_norm(
    input: popxl.Tensor, use_input_stats: bool, momentum: float, cudnn_enabled: bool = True, **by: Any
) -> tuple[popxl.Tensor, ...]:
    batch = _BatchStatistics(tuple(range(2, len(input.shape))), momentum)
    return _by_statistics(input, batch=batch if use_input_stats else None, **by)


@lowers("aten._native_batch_norm_legit.no_stats")
def native_batch_norm(
    input: popxl.Tensor, training: bool, momentum: float, eps: float, **affine: Any
) -> tuple[popxl.Tensor, ...]:
    axes = _of_channels(input)
    (out,) = _by_statistics(input, eps=eps, batch=_BatchStatistics(axes), **affine)
    return out, *map(ops.detach, _statistics(input, axes=axes, eps=eps))


@lowers("torch.native_batch_norm")
def native_batch_norm_with_statistics(
    input: popxl.Tensor, training: bool, eps: float, **given: Any
) -> tuple[popxl.Tensor, ...]:
    out, *updated = batch_norm(input, training=training, eps=eps, **given)
    if not training:
        return (out,)
    return out, *map(ops.detach, _statistics(input, axes=_of_channels(input), eps=eps)), *updated


@lowers("aten._native_batch_norm_legit_no_training")
def native_batch_norm_by_statistics(input: popxl.Tensor, momentum: float, **by: Any) -> tuple[popxl.Tensor, ...]:
    return _by_statistics(input, **by)


@jax_op(title="NormaliseByStatistics")
def _normalised_by(input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *, eps: float) -> Any:
    mean, var = widen(mean), widen(var)
    return _scaled((widen(input) - mean) * lax.rsqrt(var + eps), weight, bias)


# Of slices ------------------------------------------------------------------------------------------------------------


def _norms(input: Any, p: float, dim: int) -> Any:
    """Norm of each slice along an axis, with dimensions kept."""
    axes = tuple(axis for axis in range(input.ndim) if axis != dim % input.ndim)
    return jnp.expand_dims(norm(input, float(p), axes), axes)


@jax_op("aten._weight_norm_interface", title="WeightNorm")
@round_once
def weight_norm(v: Any, g: Any, *, dim: int = 0) -> tuple[Any, Any]:
    norms = _norms(v, 2, dim)
    return v * (g / norms), norms


def renormed(input: Any, *, p: float, dim: int, maxnorm: float) -> Any:
    """Slices along an axis, scaled down to norm `maxnorm` if larger."""
    norms = _norms(input, p, dim)
    return input * jnp.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)


jax_op("aten.renorm", title="Renorm")(round_once(renormed))
