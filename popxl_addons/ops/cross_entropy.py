"""Cross entropy of logits and labels: a softmax and the loss, two ops, with the gradient thrown in if wanted."""

from __future__ import annotations

from typing import Literal

import popxl
from popxl import ops

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    x: popxl.Tensor, labels: popxl.Tensor, ignore_index: int | None = None, reduction: Reduction = "mean"
) -> popxl.Tensor:
    """``-log(softmax(x)[label])`` for logits `x` of shape (..., C) and integer `labels` of shape (...).

    Labels equal to `ignore_index`, which may lie outside of the classes, contribute nothing. `reduction` is the mean
    over the labels that count, their sum, or none: then the result has the shape of `labels`. `ValueError` for
    another.

    See also ``torch.nn.functional.cross_entropy``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x, labels = popxl.constant([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]), popxl.constant([2, 0], popxl.int32)
        ...     loss = cross_entropy(x, labels)  # (0.40761 + 1.09861) / 2
        >>> loss.shape
        ()
    """
    return ops.nll_loss(ops.softmax(x, axis=-1), labels, ignore_index, reduction)


def cross_entropy_with_grad(
    x: popxl.Tensor,
    labels: popxl.Tensor,
    loss_scaling: float | popxl.Tensor = 1,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """The loss of `cross_entropy`, and its gradient with respect to `x`, multiplied by `loss_scaling`.

    The gradient is what the backward graph of a model starts from. The loss is not scaled.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x, labels = popxl.constant([[1.0, 2.0, 3.0]]), popxl.constant([2], popxl.int32)
        ...     loss, dx = cross_entropy_with_grad(x, labels)  # 0.40761, [[0.0900, 0.2447, -0.3348]]
        >>> dx.shape
        (1, 3)
    """
    return ops.nll_loss_with_softmax_grad(ops.softmax(x, axis=-1), labels, loss_scaling, ignore_index, reduction)
