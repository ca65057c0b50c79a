"""Cross entropy over classes that are divided among replicas: no replica ever has the logits of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

import popxl
from popxl import OpKind, TensorSpec, ops
from popxl.errors import PopxlError
from popxl.extend.collectives import Group, members
from popxl.extend.kernels import widen
from popxl.op import REFUSED, BetweenReplicas
from popxl.replica_grouping import Groups

REDUCTION_TYPE = Literal["mean", "sum", "none"]
_REDUCTIONS: dict[str, Callable[[popxl.Tensor], popxl.Tensor]] = {"mean": ops.mean, "sum": ops.sum, "none": lambda t: t}

__all__ = ["REDUCTION_TYPE", "cross_entropy_sharded_loss"]


def _specs(logits: Any, indices: Any, **groups: Any) -> tuple[TensorSpec, TensorSpec]:
    if len(logits.shape) != 2:
        raise PopxlError(f"expected `logits` of rank 2: samples, and the classes of this replica; got {logits.shape}.")
    if len(indices.shape) != 1:
        raise PopxlError(f"expected `indices` of rank 1, a class for each sample; got {indices.shape}.")
    if indices.shape != logits.shape[:1]:
        raise PopxlError(f"`logits` has {logits.shape[0]} samples, and `indices` {indices.shape[0]}; expected as many.")
    if not indices.dtype.is_int:
        raise PopxlError(f"expected `indices` of an integer dtype; got {indices.dtype.name}.")
    return TensorSpec(indices.shape, logits.dtype), normalizers_of(logits)


def of_class(indices: Any, classes: int, first: int = 0) -> Any:
    """Class membership mask per sample, for a class block starting at `first`."""
    return indices.astype(jnp.int32)[:, None] == jnp.arange(first, first + classes, dtype=jnp.int32)


def normalizers_of(logits: Any) -> TensorSpec:
    """Saved values for the gradient: maximum logit and log-sum-exp per sample.

    Not rounded to halves, as the logarithms of the softmax would be, of which the gradient is made.
    """
    dtype = popxl.float32 if logits.dtype.is_half else logits.dtype
    return TensorSpec((2, logits.shape[0]), dtype)


def surprises(logits: Any, normalizers: Any) -> Any:
    """Negative log-softmax for a class block."""
    highest, total = normalizers[:, :, None]
    return total - (widen(logits) - highest)


def _cross_entropy(logits: Any, indices: Any, *, group: Group) -> tuple[Any, Any]:
    rows = widen(logits)
    highest = group.combined(rows.max(axis=1), "max")
    total = group.combined(jnp.exp(rows - highest[:, None]).sum(axis=1), "add")
    normalizers = jnp.stack([highest, jnp.log(total)])
    own = jnp.where(of_class(indices, rows.shape[1]), surprises(rows, normalizers), 0).sum(axis=1)
    return group.combined(own, "add"), normalizers


def logits_gradient(g: Any, logits: Any, indices: Any, normalizers: Any, first: int = 0) -> Any:
    """Gradient of a logit block with classes from `first`."""
    softmax = jnp.exp(-surprises(logits, normalizers))
    return widen(g)[:, None] * (softmax - of_class(indices, logits.shape[1], first))


_cross_entropy_sharded_grad = OpKind(
    "CrossEntropyShardedGrad",
    lambda g, logits, indices, normalizers: logits_gradient(g, logits, indices, normalizers),
    shape=lambda g, logits, indices, normalizers: TensorSpec(logits.shape, logits.dtype),
    gradient=REFUSED,
    result="cross_entropy_logits_grad",
)
_cross_entropy_sharded = OpKind(
    "CrossEntropySharded",
    _cross_entropy,
    shape=_specs,
    gradient={
        "logits": lambda g, logits, indices, cross_entropy_normalizers: _cross_entropy_sharded_grad(
            g, logits, indices, cross_entropy_normalizers
        )
    },
    result=("cross_entropy_loss", "cross_entropy_normalizers"),
    traits=[BetweenReplicas("same")],
)


def cross_entropy_sharded_loss(
    logits: popxl.Tensor,
    indices: popxl.Tensor,
    ignore_index: popxl.Tensor | None = None,
    replica_grouping: Groups | None = None,
    reduction: REDUCTION_TYPE = "mean",
    available_memory_proportion: float = 0.4,
) -> popxl.Tensor:
    """``-log(softmax(logits)[label])``, where the classes are divided among the replicas of a group.

    Each replica has a block of the classes, and counts labels from the first of these: what is outside of its block
    belongs to others. The loss is the same on all members. Only `logits` have a gradient, which is not summed over
    replicas: differentiate with `grads_required` of the logits. Computed in float32 and rounded once.

    Args:
        logits: float tensor of shape ``(samples, classes)``, the classes of this replica.
        indices: integer tensor of shape ``(samples,)``: the labels less the number of this replica's first class.
        ignore_index: integer scalar: a label that does not count, less the same number. If no label counts, the mean is
            0.
        replica_grouping: replicas that the classes are divided among; all of them by default. Their stride may be any.
        reduction: the ``"mean"`` over the labels that count, their ``"sum"``, or ``"none"``.
        available_memory_proportion: has no effect.

    Returns:
        The loss, of the dtype of `logits`: a scalar, or of shape ``(samples,)`` for ``"none"``.

    Raises:
        ValueError: for an unknown `reduction`, or if the replicas of the Ir cannot be grouped like this.
        PopxlError: if the operands have other ranks, or differ in the number of samples.

    See also ``torch.nn.functional.cross_entropy``.

    Example:
        Two replicas with two classes each; the label is 2, which the second replica has as its first.

        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     each = ir.replica_grouping(group_size=1)
        ...     logits = popxl.variable(np.zeros((2, 1, 2)), popxl.float32, replica_grouping=each)
        ...     indices = popxl.variable([[2], [0]], popxl.int32, replica_grouping=each)
        ...     loss = cross_entropy_sharded_loss(logits, indices)  # log(4) on both
        >>> loss.shape
        ()
    """
    name = "cross_entropy_sharded_loss"
    if reduction not in _REDUCTIONS:
        choice = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"{name}: `reduction` is {reduction!r}; expected one of {choice}.")
    loss, _ = _cross_entropy_sharded(logits, indices, **members(name, replica_grouping))
    if ignore_index is None:
        return _REDUCTIONS[reduction](loss)
    counts = ops.cast(ops.logical_not(ops.equal(indices, ignore_index)), loss.dtype)
    total = _REDUCTIONS[reduction](loss * counts)
    if reduction != "mean":
        return total
    # Not a sum over a sum: in float16 the loss of many samples is out of range.
    return total / ops.maximum(ops.mean(counts), popxl.constant(1 / counts.nelms, counts.dtype))
