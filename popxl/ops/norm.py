"""Normalisation: over a batch with given statistics, and over groups of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import REFUSED, RecomputedFrom, ShardingRule
from popxl.errors import PopxlError
from popxl.ops.elementwise import add
from popxl.ops.families import REAL
from popxl.ops.kernels.sums import rounded, summed
from popxl.ops.precision import wide_dtype
from popxl.values.shapes import integer, like_first, number, of_shape
from popxl.values.spec import TensorSpec

# Of a batch ---------------------------------------------------------------------------------------------------------


def _batch_norm_spec(t: Any, scale: Any, bias: Any, mean: Any, var: Any, *, epsilon: float) -> TensorSpec:
    if len(t.shape) < 3:
        raise PopxlError(
            f"expected `t` of rank 3 or more: batch, channels, and what they hold; it has rank {len(t.shape)}."
        )
    for name, vector in {"scale": scale, "bias": bias, "mean": mean, "var": var}.items():
        if vector.shape != t.shape[1:2]:
            raise PopxlError(f"expected `{name}` of shape ({t.shape[1]},), one number for each channel of `t`.")
    return like_first(t)


def _batch_norm(t: Any, scale: Any, bias: Any, mean: Any, var: Any, *, epsilon: float) -> Any:
    columns = (1, -1, *(1,) * (t.ndim - 2))
    scale, bias, mean, var = (v.astype(wide_dtype(t)).reshape(columns) for v in (scale, bias, mean, var))
    return (t.astype(wide_dtype(t)) - mean) * (scale / jnp.sqrt(var + epsilon)) + bias


_batch_normalization = OpKind(
    "BatchNormalization",
    _batch_norm,
    shape=_batch_norm_spec,
    result="batch_norm_out",
    gradient=REFUSED,
    traits=REAL,
)


def batch_norm_inference(
    t: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
) -> Tensor:
    """Normalise each channel with statistics that are known: `(t - mean) / sqrt(var + epsilon) * scale + bias`.

    This is the form for inference; autodiff refuses it. Computed in float32 and rounded once.

    Args:
        t: float tensor of shape `(N, C, D1, ...)`, rank 3 or more.
        scale, bias: tensors of shape `(C,)`.
        mean, var: tensors of shape `(C,)`; they may be float32 where `t` is float16 or bfloat16.
        epsilon: constant added to the variance.
        momentum: accepted, as it belongs to the training form; no effect.

    Returns:
        A new tensor of the shape and dtype of `t`.

    Raises:
        PopxlError: if `t` has less than 3 dimensions, or another operand not the shape `(C,)`.

    See also: `torch.nn.functional.batch_norm`.

    Example:
        >>> y = ops.batch_norm_inference(images, weight, bias, running_mean, running_var)
    """
    epsilon = float(number(epsilon, "batch_norm_inference: `epsilon`"))
    return _batch_normalization(t, scale, bias, mean, var, epsilon=epsilon)


# Of groups ----------------------------------------------------------------------------------------------------------


def _group_norm_specs(t: Any, weight: Any, bias: Any, *, num_groups: int, eps: float) -> tuple[TensorSpec, ...]:
    if len(t.shape) < 2:
        raise PopxlError(f"expected `t` of rank 2 or more: batch and channels; it has rank {len(t.shape)}.")
    statistics = TensorSpec((t.shape[0] * num_groups,), t.dtype)
    return like_first(t), statistics, statistics


def _rows(t: Any, num_groups: int) -> Any:
    """One row per sample and group, in the dtype for statistics.

    A matrix, because XLA reduces matrices fast.
    """
    return t.astype(wide_dtype(t)).reshape(t.shape[0] * num_groups, math.prod(t.shape[1:]) // num_groups)


def _channel_rows(vector: Any, t: Any, num_groups: int) -> Any:
    """Per-channel values of `t` as rows."""
    columns = vector.astype(wide_dtype(t)).reshape(-1, *(1,) * (t.ndim - 2))
    return _rows(jnp.broadcast_to(columns, t.shape), num_groups)


def _mean(rows: Any) -> Any:
    return summed(rows, (1,), keepdims=True) / rows.shape[1]


def _check_channels(t: Any, weight: Any, bias: Any, num_groups: int) -> None:
    """Check channel counts at run time; merely built programs may violate them."""
    channels = t.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"the {channels} channels of `t` cannot be divided into {num_groups} groups.")
    for name, vector in {"weight": weight, "bias": bias}.items():
        if vector.shape != (channels,):
            raise ValueError(
                f"`{name}` has the shape {vector.shape}; expected ({channels},), one number for each "
                "channel of `t`. To normalise over the last axis alone, make a matrix of `t` first."
            )


def _group_norm(t: Any, weight: Any, bias: Any, *, num_groups: int, eps: float) -> tuple[Any, Any, Any]:
    _check_channels(t, weight, bias, num_groups)
    x = _rows(t, num_groups)
    mean = _mean(x)
    x = x - mean
    inverse = lax.rsqrt(_mean(x * x) + eps)
    return _scaled(x * inverse, t, weight, bias, num_groups), mean.reshape(-1), inverse.reshape(-1)


def _scaled(x: Any, t: Any, weight: Any, bias: Any, num_groups: int) -> Any:
    return (x * _channel_rows(weight, t, num_groups) + _channel_rows(bias, t, num_groups)).reshape(t.shape)


def _standardised(t: Any, mean: Any, num_groups: int, eps: float) -> tuple[Any, Any]:
    """Rows of mean 0 and variance 1 from a known mean, and the inverse standard deviation.

    A rounded mean, in float16 for example, is only a first approximation: a sum of `x = t - mean` gives the rest, in
    the pass that sums its squares. The inverse standard deviation may be out of range there, and is recomputed: with an
    unrounded mean as in `_group_norm`, so that XLA computes it once for both.
    """
    x = _rows(t, num_groups)
    x = x - mean.astype(x.dtype)[:, None]
    variance = _mean(x * x)
    if mean.dtype != x.dtype:
        rest = _mean(x)
        x, variance = x - rest, jnp.maximum(variance - rest * rest, 0)
    inverse = lax.rsqrt(variance + eps)
    return x * inverse, inverse


def _group_norm_again(t: Any, weight: Any, bias: Any, mean: Any, *, num_groups: int, eps: float) -> Any:
    """The result from a known mean. Its inverse standard deviation is that of the gradient: XLA computes one."""
    x, _ = _standardised(t, mean, num_groups, eps)
    return _scaled(x, t, weight, bias, num_groups)


def _group_norm_backward(
    g: Any, t: Any, weight: Any, mean: Any, *, num_groups: int, eps: float
) -> tuple[Any, Any, Any]:
    """Gradients of `t`, `weight` and `bias`."""
    g = _rows(g, num_groups)
    x, inverse = _standardised(t, mean, num_groups, eps)

    def of_channels(rows: Any) -> Any:
        return summed(rows.reshape(t.shape), range(2, t.ndim))

    sums, products = of_channels(g), of_channels(g * x)
    level, slope = (summed(_rows(s * weight, num_groups), (1,), True) / x.shape[1] for s in (sums, products))
    dt = inverse * (_channel_rows(weight, t, num_groups) * g - level - x * slope)
    of_weight, of_bias = (rounded(summed(each, (0,)), weight.dtype) for each in (products, sums))
    return dt.reshape(t.shape), of_weight, of_bias


def _group_norm_gradient(forward: Any, gs: tuple[Tensor | None, ...]) -> dict[int, Tensor]:
    """One op makes all three. The mean has a gradient where this op is differentiated, which reads it."""
    op, (g, of_mean, _) = forward.op, gs
    found = {}
    if g is not None:
        t, weight, mean = (forward.read(x) for x in (*op.inputs[:2], op.outputs[1]))
        gradients = _group_normalization_grad(g, t, weight, mean, **op.attributes)
        found = {i: gradient for i, gradient in enumerate(gradients) if forward.wants(i)}
    if of_mean is not None and forward.wants(0):
        part = _group_norm_mean_grad(of_mean, shape=op.inputs[0].shape)
        found[0] = part if g is None else add(found[0], part)
    return found


def _shared_out(g: Any, *, shape: tuple[int, ...]) -> Any:
    """Distribute gradients of means evenly over row elements."""
    count = math.prod(shape) // g.size
    return jnp.broadcast_to(g[:, None] / count, (g.size, count)).reshape(shape)


def _by_sample(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    """Subscripts of `group_norm`: samples are independent; all else goes into statistics, of each sample and group."""
    t = "n" + "_" * (len(shapes[0]) - 1)
    return f"{t},_,_->{t},(ng),(ng)"


_group_norm_mean_grad = OpKind("GroupNormalizationMeanGrad", _shared_out, shape=of_shape)
_group_normalization_again = OpKind(
    "GroupNormalizationByMean",
    _group_norm_again,
    shape=like_first,
    result="group_norm_out",
    traits=REAL,
)
_group_normalization = OpKind(
    "GroupNormalization",
    _group_norm,
    shape=_group_norm_specs,
    gradient=_group_norm_gradient,
    result=("group_norm_out", "group_norm_mean", "group_norm_inv_std_dev"),
    traits=[
        *REAL,
        ShardingRule(_by_sample),
        RecomputedFrom((1,), lambda mean, **how: _group_normalization_again(mean=mean, **how)),
    ],
)
_group_normalization_grad = OpKind(
    "GroupNormalizationGrad",
    _group_norm_backward,
    shape=lambda g, t, weight, mean, **how: (like_first(t), like_first(weight), like_first(weight)),
    result=("group_norm_t_grad", "group_norm_weight_grad", "group_norm_bias_grad"),
)


def group_norm(t: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-5) -> Tensor:
    """Normalise groups of channels: `(t - mean) / sqrt(var + eps) * weight + bias`.

    For each sample and group, mean and variance are those of all that the group's channels hold. The variance is
    divided by the count. Computed in float32 and rounded once.

    Args:
        t: float tensor of shape `(N, C, ...)`.
        weight, bias: tensors of shape `(C,)`, one number for each channel.
        num_groups: number of groups of adjacent channels; it divides C.
        eps: constant added to the variance.

    Returns:
        A new tensor of the shape and dtype of `t`. Mean and inverse standard deviation are in the graph as well.

    Raises:
        PopxlError: if `t` has less than 2 dimensions; when the session is made, if `num_groups` does not divide C, or
            `weight` or `bias` has not the shape `(C,)`.

    See also: `torch.nn.functional.group_norm`.

    Example:
        >>> y = ops.group_norm(images, weight, bias, num_groups=2)
    """
    groups, epsilon = integer(num_groups, "group_norm: `num_groups`"), float(number(eps, "group_norm: `eps`"))
    out, *_ = _group_normalization(t, weight, bias, num_groups=groups, eps=epsilon)
    return out


def layer_norm(t: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """`group_norm` with a single group: normalization of whole samples.

    All dimensions but the first are normalised over, and the second holds the channels. To normalise over the last
    axis of a `(B, S, H)` tensor, make a `(B * S, H)` matrix of it first.

    Args:
        t: float tensor of shape `(N, C, ...)`.
        weight, bias: tensors of shape `(C,)`, one number for each channel.
        eps: constant added to the variance.

    Returns:
        A new tensor of the shape and dtype of `t`.

    Raises:
        PopxlError: if `t` has less than 2 dimensions; when the session is made, if `weight` or `bias` has not the
            shape `(C,)`.

    See also: `torch.nn.functional.layer_norm`.

    Example:
        >>> y = ops.layer_norm(x, weight, bias)
    """
    return group_norm(t, weight, bias, 1, eps)
