"""Losses: one loss per element or batch row, then a mean or sum.

Functions of arrays here are differentiated by JAX. They use `where` instead of `maximum` to have PyTorch's slope at the
corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import xlogy

import popxl
from poptorch.base.logging_ import logger
from poptorch.capture.logit_chunks import Chunks
from poptorch.lowering.emission import wanted
from poptorch.lowering.linalg import linear
from poptorch.lowering.nn import log_softmax
from poptorch.lowering.operands import Optional, cast_like
from poptorch.lowering.reductions import norm
from poptorch.lowering.registry import jax_op, lowers
from popxl import OpKind, ops
from popxl.extend.kernels import round_once, widen
from popxl.extend.ops import is_fused, logit_chunks

# Reductions -----------------------------------------------------------------------------------------------------------


def reduced(losses: popxl.Tensor, reduction: str, shares: Optional = None) -> popxl.Tensor:
    """Reduce elementwise losses.

    Args:
        reduction: `"mean"`, `"sum"`, `"none"`, `"batchmean"`.
        shares: weights of the losses in the mean: their sum is the divisor, instead of the number of losses.
    """
    if reduction == "mean":
        return ops.mean(losses) if shares is None else ops.sum(losses) / ops.sum(shares)
    if reduction == "batchmean":
        return ops.sum(losses) / (losses.shape[0] if losses.shape else 1)
    return ops.sum(losses) if reduction == "sum" else ops.identity(losses)


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """The effective reduction, including PyTorch's legacy arguments."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


Losses = popxl.Tensor | tuple[popxl.Tensor, popxl.Tensor]
"""Losses of all elements, perhaps with their shares in the mean."""

F = TypeVar("F", bound=Callable[..., Any])


def _reduced(losses: Losses, reduction: str) -> popxl.Tensor:
    """Reduce losses with their shares in the mean, if they have any."""
    each, shares = losses if isinstance(losses, tuple) else (losses, None)
    return reduced(each, reduction, shares)


def _reducing(name: str) -> Callable[[F], F]:
    """Declare a function of tensors that gives losses, or losses and their shares in the mean, as a loss."""

    def declare(losses: F) -> F:
        @lowers(f"torch.{name}")
        def lowering(
            reduction: str = "mean", size_average: bool | None = None, reduce: bool | None = None, **arguments: Any
        ) -> popxl.Tensor:
            return _reduced(losses(**arguments), _reduction(reduction, size_average, reduce))

        return losses

    return declare


def _loss(losses: Callable[..., Any]) -> OpKind:
    """Declare a loss named after an array function with elementwise losses; float16 inputs become float32."""
    return _reducing(losses.__name__)(jax_op()(round_once(losses)))


@lowers("poptorch.identity_loss")
def identity_loss(x: popxl.Tensor, reduction: str) -> popxl.Tensor:
    return reduced(x, reduction)


# Distances to a target ------------------------------------------------------------------------------------------------


def _of_differences(name: str, error: Callable[[popxl.Tensor], popxl.Tensor]) -> None:
    """Declare a loss of differences; optional weights also divide its mean."""

    @_reducing(name)
    def losses(input: popxl.Tensor, target: popxl.Tensor, weight: Optional = None) -> Losses:
        input, target = (cast_like(t, popxl.float32) for t in (input, target))
        if weight is None:
            return error(input - target)
        weight = cast_like(weight, popxl.float32)
        return error(input - target) * weight, weight


_of_differences("mse_loss", lambda difference: difference * difference)
_of_differences("l1_loss", ops.abs)


def _distance(input: Any, target: Any) -> Any:
    """Absolute difference with derivative 0 at 0; the derivative of JAX's `abs` varies between releases."""
    difference = input - target
    return difference * jax.lax.stop_gradient(jnp.sign(difference))


@_loss
def smooth_l1_loss(input: Any, target: Any, *, beta: float) -> Any:
    distance = _distance(input, target)
    if beta == 0:
        return distance
    near = jnp.where(distance < beta, distance, 0)  # finite, for the gradient of the other branch
    return jnp.where(distance < beta, near * near / (2 * beta), distance - beta / 2)


@_loss
def huber_loss(input: Any, target: Any, weight: Any = None, *, delta: float) -> Any:
    distance = _distance(input, target)
    near = jnp.where(distance <= delta, distance, 0)
    losses = jnp.where(distance <= delta, near * near / 2, delta * (distance - delta / 2))
    return losses if weight is None else losses * weight


