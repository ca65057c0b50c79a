"""Softmax and the losses on it."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp

from popxl import dtypes
from popxl.create import constant
from popxl.errors import PopxlError
from popxl.op import OpKind
from popxl.ops.families import widened
from popxl.shapes import integer, like_first, one_axis
from popxl.spec import TensorSpec
from popxl.tensor import Tensor

REDUCTION_TYPE = Literal["mean", "sum", "none"]

# Softmax ------------------------------------------------------------------------------------------------------------


def _rows(t: Any, axis: int) -> Any:
    """The tensor as a matrix: dimensions before `axis`, and `axis` with all that follow."""
    axis %= t.ndim
    return t.reshape(math.prod(t.shape[:axis]), math.prod(t.shape[axis:]))


def _softmax_lowering(t: Any, *, axis: int) -> Any:
    rows = _rows(widened(t), axis)
    e = jnp.exp(rows - rows.max(axis=1, keepdims=True))
    return (e / e.sum(axis=1, keepdims=True)).reshape(t.shape)


def _softmax_backward(g: Any, out: Any, *, axis: int) -> Any:
    y, dy = _rows(widened(out), axis), _rows(widened(g), axis)
    return (y * (dy - (y * dy).sum(axis=1, keepdims=True))).reshape(g.shape)


def _has_axis(t: Any, *, axis: int) -> TensorSpec:
    one_axis(axis, len(t.shape))
    return like_first(t)


_softmax_grad = OpKind("SoftmaxGrad", _softmax_backward, shape=like_first)
_softmax = OpKind(
    "Softmax",
    _softmax_lowering,
    shape=_has_axis,
    gradient={"t": lambda g, out, axis: _softmax_grad(g, out, axis=axis)},
)


def softmax(t: Tensor, axis: int) -> Tensor:
    """exp(t) divided by its sum over `axis` and all dimensions after it.

    For the last axis this is the usual softmax. For another it normalises over everything from that axis on, as PopXL
    does, and not along that axis alone.

    Args:
        t: tensor of rank 1 or more.
        axis: the first dimension to normalise over; negative ones count from the back.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        PopxlError: if there is no such axis.

    See also: `torch.nn.functional.softmax`.

    Example:
        >>> probs = ops.softmax(logits, axis=-1)
    """
    return _softmax(t, axis=integer(axis, "softmax: `axis`"))


# Negative log likelihood --------------------------------------------------------------------------------------------


def _terms(probs: Any, labels: Any, ignore_index: int | None) -> tuple[Any, Any, Any, Any]:
    """Rows of probabilities, one-hot labels, 1 for each label that counts, and how many count."""
    rows, flat = probs.reshape(-1, probs.shape[-1]), labels.reshape(-1).astype(jnp.int32)
    hot = flat[:, None] == jnp.arange(rows.shape[1])
    if ignore_index is None:
        return rows, hot, jnp.ones(flat.shape, probs.dtype), flat.shape[0]
    counts = flat != ignore_index
    return rows, hot, counts.astype(probs.dtype), jnp.maximum(counts.sum(), 1)


def _wide(array: Any) -> Any:
    """The dtype that sums are made in: float32, or float64 where that is what there is."""
    return jnp.promote_types(array.dtype, jnp.float32)


def _reduced(losses: Any, labels: Any, count: Any, reduction: str, dtype: Any) -> Any:
    if reduction == "none":
        return losses.reshape(labels.shape)
    total = losses.astype(_wide(losses)).sum()
    return (total / count if reduction == "mean" else total).astype(dtype)


def _smallest(dtype: Any, float32: float) -> Any:
    """The probability below which the logarithm is flat."""
    return jnp.asarray(6.104e-5 if dtype == jnp.float16 else float32, dtype)


def _nll_lowering(probs: Any, labels: Any, *, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    rows, hot, counts, count = _terms(probs, labels, ignore_index)
    picked = jnp.where(hot, rows, 0).sum(axis=1)
    logs = picked if log_prob else jnp.log(jnp.maximum(picked, _smallest(probs.dtype, 1e-7)))
    return _reduced(-logs * counts, labels, count, reduction, probs.dtype)


def _nll_backward(g: Any, probs: Any, labels: Any, *, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    rows, hot, counts, count = _terms(probs, labels, ignore_index)
    slope = jnp.where(hot, -1.0 if log_prob else -1 / jnp.maximum(rows, _smallest(probs.dtype, 1e-10)), 0)
    wide = _wide(probs)
    scale = g.astype(wide).reshape(-1, 1) / (count if reduction == "mean" else 1)
    return (slope.astype(wide) * counts[:, None] * scale).reshape(probs.shape).astype(probs.dtype)


def _loss_spec(probs: Any, labels: Any, *, reduction: str, **how: Any) -> TensorSpec:
    if not probs.shape or labels.shape != probs.shape[:-1]:
        raise PopxlError("`probs` has one dimension, the classes, more than `labels`, and agrees with it otherwise.")
    return TensorSpec(labels.shape if reduction == "none" else (), probs.dtype)


def _nll_spec(probs: Any, labels: Any, **how: Any) -> TensorSpec:
    if not labels.dtype.is_int:
        raise PopxlError(f"labels are integers; these are {labels.dtype.name}.")
    return _loss_spec(probs, labels, **how)


_nll_grad = OpKind("NllGrad", _nll_backward, shape=lambda g, probs, labels, **how: like_first(probs))
_nll = OpKind(
    "Nll",
    _nll_lowering,
    shape=_nll_spec,
    result="loss",
    gradient={
        "probs": lambda g, probs, labels, ignore_index, reduction, log_prob: _nll_grad(
            g, probs, labels, ignore_index=ignore_index, reduction=reduction, log_prob=log_prob
        )
    },
)


def _fused_lowering(
    probs: Any, labels: Any, loss_grad: Any, *, ignore_index: int | None, reduction: str
) -> tuple[Any, Any]:
    rows, hot, counts, count = _terms(probs, labels, ignore_index)
    picked = jnp.where(hot, rows, 0).sum(axis=1)
    loss = _reduced(-jnp.log(picked + jnp.asarray(1e-7, probs.dtype)) * counts, labels, count, reduction, probs.dtype)
    wide = _wide(probs)
    scale = loss_grad.astype(wide).reshape(-1, 1) / (count if reduction == "mean" else 1)
    dx = (rows - hot.astype(probs.dtype)).astype(wide) * counts[:, None] * scale
    return loss, dx.reshape(probs.shape).astype(probs.dtype)


_fused = OpKind(
    "NlllWithSoftmaxGradDirect",
    _fused_lowering,
    shape=lambda probs, labels, loss_grad, **how: (_loss_spec(probs, labels, **how), like_first(probs)),
    result=("loss", "dx"),
    gradient=None,
)


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: `reduction` is {reduction!r}; expected 'mean', 'sum' or 'none'.")


def nll_loss(
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
    log_prob: bool = False,
) -> Tensor:
    """Negative log likelihood of the labels: -log(probs[..., label]).

    Probabilities below 1e-7 (float16: 6.104e-5) count as that; the gradient divides by no less than 1e-10 (6.104e-5).

    Args:
        probs: probabilities of shape `(..., C)`; the classes are the last dimension.
        labels: integer tensor of shape `(...)`. A label outside `[0, C)` picks a probability of 0. No gradient.
        ignore_index: labels with this value contribute nothing, and do not count in the mean.
        reduction: `"mean"` over the labels that count, `"sum"`, or `"none"`.
        log_prob: `probs` holds logarithms of probabilities.

    Returns:
        The loss, of the dtype of `probs`: a scalar, or of the shape of `labels` for `"none"`.

    Raises:
        ValueError: for another `reduction`.
        PopxlError: if the shapes do not fit, or the labels are not integers.

    See also: `torch.nn.functional.nll_loss`.

    Example:
        >>> loss = ops.nll_loss(ops.softmax(logits, axis=-1), labels)
    """
    _check_reduction("nll_loss", reduction)
    return _nll(probs, labels, ignore_index=ignore_index, reduction=reduction, log_prob=log_prob)


def nll_loss_with_softmax_grad(
    probs: Tensor,
    labels: Tensor,
    loss_grad: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of the labels, and its gradient with respect to the logits, in one op.

    With `probs = softmax(x, axis=-1)` the gradient with respect to `x` is `loss_grad * (probs - onehot(labels))`,
    divided by the number of labels that count for `"mean"`. The loss is -log(probs[..., label] + 1e-7).

    Args:
        probs: probabilities of shape `(..., C)`.
        labels: integer tensor of shape `(...)`.
        loss_grad: the gradient of the loss, a loss scale for example: a number, a scalar tensor, or for `"none"` a
            tensor of the shape of `labels`.
        ignore_index: labels with this value contribute nothing, and do not count in the mean.
        reduction: `"mean"` over the labels that count, `"sum"`, or `"none"`.

    Returns:
        `(loss, dx)`: the loss as from `nll_loss`, not scaled; the gradient, like `probs`. No gradient flows through.

    Raises:
        ValueError: for another `reduction`.
        PopxlError: if the shapes do not fit.

    Example:
        >>> loss, dx = ops.nll_loss_with_softmax_grad(ops.softmax(x, axis=-1), labels, loss_grad=64)
    """
    _check_reduction("nll_loss_with_softmax_grad", reduction)
    if not isinstance(loss_grad, Tensor):
        double = isinstance(probs, Tensor) and probs.dtype is dtypes.float64
        loss_grad = constant(loss_grad, dtypes.float64 if double else dtypes.float32)
    return _fused(probs, labels, loss_grad, ignore_index=ignore_index, reduction=reduction)


__all__ = ["REDUCTION_TYPE", "nll_loss", "nll_loss_with_softmax_grad", "softmax"]
