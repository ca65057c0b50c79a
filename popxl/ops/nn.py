"""Softmax, and losses of logits and probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor, taken_back_on_failure
from popxl.core.traits import ShardingRule
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.kernels import sums
from popxl.ops.kernels.sums import exponentials, summed
from popxl.ops.precision import round_once, wide_dtype, widen
from popxl.values.shapes import flag, integer, like_first, one_axis, word
from popxl.values.spec import TensorSpec

REDUCTION_TYPE = Literal["mean", "sum", "none"]

# Softmax ------------------------------------------------------------------------------------------------------------


def _rows(t: Any, axis: int) -> Any:
    """Reshape to a matrix: dimensions before `axis` as rows, remaining ones as columns."""
    axis %= t.ndim
    return t.reshape(math.prod(t.shape[:axis]), math.prod(t.shape[axis:]))


def _softmax_backward(g: Any, out: Any, *, axis: int) -> Any:
    return sums.softmax_gradient(_rows(widen(g), axis), _rows(widen(out), axis), 1).reshape(g.shape)


def _has_axis(t: Any, *, axis: int) -> TensorSpec:
    one_axis(axis, len(t.shape))
    return like_first(t)


def _row_subscripts(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    """Subscripts with labels of row dimensions: all before `axis`."""
    rank = len(shapes[0])
    rows = ascii_letters[: attributes["axis"] % rank]
    return f"{rows}{'_' * (rank - len(rows))}->{rows}{'_' * (rank - len(rows))}"


_softmax_grad = OpKind(
    "SoftmaxGrad", _softmax_backward, shape=like_first, traits=[ShardingRule(_row_subscripts, linear=("g",))]
)
_softmax = OpKind(
    "Softmax",
    lambda t, *, axis: sums.softmax(_rows(widen(t), axis), 1).reshape(t.shape),
    shape=_has_axis,
    gradient={"t": lambda g, out, axis: _softmax_grad(g, out, axis=axis)},
    traits=[*REAL, ShardingRule(_row_subscripts)],
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


_log_softmax_grad = OpKind(
    "LogSoftmaxGrad",
    round_once(lambda g, out, *, axis: g - jnp.exp(out) * summed(g, (axis % g.ndim,), keepdims=True)),
    shape=like_first,
)
_log_softmax = OpKind(
    "LogSoftmax",
    round_once(lambda t, *, axis: sums.log_softmax(t, axis % t.ndim)),
    shape=_has_axis,
    operands=("t",),
    gradient={"t": lambda g, out, axis: _log_softmax_grad(g, out, axis=axis)},
    traits=REAL,
)


def log_softmax(t: Tensor, axis: int) -> Tensor:
    """Log-softmax along one axis: `t - log(sum(exp(t)))`, computed without overflow.

    Unlike `softmax` it never normalises over the axes after `axis`, too.

    Args:
        t: tensor of rank 1 or more.
        axis: the dimension to normalise over; negative ones count from the back.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        PopxlError: if there is no such axis.

    See also: `torch.nn.functional.log_softmax`.

    Example:
        >>> scores = ops.log_softmax(logits, axis=-1)
    """
    return _log_softmax(t, axis=integer(axis, "log_softmax: `axis`"))


# Negative log likelihood --------------------------------------------------------------------------------------------


def flat_labels(labels: Any) -> Any:
    """Flatten labels to a signed integer vector, mapping uint32 back to values such as -100."""
    return labels.reshape(-1).astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)


def _label_values(t: Any, labels: Any, otherwise: float = 0) -> Any:
    """Row value selected by each flat label; `otherwise` for labels out of range."""
    in_range = (labels >= 0) & (labels < t.shape[-1])
    rows = t.reshape(-1, t.shape[-1])
    selected = jnp.take_along_axis(rows, jnp.where(in_range, labels, 0)[:, None], axis=1, mode="clip")
    return jnp.where(in_range, selected[:, 0], otherwise).astype(wide_dtype(t))


def label_mask(labels: Any, ignore_index: int | None) -> tuple[Any, Any]:
    """Mask of counted labels, flattened, with their number."""
    limits = np.iinfo(labels.dtype)
    if ignore_index is None or not limits.min <= ignore_index <= limits.max:
        return jnp.ones(labels.shape, bool), labels.size
    counts = labels != ignore_index
    return counts, jnp.maximum(counts.sum(), 1)


def _loss(logs: Any, labels: Any, ignore_index: int | None, reduction: str) -> Any:
    """The loss, from the logarithms of what the flat labels pick."""
    counts, count = label_mask(labels, ignore_index)
    losses = jnp.where(counts, -logs, 0)  # not a product: ignored elements may be infinite
    if reduction == "none":
        return losses
    return losses.sum() / count if reduction == "mean" else losses.sum()


def _scale(g: Any, labels: Any, ignore_index: int | None, reduction: str, dtype: Any) -> Any:
    """The incoming gradient of the loss of each flat label: none, for what is ignored."""
    counts, count = label_mask(labels, ignore_index)
    g = g.reshape(-1).astype(dtype)
    return jnp.where(counts, g / count if reduction == "mean" else g, 0)


def _hot(labels: Any, classes: int) -> Any:
    """The flat labels as rows of bools."""
    return labels[:, None] == jnp.arange(classes, dtype=labels.dtype)


def _towards_labels(probs: Any, labels: Any, scale: Any) -> Any:
    """The gradient of the logits: of rows of probabilities, flat labels, and the incoming gradient of each."""
    return jnp.where(_hot(labels, probs.shape[1]), probs - 1, probs) * scale[:, None]


def _smallest(dtype: Any, float32: float) -> float:
    """The probability below which the logarithm is flat."""
    return 6.104e-5 if dtype == jnp.float16 else float32


def _nll_lowering(probs: Any, labels: Any, *, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    flat = flat_labels(labels)
    selected = _label_values(probs, flat)
    logs = selected if log_prob else jnp.log(jnp.maximum(selected, _smallest(probs.dtype, 1e-7)))
    return _loss(logs, flat, ignore_index, reduction).reshape(labels.shape if reduction == "none" else ())


def _nll_backward(g: Any, probs: Any, labels: Any, *, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    flat = flat_labels(labels)
    slope = -_scale(g, flat, ignore_index, reduction, wide_dtype(probs))
    if not log_prob:
        slope /= jnp.maximum(_label_values(probs, flat), _smallest(probs.dtype, 1e-10))
    return jnp.where(_hot(flat, probs.shape[-1]), slope[:, None], 0).reshape(probs.shape)


def _loss_spec(rows: Any, labels: Any, *, reduction: str, **how: Any) -> TensorSpec:
    word(reduction, "`reduction`", ("mean", "sum", "none"))
    if not rows.shape or math.prod(labels.shape) != math.prod(rows.shape[:-1]):
        raise PopxlError(
            f"expected a label for each row of classes, of which there are {math.prod(rows.shape[:-1])} in the shape "
            f"{rows.shape}; got `labels` of shape {labels.shape}."
        )
    return TensorSpec(labels.shape if reduction == "none" else (), rows.dtype)


def _of_integers(rows: Any, labels: Any, **how: Any) -> TensorSpec:
    spec = _loss_spec(rows, labels, **how)
    if not labels.dtype.is_int:
        raise PopxlError(f"labels are integers; these are {labels.dtype.name}. Convert them with `ops.cast`.")
    return spec


def _with_gradient(rows: Any, labels: Any, loss_grad: Any, **how: Any) -> tuple[TensorSpec, TensorSpec]:
    spec = _loss_spec(rows, labels, **how)
    if loss_grad.nelms != 1 and loss_grad.shape != labels.shape:
        raise PopxlError("`loss_grad` is one number, or for 'none' one for each label.")
    return spec, like_first(rows)


_nll_grad = OpKind("NllGrad", _nll_backward, shape=lambda g, probs, labels, **how: like_first(probs))
_nll = OpKind(
    "Nll",
    _nll_lowering,
    shape=_of_integers,
    result="loss",
    gradient={"probs": lambda g, probs, labels, attributes: _nll_grad(g, probs, labels, **attributes)},
    traits=REAL,
)


def _fused_lowering(
    probs: Any, labels: Any, loss_grad: Any, *, ignore_index: int | None, reduction: str
) -> tuple[Any, Any]:
    flat = flat_labels(labels)
    loss = _loss(jnp.log(_label_values(probs, flat) + 1e-7), flat, ignore_index, reduction)
    rows = probs.reshape(-1, probs.shape[-1]).astype(wide_dtype(probs))
    scale = _scale(loss_grad, flat, ignore_index, reduction, rows.dtype)
    dx = _towards_labels(rows, flat, scale)
    return loss.reshape(labels.shape if reduction == "none" else ()), dx.reshape(probs.shape)


_fused = OpKind(
    "NlllWithSoftmaxGradDirect",
    _fused_lowering,
    shape=_with_gradient,
    result=("loss", "dx"),
    gradient=None,
    traits=REAL,
)


def ignored_label(name: str, labels: Tensor, ignore_index: int | None) -> int | None:
    """Ignored label in `flat_labels` form: unsigned values in the upper half become negative."""
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
    From logits, without such limits: `popxl_addons.cross_entropy`.

    Args:
        probs: probabilities of shape `(..., C)`; the classes are the last dimension.
        labels: integer tensor of shape `(...)`, or of another with as many elements. A label outside `[0, C)` picks a
            probability of 0. No gradient.
        ignore_index: labels with this value contribute nothing, and do not count in the mean.
        reduction: `"mean"` over the labels that count, `"sum"`, or `"none"`.
        log_prob: `probs` holds logarithms of probabilities.

    Returns:
        The loss, of the dtype of `probs`: a scalar, or of the shape of `labels` for `"none"`.

    Raises:
        ValueError: for an unknown `reduction`.
        PopxlError: if the shapes do not fit, or the labels are not integers.

    See also: `torch.nn.functional.nll_loss`.

    Example:
        >>> loss = ops.nll_loss(ops.softmax(logits, axis=-1), labels)
    """
    ignored = ignored_label("nll_loss", labels, ignore_index)
    of_logs = flag(log_prob, "nll_loss: `log_prob`")
    return _nll(probs, labels, ignore_index=ignored, reduction=reduction, log_prob=of_logs)


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
        labels: integer tensor of shape `(...)`, or of another with as many elements.
        loss_grad: the gradient of the loss, a loss scale for example: a number, a scalar tensor, or for `"none"` a
            tensor of the shape of `labels`.
        ignore_index: labels with this value contribute nothing, and do not count in the mean.
        reduction: `"mean"` over the labels that count, `"sum"`, or `"none"`.

    Returns:
        `(loss, dx)`: the loss as from `nll_loss`, not scaled; the gradient, like `probs`. No gradient flows through.

    Raises:
        ValueError: for an unknown `reduction`.
        PopxlError: if the shapes do not fit.

    Example:
        >>> loss, dx = ops.nll_loss_with_softmax_grad(ops.softmax(x, axis=-1), labels, loss_grad=64)
    """
    how: dict[str, Any] = {
        "ignore_index": ignored_label("nll_loss_with_softmax_grad", labels, ignore_index),
        "reduction": reduction,
    }
    return _scaled(_fused, probs, labels, loss_grad, how)


def _scaled(
    kind: OpKind, rows: Tensor, labels: Tensor, scale: float | Tensor, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A loss and its gradient times `scale`: a number becomes a constant, but of a loss that is refused."""
    if isinstance(scale, Tensor):
        return kind(rows, labels, scale, **how)
    double = isinstance(rows, Tensor) and rows.dtype is dtypes.float64
    with taken_back_on_failure(constant(scale, dtypes.float64 if double else dtypes.float32)) as number:
        return kind(rows, labels, number, **how)