@_loss
def poisson_nll_loss(input: Any, target: Any, *, log_input: bool, full: bool, eps: float) -> Any:
    losses = jnp.exp(input) - target * input if log_input else input - target * jnp.log(input + eps)
    if not full:
        return losses
    large = jnp.where(target > 1, target, 2)  # the range of Stirling's formula
    stirling = large * jnp.log(large) - large + jnp.log(2 * math.pi * large) / 2
    return losses + jnp.where(target > 1, stirling, 0)


@_loss
def kl_div(input: Any, target: Any, *, log_target: bool) -> Any:
    return jnp.exp(target) * (target - input) if log_target else xlogy(target, target) - target * input


@_reducing("gaussian_nll_loss")
def gaussian_nll_loss(
    input: popxl.Tensor, target: popxl.Tensor, var: popxl.Tensor | float, full: bool, eps: float
) -> popxl.Tensor:
    var = cast_like(var, popxl.float32)
    if var.shape and var.shape == input.shape[:-1]:
        var = ops.reshape(var, (*var.shape, 1))
    return _gaussian(input, target, var, full=full, eps=eps)


@jax_op(title="GaussianNllLoss")
def _gaussian(input: Any, target: Any, var: Any, *, full: bool, eps: float) -> Any:
    difference = widen(input) - widen(target)
    var = var + jax.lax.stop_gradient(jnp.maximum(var, eps) - var)  # a slope below `eps`, too
    losses = (jnp.log(var) + difference * difference / var) / 2
    return losses + math.log(2 * math.pi) / 2 if full else losses


# Of two classes -------------------------------------------------------------------------------------------------------


def _above(x: Any) -> Any:
    """ReLU with derivative 1 at 0, for losses based on PyTorch's `clamp`; multi-class losses use 0 instead."""
    return jnp.where(jnp.isnan(x), lax.stop_gradient(x), jnp.where(x >= 0, x, 0))


@_loss
def soft_margin_loss(input: Any, target: Any) -> Any:
    return jax.nn.softplus(-target * input)


@_loss
def hinge_embedding_loss(input: Any, target: Any, *, margin: float) -> Any:
    return jnp.where(target != 1, _above(margin - input), 0) + jnp.where(target != -1, input, 0)


@_loss
def margin_ranking_loss(input1: Any, input2: Any, target: Any, *, margin: float) -> Any:
    return _above(margin - target * (input1 - input2))


@_loss
def binary_cross_entropy(input: Any, target: Any, weight: Any = None) -> Any:
    losses = _cross_entropy_of_two(input, target)
    return losses if weight is None else losses * weight


@jax.custom_jvp
def _cross_entropy_of_two(input: Any, target: Any) -> Any:
    """Binary cross entropy with logarithms clamped at -100; derivatives ignore the clamp, as in PyTorch."""
    log, opposite = jnp.maximum(jnp.log(input), -100), jnp.maximum(jnp.log1p(-input), -100)
    return -(target * log + (1 - target) * opposite)


@_cross_entropy_of_two.defjvp
def _slope(operands: Any, changes: Any) -> Any:
    input, target = operands
    of_input = (input - target) / jnp.maximum(input * (1 - input), 1e-12)
    of_target = jnp.log1p(-input) - jnp.log(input)
    return _cross_entropy_of_two(input, target), of_input * changes[0] + of_target * changes[1]


@_loss
def binary_cross_entropy_with_logits(input: Any, target: Any, weight: Any = None, pos_weight: Any = None) -> Any:
    positive = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    losses = (1 - target) * input + positive * jax.nn.softplus(-input)
    return losses if weight is None else losses * weight


# Of vectors -----------------------------------------------------------------------------------------------------------


@_loss
def cosine_embedding_loss(input1: Any, input2: Any, target: Any, *, margin: float) -> Any:
    squares = ((each * each).sum(-1) + 1e-12 for each in (input1, input2))
    cosine = (input1 * input2).sum(-1) / jnp.sqrt(math.prod(squares))
    return jnp.where(target == 1, 1 - cosine, 0) + jnp.where(target == -1, _above(cosine - margin), 0)


@_loss
def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, *, margin: float, p: float, eps: float, swap: bool
) -> Any:
    def distance(one: Any, other: Any) -> Any:
        difference = one - other + eps
        return norm(difference, float(p), (difference.ndim - 1,))

    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = jnp.minimum(far, distance(positive, negative))
    return _above(margin + near - far)


