"""`linear_cross_entropy`: the loss of a language model's head, without the logits of all samples at a time."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.ops.convert import cast_if_needed, detach
from popxl.ops.families import REAL
from popxl.ops.kernels.products import product
from popxl.ops.nn import cross_entropy_and_gradient, flat_labels, ignored_label, label_mask
from popxl.ops.precision import wide_dtype
from popxl.values.shapes import integer, like_first, same_dtype, word
from popxl.values.spec import TensorSpec

LOGITS_OF_CHUNK = 2**30
"""Largest number of logits in a chunk by default: 33 554 samples, if there are 32 000 classes. Each chunk reads the
weight twice, and reads and writes the sum of its gradients. If a chunk has fewer samples than the weight has rows,
these are more bytes than its logits."""

FUSED_FROM = 2**25
"""Number of logits from which losses are computed together with their gradients by default. More of them in float32 do
not fit into the on-chip memory of a v5e: a loss and a separate gradient store and read them. For fewer, XLA takes about
5 % more cycles if both are computed together."""


def is_fused(samples: int, classes: int) -> bool:
    """Whether the loss of a matrix product is computed together with its gradients by default."""
    return samples * classes > FUSED_FROM


def logit_chunks(samples: int, classes: int) -> int:
    """Number of chunks of logits by default."""
    return max(1, math.ceil(samples * classes / LOGITS_OF_CHUNK))


def _by_chunks(
    x: Any, weight: Any, labels: Any, bias: Any = None, *, ignore_index: int | None, chunks: int | None
) -> tuple[Any, Any, Any, Any, Any]:
    """Sum of the losses, its gradients, and the number of labels that count. Without a bias, its gradient is a scalar.

    The gradients are those of the sum: divided by many samples, they would be too small for float16.
    """
    wide = wide_dtype(x)

    def add_chunk(sums: tuple[Any, ...], chunk: tuple[Any, Any]) -> tuple[tuple[Any, ...], Any]:
        loss_sum, weight_grad, bias_grad = sums
        rows, labels = chunk
        logits = product(rows, weight, x.dtype).astype(x.dtype)
        logits = logits if bias is None else logits + bias
        of_sum: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "sum"}
        loss, logits_grad = cross_entropy_and_gradient(logits, labels, jnp.ones((), wide), **of_sum)
        logits_grad = logits_grad.astype(x.dtype)
        sums = (
            loss_sum + loss,
            weight_grad + product(rows.T, logits_grad, wide),
            bias_grad if bias is None else bias_grad + logits_grad.sum(0, dtype=wide),
        )
        # Transposed here, not before the loop, which would hold a copy.
        return sums, product(logits_grad, weight.T, x.dtype).astype(x.dtype)

    rows, labels = x.reshape(-1, x.shape[-1]), flat_labels(labels)
    size = max(1, -(-len(rows) // (chunks or logit_chunks(len(rows), weight.shape[1]))))
    equal = len(rows) // size * size
    equal_chunks = rows[:equal].reshape(-1, size, rows.shape[1]), labels[:equal].reshape(-1, size)
    shapes = (), weight.shape, () if bias is None else bias.shape
    sums, x_grad = lax.scan(add_chunk, tuple(jnp.zeros(shape, wide) for shape in shapes), equal_chunks)
    x_grad = x_grad.reshape(equal, rows.shape[1])
    if equal < len(rows):
        sums, of_rest = add_chunk(sums, (rows[equal:], labels[equal:]))
        x_grad = jnp.concatenate([x_grad, of_rest])
    _, count = label_mask(labels, ignore_index)
    return sums[0], x_grad.reshape(x.shape), sums[1], jnp.asarray(count, wide), sums[2]


def _specs(x: Any, weight: Any, labels: Any, bias: Any = None, *, chunks: int | None, **how: Any) -> list[TensorSpec]:
    same_dtype(x, weight)
    if not x.dtype.is_floating_point:
        raise PopxlError(f"expected `x` to be a float tensor; it is {x.dtype.name}.")
    if not x.shape or len(weight.shape) != 2 or x.shape[-1] != weight.shape[0]:
        raise PopxlError(
            f"expected `x` of shape (..., features) and `weight` of shape (features, classes); got {x.shape} and "
            f"{weight.shape}."
        )
    samples = math.prod(x.shape[:-1])
    if not labels.dtype.is_int or math.prod(labels.shape) != samples:
        raise PopxlError(
            f"expected `labels` to be {samples} integers, one for each row of `x`; got {labels.dtype.name} of shape "
            f"{labels.shape}."
        )
    if bias is not None and (bias.dtype, bias.shape) != (x.dtype, weight.shape[1:]):
        raise PopxlError(
            f"expected `bias` of the dtype of `x`, {x.dtype.name}, and of shape {weight.shape[1:]}; got "
            f"{bias.dtype.name} of shape {bias.shape}."
        )
    if chunks is not None and not 1 <= chunks <= max(1, samples):
        raise ValueError(f"`chunks` is {chunks}; expected 1 to {samples}, the number of samples.")
    wide = dtypes.float64 if x.dtype is dtypes.float64 else dtypes.float32
    number = TensorSpec((), wide)
    return [
        number,
        like_first(x),
        TensorSpec(weight.shape, wide),
        number,
        TensorSpec(() if bias is None else bias.shape, wide),
    ]


def _scaled(g: Tensor, gradient: Tensor, dtype: dtypes.dtype) -> Tensor:
    """A gradient of the sum of losses times the incoming gradient, in the dtype of the operand."""
    return cast_if_needed(cast_if_needed(gradient, g.dtype) * g, dtype)


_kind = OpKind(
    "LinearCrossEntropy",
    _by_chunks,
    shape=_specs,
    result=("loss", "x_grad", "weight_grad", "label_count", "bias_grad"),
    gradient={
        "x": lambda g, x_grad: _scaled(g, x_grad, x_grad.dtype),
        "weight": lambda g, weight_grad, weight_spec: _scaled(g, weight_grad, weight_spec.dtype),
        "bias": lambda g, bias_grad, bias_spec: _scaled(g, bias_grad, bias_spec.dtype),
    },
    traits=REAL,
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    chunks: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Cross entropy of the logits `x @ weight + bias`: `-log(softmax(logits)[..., label])`, in chunks of the samples.

    The logits of one chunk exist at a time. Their gradient is computed together with them, and with it those of `x` and
    `weight`, so that a training step multiplies no more than with `cross_entropy(x @ weight, labels)`. If the program
    has no gradient of the loss, XLA drops that part. The gradient of `weight` is summed, and passed on to the backward
    pass, in float32.

    Args:
        x: samples of shape `(..., features)`.
        weight: matrix of shape `(features, classes)`, of the dtype of `x`.
        labels: integer tensor of shape `(...)`, or of another with as many elements. No gradient. A label that is none
            of the classes has an infinite loss, unless it is ignored.
        ignore_index: labels with this value contribute nothing, and do not count in the mean.
        reduction: `"mean"` over the labels that count, or `"sum"`.
        chunks: number of chunks, of equal size but for the last. By default as many as keep a chunk within 2³⁰ logits
            (2 GiB in bfloat16).
        bias: vector of shape `(classes,)`, of the dtype of `x`. By default none.

    Returns:
        The loss, a scalar of float32 (float64 for float64): logits are rounded to the dtype of `x`.

    Raises:
        TypeError: for `chunks` that is not an integer.
        ValueError: for `chunks` below 1 or above the number of samples, and an unknown `reduction`.
        PopxlError: if the shapes or dtypes do not fit.

    See also: `torch.nn.functional.linear_cross_entropy`, whose `linear_weight` is the transpose.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x, labels = popxl.constant(np.ones((6, 3)), popxl.float32), popxl.constant([0, 3, 1, 1, 0, 2])
        ...     weight = popxl.variable(np.eye(3, 4), popxl.float32)
        ...     loss = ops.linear_cross_entropy(x, weight, labels, chunks=2)
        >>> loss.shape, loss.dtype
        ((), popxl.dtypes.float32)
    """
    word(reduction, "linear_cross_entropy: `reduction`", ("mean", "sum"))
    ignored = ignored_label("linear_cross_entropy", labels, ignore_index)
    if chunks is not None:
        chunks = integer(chunks, "linear_cross_entropy: `chunks`")
    given = (x, weight, labels) if bias is None else (x, weight, labels, bias)
    loss, _, _, count, _ = _kind(*given, ignore_index=ignored, chunks=chunks)
    if reduction == "sum":
        return loss
    return loss / (labels.nelms if ignored is None else detach(count))