# Cross entropy ------------------------------------------------------------------------------------------------------


def _powers(x: Any) -> tuple[Any, Any, Any]:
    """Row maximum, exponentials of shifted logits, and their sum."""
    rows = x.reshape(-1, x.shape[-1]).astype(wide_dtype(x))
    top, total = exponentials(rows, 1)
    return top, jnp.exp(rows - top), total


def _surprise(x: Any, top: Any, totals: Any, labels: Any, ignore_index: int | None, reduction: str) -> Any:
    """Negative log-likelihood; labels out of range have probability 0.

    Labels select from the logits, which are in memory: selecting from the distances would materialise all of them.
    """
    flat = flat_labels(labels)
    logs = _label_values(x, flat, -math.inf) - top[:, 0] - jnp.log(totals[:, 0])
    loss = _loss(logs, flat, ignore_index, reduction)
    return loss.reshape(labels.shape if reduction == "none" else ())


def _learned(g: Any, probs: Any, labels: Any, ignore_index: int | None, reduction: str) -> Any:
    """Logit gradient, as rows."""
    flat = flat_labels(labels)
    return _towards_labels(probs, flat, _scale(g, flat, ignore_index, reduction, probs.dtype))


def _cross_entropy_lowering(x: Any, labels: Any, *, ignore_index: int | None, reduction: str) -> Any:
    top, _, totals = _powers(x)
    return _surprise(x, top, totals, labels, ignore_index, reduction)