# Multi-class losses ---------------------------------------------------------------------------------------------------


@_loss
def multilabel_soft_margin_loss(input: Any, target: Any, weight: Any = None) -> Any:
    losses = -(target * jax.nn.log_sigmoid(input) + (1 - target) * jax.nn.log_sigmoid(-input))
    return (losses if weight is None else losses * weight).mean(-1)


@_loss
def multilabel_margin_loss(input: Any, target: Any) -> Any:
    input, target = jnp.atleast_1d(input), jnp.atleast_1d(target)
    classes = input.shape[-1]
    named = jnp.cumsum(target < 0, -1) == 0  # up to the first -1
    hits = (target[..., None] == jnp.arange(classes)) & named[..., None]
    distances = jax.nn.relu(
        1 - jnp.take_along_axis(input, jnp.where(named, target, 0), -1)[..., None] + input[..., None, :]
    )
    counts = named[..., None] & ~hits.any(-2, keepdims=True)
    return jnp.where(counts, distances, 0).sum((-2, -1)) / classes


@_loss
def multi_margin_loss(input: Any, target: Any, weight: Any = None, *, p: int, margin: float) -> Any:
    input = jnp.atleast_1d(input)
    hit = target[..., None] == jnp.arange(input.shape[-1])
    distances = margin - jnp.where(hit, input, 0).sum(-1, keepdims=True) + input
    distances = jnp.where(distances > 0, distances, 0) ** p  # including those that are NaN, as in PyTorch
    distances = distances if weight is None else distances * weight[target][..., None]
    return jnp.where(hit, 0, distances).mean(-1)


@_reducing("nll_loss")
def nll_loss(
    input: popxl.Tensor, target: popxl.Tensor, weight: Optional, ignore_index: int, label_smoothing: float = 0
) -> Losses:
    target = cast_like(target, popxl.int32)
    return _nll(input, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing)


@_reducing("cross_entropy")
def cross_entropy(
    input: popxl.Tensor, target: popxl.Tensor, weight: Optional, ignore_index: int, label_smoothing: float
) -> Losses:
    axis = _class_axis(input)
    logs = log_softmax(input, axis)
    if target.dtype.is_floating_point:
        return _of_probabilities(logs, target, weight, axis=axis, label_smoothing=label_smoothing)
    return nll_loss(logs, target, weight, ignore_index, label_smoothing)


@lowers("torch.linear_cross_entropy")
def linear_cross_entropy(
    input: popxl.Tensor,
    linear_weight: popxl.Tensor,
    target: popxl.Tensor,
    linear_bias: Optional,
    weight: Optional,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    options: Any,
) -> popxl.Tensor:
    ignored = -100 if ignore_index is None else ignore_index
    is_plain = len(linear_weight.shape) == 2 and weight is None and label_smoothing == 0
    if reduction != "none" and is_plain and target.dtype.is_int:
        classes, width = linear_weight.shape
        chunks = _chunk_count(max(1, target.nelms), classes, width, options)
        if chunks > 1 or options is not None or is_fused(target.nelms, classes):
            return _in_chunks(input, linear_weight, linear_bias, target, reduction, ignored, chunks)
    elif reduction != "none" and options is not None:
        logger.warning(
            "linear_cross_entropy: `options` have no effect here: the loss is computed in chunks for a weight of two "
            "dimensions and targets that are class indices, without class weights and label smoothing."
        )
    *results, width = linear_weight.shape  # of each class, and perhaps of more dimensions
    bias = None if linear_bias is None else ops.flatten(linear_bias)
    logits = linear(input, ops.reshape(linear_weight, (-1, width)), bias)
    logits = ops.reshape(logits, (*input.shape[:-1], *results))
    return _reduced(cross_entropy(logits, target, weight, ignored, label_smoothing), reduction)


def _in_chunks(
    input: popxl.Tensor,
    linear_weight: popxl.Tensor,
    linear_bias: Optional,
    target: popxl.Tensor,
    reduction: str,
    ignored: int,
    chunks: int,
) -> popxl.Tensor:
    """Cross entropy without all logits at a time."""
    bias = None if linear_bias is None else cast_like(linear_bias, input.dtype)
    weight, labels = ops.transpose(cast_like(linear_weight, input.dtype)), cast_like(target, popxl.int32)
    total = ops.linear_cross_entropy(input, weight, labels, ignored, "sum", chunks, bias)
    if reduction == "mean":
        total = total / ops.sum(ops.cast(ops.logical_not(ops.equal(labels, ignored)), total.dtype))
    return cast_like(total, wanted().dtype)


