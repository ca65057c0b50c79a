"""Softmax and the losses on it."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.tensor import Tensor, taken_back_on_failure
from popxl.errors import PopxlError
from popxl.op import OpKind
from popxl.ops import sums
from popxl.ops.precision import wide_dtype, widened
from popxl.ops.sums import summed
from popxl.values.shapes import integer, like_first, one_axis
from popxl.values.spec import TensorSpec

REDUCTION_TYPE = Literal["mean", "sum", "none"]

# Softmax ------------------------------------------------------------------------------------------------------------


def _rows(t: Any, axis: int) -> Any:
    """The tensor as a matrix: dimensions before `axis`, and `axis` with all that follow."""
    axis %= t.ndim
    return t.reshape(math.prod(t.shape[:axis]), math.prod(t.shape[axis:]))


def _softmax_lowering(t: Any, *, axis: int) -> Any:
    return sums.softmax(_rows(widened(t), axis), 1).reshape(t.shape)


def _softmax_backward(g: Any, out: Any, *, axis: int) -> Any:
    y, dy = _rows(widened(out), axis), _rows(widened(g), axis)
    return (y * (dy - summed(y * dy, (1,), keepdims=True))).reshape(g.shape)


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


def _flat(labels: Any) -> Any:
    """The labels as a vector of signed integers. (So -100 is one of uint32, too.)"""
    return labels.reshape(-1).astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)


def _picked(probs: Any, labels: Any) -> Any:
    """For each of the flat labels, what it picks; 0 for a label out of range."""
    inside = (labels >= 0) & (labels < probs.shape[-1])
    rows = probs.reshape(-1, probs.shape[-1])
    picked = jnp.take_along_axis(rows, jnp.where(inside, labels, 0)[:, None], axis=1, mode="clip")
    return jnp.where(inside, picked[:, 0], 0).astype(wide_dtype(probs))


def _counted(labels: Any, ignore_index: int | None) -> tuple[Any, Any]:
    """Which of the flat labels count, and how many."""
    limits = np.iinfo(labels.dtype)
    if ignore_index is None or not limits.min <= ignore_index <= limits.max:
        return jnp.ones(labels.shape, bool), labels.size
    counts = labels != ignore_index
    return counts, jnp.maximum(counts.sum(), 1)


def _loss(logs: Any, labels: Any, ignore_index: int | None, reduction: str) -> Any:
    """The loss, from the logarithms of what the flat labels pick."""
    counts, count = _counted(labels, ignore_index)
    losses = jnp.where(counts, -logs, 0)  # not a product: what is ignored may be infinite
    if reduction == "none":
        return losses
    return losses.sum() / count if reduction == "mean" else losses.sum()


def _scale(g: Any, labels: Any, ignore_index: int | None, reduction: str, wide: Any) -> Any:
    """The incoming gradient of the loss of each flat label: none, for what is ignored."""
    counts, count = _counted(labels, ignore_index)
    g = g.reshape(-1).astype(wide)
    return jnp.where(counts, g / count if reduction == "mean" else g, 0)


def _hot(labels: Any, classes: int) -> Any:
    """The flat labels as rows of bools."""
    return labels[:, None] == jnp.arange(classes, dtype=labels.dtype)


def _smallest(dtype: Any, float32: float) -> float:
    """The probability below which the logarithm is flat."""
    return 6.104e-5 if dtype == jnp.float16 else float32


def _nll_lowering(probs: Any, labels: Any, *, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    flat = _flat(labels)
    picked = _picked(probs, flat)
    logs = picked if log_prob else jnp.log(jnp.maximum(picked, _smallest(probs.dtype, 1e-7)))
    return _loss(logs, flat, ignore_index, reduction).reshape(labels.shape if reduction == "none" else ())


def _nll_backward(g: Any, probs: Any, labels: Any, *, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    flat = _flat(labels)
    slope = -_scale(g, flat, ignore_index, reduction, wide_dtype(probs))
    if not log_prob:
        slope /= jnp.maximum(_picked(probs, flat), _smallest(probs.dtype, 1e-10))
    return jnp.where(_hot(flat, probs.shape[-1]), slope[:, None], 0).reshape(probs.shape)


def _loss_spec(probs: Any, labels: Any, *, reduction: str, **how: Any) -> TensorSpec:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` is {reduction!r}; expected 'mean', 'sum' or 'none'.")
    if not probs.shape or labels.shape != probs.shape[:-1]:
        raise PopxlError("`probs` has one dimension, the classes, more than `labels`, and agrees with it otherwise.")
    return TensorSpec(labels.shape if reduction == "none" else (), probs.dtype)


def _nll_spec(probs: Any, labels: Any, **how: Any) -> TensorSpec:
    spec = _loss_spec(probs, labels, **how)
    if not labels.dtype.is_int:
        raise PopxlError(f"labels are integers; these are {labels.dtype.name}. Convert them with `ops.cast`.")
    return spec


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
    flat = _flat(labels)
    loss = _loss(jnp.log(_picked(probs, flat) + 1e-7), flat, ignore_index, reduction)
    rows = probs.reshape(-1, probs.shape[-1]).astype(wide_dtype(probs))
    scale = _scale(loss_grad, flat, ignore_index, reduction, rows.dtype)
    dx = jnp.where(_hot(flat, rows.shape[1]), rows - 1, rows) * scale[:, None]
    return loss.reshape(labels.shape if reduction == "none" else ()), dx.reshape(probs.shape)


def _fused_specs(probs: Any, labels: Any, loss_grad: Any, **how: Any) -> tuple[TensorSpec, TensorSpec]:
    spec = _loss_spec(probs, labels, **how)
    if loss_grad.nelms != 1 and loss_grad.shape != labels.shape:
        raise PopxlError("`loss_grad` is one number, or for 'none' one for each label.")
    return spec, like_first(probs)


_fused = OpKind("NlllWithSoftmaxGradDirect", _fused_lowering, shape=_fused_specs, result=("loss", "dx"), gradient=None)


def _ignored(name: str, labels: Tensor, ignore_index: int | None) -> int | None:
    """The label to ignore, as `_flat` has it: of unsigned ones with as many bits the upper half is negative there."""
    if ignore_index is None:
        return None
    index = integer(ignore_index, f"{name}: `ignore_index`")
    if not isinstance(labels, Tensor) or labels.dtype not in (dtypes.uint32, dtypes.uint64):
        return index
    count = 2 ** (8 * labels.dtype.itemsize)
    return index - count if count // 2 <= index < count else index


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
    ignored = _ignored("nll_loss", labels, ignore_index)
    return _nll(probs, labels, ignore_index=ignored, reduction=reduction, log_prob=bool(log_prob))


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
    how: dict[str, Any] = {
        "ignore_index": _ignored("nll_loss_with_softmax_grad", labels, ignore_index),
        "reduction": reduction,
    }
    if isinstance(loss_grad, Tensor):
        return _fused(probs, labels, loss_grad, **how)
    double = isinstance(probs, Tensor) and probs.dtype is dtypes.float64
    with taken_back_on_failure(constant(loss_grad, dtypes.float64 if double else dtypes.float32)) as scale:
        return _fused(probs, labels, scale, **how)


__all__ = ["REDUCTION_TYPE", "nll_loss", "nll_loss_with_softmax_grad", "softmax"]