def _cross_entropy_backward(g: Any, x: Any, labels: Any, *, ignore_index: int | None, reduction: str) -> Any:
    _, powers, totals = _powers(x)
    return _learned(g, powers / totals, labels, ignore_index, reduction).reshape(x.shape)


def cross_entropy_and_gradient(
    x: Any, labels: Any, loss_grad: Any, *, ignore_index: int | None, reduction: str
) -> tuple[Any, Any]:
    top, powers, totals = _powers(x)
    dx = _learned(loss_grad, powers / totals, labels, ignore_index, reduction)
    return _surprise(x, top, totals, labels, ignore_index, reduction), dx.reshape(x.shape)


_cross_entropy_grad = OpKind(
    "CrossEntropyGrad", _cross_entropy_backward, shape=lambda g, x, labels, **how: like_first(x)
)
_cross_entropy = OpKind(
    "CrossEntropy",
    _cross_entropy_lowering,
    shape=_of_integers,
    result="loss",
    gradient={"x": lambda g, x, labels, attributes: _cross_entropy_grad(g, x, labels, **attributes)},
    traits=REAL,
)
_cross_entropy_with_grad = OpKind(
    "CrossEntropyWithGrad",
    cross_entropy_and_gradient,
    shape=_with_gradient,
    result=("loss", "dx"),
    gradient=None,
    traits=REAL,
)