def _chunk_count(samples: int, classes: int, width: int, options: Any) -> int:
    """Number of chunks: by default, or by `torch.nn.LinearCrossEntropyOptions`."""
    if options is None:
        return logit_chunks(samples, classes)
    if isinstance(options, Chunks):
        return options.number
    return -(-samples // _chunk_size(samples, classes, width, options))


def _chunk_size(samples: int, classes: int, width: int, options: Any) -> int:
    """Samples of a chunk: by `"aspect_ratio:N"`, chunks with an N-th of as many logits as the input has elements.

    `"auto"` means N = 1, on any device: compiled for an H100 and a v5e, a step moves 0.6 times the bytes of N = 2, and
    needs as much memory.
    """
    method = "aspect_ratio" if options.chunking_method == "auto" else options.chunking_method
    if options.batch_chunk_size is not None or method is None:
        return options.batch_chunk_size or samples
    _, _, divisor = method.partition(":")
    size = math.ceil(samples / math.ceil(classes / width))
    return max(1, 2 ** math.ceil(math.log2(size)) // int(divisor or 1))


def _class_axis(input: Any) -> int:
    return 0 if len(input.shape) == 1 else 1


def _column(vector: Any, logs: Any) -> Any:
    """Broadcast a per-class vector against the logarithms."""
    return vector.reshape(-1, *(1,) * (logs.ndim - 1 - _class_axis(logs)))


@jax_op(title="SoftCrossEntropy")
def _of_probabilities(logs: Any, target: Any, weight: Any = None, *, axis: int, label_smoothing: float) -> Any:
    smooth = widen(target) * (1 - label_smoothing) + label_smoothing / logs.shape[axis]
    smooth = smooth if weight is None else smooth * _column(widen(weight), logs)
    return -(smooth * widen(logs)).sum(axis)


def _shares(logs: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float) -> tuple[Any, Any, Any]:
    """Weight of each logarithm in its element's loss, a mask of contributing logarithms, and element weights in the
    mean.

    A weight of 0 counts: its product with infinity is not a number, nor is the mean over no weight.
    """
    axis, classes = _class_axis(logs), logs.shape[_class_axis(logs)]
    by_class = jnp.ones(classes, jnp.float32) if weight is None else widen(weight)
    counts = target != ignore_index
    shares = jnp.where(counts, by_class[jnp.where(counts, target, 0)], 0)
    column = _column(jnp.arange(classes), logs)
    counts = jnp.expand_dims(counts, axis)
    is_meant = counts & (column == jnp.expand_dims(target, axis))
    of_logs = jnp.where(is_meant, jnp.expand_dims(shares, axis), 0)
    if not label_smoothing:
        return of_logs, is_meant, shares
    everywhere = jnp.where(counts, _column(by_class, logs) / classes, 0)
    return of_logs * (1 - label_smoothing) + everywhere * label_smoothing, counts, shares


@jax_op(title="NllGrad")
def _nll_grad(g: Any, logs: Any, target: Any, weight: Any = None, *, ignore_index: int, label_smoothing: float) -> Any:
    of_logs, counts, _ = _shares(logs, target, weight, ignore_index, label_smoothing)
    # Not a product: the mean over no elements is not a number.
    return jnp.where(counts, -of_logs * jnp.expand_dims(g, _class_axis(logs)), 0)


@jax_op(
    title="Nll",
    gradient={
        "logs": lambda g, logs, target, weight, ignore_index, label_smoothing: _nll_grad(
            g, logs, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
    },
    result=("losses", "shares"),
)
def _nll(logs: Any, target: Any, weight: Any = None, *, ignore_index: int, label_smoothing: float) -> tuple[Any, Any]:
    """Loss per element, and element weights for the mean. Elements without a class cost nothing."""
    of_logs, counts, shares = _shares(logs, target, weight, ignore_index, label_smoothing)
    # Not a product: ignored elements may be infinite.
    return -jnp.where(counts, widen(logs) * of_logs, 0).sum(_class_axis(logs)), shares