def cross_entropy(
    x: Tensor, labels: Tensor, ignore_index: int | None = None, reduction: REDUCTION_TYPE = "mean"
) -> Tensor:
    """`-log(softmax(x)[..., label])` of logits: never flat, however improbable the label is.

    Computed in float32 (float64 for that), from the logits, and rounded once; so is the gradient.

    Args:
        x: logits of shape `(..., C)`; the classes are the last dimension.
        labels: integer tensor of shape `(...)`, or of another with as many elements. No gradient. A label that is none
            of the classes has a probability of 0 and an infinite loss, unless it is ignored.
        ignore_index: labels with this value contribute nothing, and do not count in the mean. It may lie outside of
            the classes.
        reduction: `"mean"` over the labels that count, `"sum"`, or `"none"`.

    Returns:
        The loss, of the dtype of `x`: a scalar, or of the shape of `labels` for `"none"`.

    Raises:
        ValueError: for an unknown `reduction`.
        PopxlError: if the shapes do not fit, or the labels are not integers.

    See also: `torch.nn.functional.cross_entropy`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x, labels = popxl.constant([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]), popxl.constant([2, 0], popxl.int32)
        ...     loss = cross_entropy(x, labels)  # (0.40761 + 1.09861) / 2
        >>> loss.shape
        ()
    """
    ignored = ignored_label("cross_entropy", labels, ignore_index)
    return _cross_entropy(x, labels, ignore_index=ignored, reduction=reduction)


def cross_entropy_with_grad(
    x: Tensor,
    labels: Tensor,
    loss_scaling: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[Tensor, Tensor]:
    """Loss of `cross_entropy`, with its gradient with respect to `x`, scaled by `loss_scaling`.

    The gradient is what the backward graph of a model starts from. The loss is not scaled.

    Args:
        x, labels, ignore_index, reduction: as for `cross_entropy`.
        loss_scaling: a number, a scalar tensor, or for `"none"` a tensor of the shape of `labels`.

    Returns:
        `(loss, dx)`: the loss; the gradient, of the shape and dtype of `x`. No gradient flows through either.

    Raises:
        ValueError: for an unknown `reduction`.
        PopxlError: if the shapes do not fit.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x, labels = popxl.constant([[1.0, 2.0, 3.0]]), popxl.constant([2], popxl.int32)
        ...     loss, dx = cross_entropy_with_grad(x, labels)  # 0.40761, [[0.0900, 0.2447, -0.3348]]
        >>> dx.shape
        (1, 3)
    """
    how = {"ignore_index": ignored_label("cross_entropy_with_grad", labels, ignore_index), "reduction": reduction}
    return _scaled(_cross_entropy_with_grad, x, labels, loss_scaling, how)
