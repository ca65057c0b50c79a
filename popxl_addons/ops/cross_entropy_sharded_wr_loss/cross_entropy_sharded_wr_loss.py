"""Cross entropy over classes that are divided among the IPUs of one replica (WR: within a replica)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp

import popxl
from popxl import OpKind, TensorSpec
from popxl.errors import PopxlError
from popxl.extend.kernels import widen
from popxl.op import REFUSED, OnIpus
from popxl_addons.ops.cross_entropy_sharded_loss.cross_entropy_sharded_loss import (
    logits_gradient,
    normalizers_of,
    of_class,
    surprises,
)

__all__ = ["cross_entropy_sharded_wr_loss"]


def _halves(tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The logits, and the indices."""
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]


def _specs(*tensors: Any, ipus: tuple[int, ...]) -> list[TensorSpec]:
    """Specs of loss and saved values per IPU."""
    logits, indices = _halves(tensors)
    samples = indices[0].shape
    if len(samples) != 1:
        raise PopxlError(f"expected `indices` of rank 1, a class for each sample; got {samples}.")
    for i, (block, labels) in enumerate(zip(logits, indices, strict=True)):
        if len(block.shape) != 2 or block.shape[:1] != samples:
            raise PopxlError(f"expected `logits[{i}]` of shape ({samples[0]}, classes); got {block.shape}.")
        if block.dtype is not logits[0].dtype:
            raise PopxlError(f"`logits[{i}]` has not the dtype of `logits[0]`: {block.dtype.name}.")
        if (labels.shape, labels.dtype) != (samples, indices[0].dtype) or not labels.dtype.is_int:
            raise PopxlError(
                f"expected `indices[{i}]` to be integers like `indices[0]`; it is {labels.dtype.name} of shape "
                f"{labels.shape}."
            )
    return [TensorSpec(samples, logits[0].dtype), *map(normalizers_of, logits)]


def _firsts(blocks: Sequence[Any]) -> list[int]:
    """First class number of each block."""
    return list(accumulate((block.shape[1] for block in blocks[:-1]), initial=0))


def _cross_entropy(*tensors: Any, ipus: tuple[int, ...]) -> tuple[Any, ...]:
    logits, indices = _halves(tensors)
    logits = [widen(block) for block in logits]
    highest = jnp.stack([block.max(axis=1) for block in logits]).max(axis=0)
    total = sum(jnp.exp(block - highest[:, None]).sum(axis=1) for block in logits)
    normalizers = jnp.stack([highest, jnp.log(total)])
    loss = sum(
        jnp.where(of_class(labels, block.shape[1], first), surprises(block, normalizers), 0).sum(axis=1)
        for labels, first, block in zip(indices, _firsts(logits), logits, strict=True)
    )
    return loss, *[normalizers] * len(logits)


def _cross_entropy_grad(g: Any, *tensors: Any, ipus: tuple[int, ...]) -> tuple[Any, ...]:
    count = len(ipus)
    logits, indices, normalizers = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    blocks = zip(logits, indices, normalizers, _firsts(logits), strict=True)
    return tuple(logits_gradient(g, *block) for block in blocks)


def _gradients(forward: Any, gs: tuple[popxl.Tensor | None, ...]) -> dict[int, popxl.Tensor]:
    """Logit gradients, by one op."""
    if gs[0] is None:
        return {}
    op = forward.op
    read = (forward.read(t) for t in (*op.inputs, *op.outputs[1:]))
    found = _cross_entropy_sharded_wr_grad(gs[0], *read, ipus=op.attributes["ipus"][1:])
    return {i: gradient for i, gradient in enumerate(found) if forward.wants(i)}


_cross_entropy_sharded_wr_grad = OpKind(
    "CrossEntropyShardedGradWR",
    _cross_entropy_grad,
    shape=lambda g, *tensors, ipus: [TensorSpec(t.shape, t.dtype) for t in tensors[: len(ipus)]],
    gradient=REFUSED,
    result="cross_entropy_logits_grad_{i}",
    traits=[OnIpus("ipus")],
)
_cross_entropy_sharded_wr = OpKind(
    "CrossEntropyShardedWR",
    _cross_entropy,
    shape=_specs,
    gradient=_gradients,
    result="cross_entropy_wr_out_{i}",
    traits=[OnIpus("ipus")],
)


def cross_entropy_sharded_wr_loss(
    logits: Sequence[popxl.Tensor], indices: Sequence[popxl.Tensor], ipus: Iterable[int] | None = None
) -> popxl.Tensor:
    """``-log(softmax(logits)[label])``, where the classes are divided among the IPUs of one replica.

    Each of the `logits` has a gradient. Computed in float32 and rounded once. A label that is none of the classes has
    the loss 0.

    Args:
        logits: float tensors of shape ``(samples, classes)``, one for each IPU: blocks of the classes, in order, which
            may differ in width.
        indices: integer tensors of shape ``(samples,)``, one for each IPU: copies of the labels, counted from the first
            class of the first block.
        ipus: IPU of each block; by default, that of its logits and labels, of which one may be unknown.

    Returns:
        The loss of each sample, of shape ``(samples,)``, on the first IPU.

    Raises:
        TypeError: if `logits` or `indices` is not a list of tensors.
        ValueError: if `logits`, `indices` and `ipus` differ in number, if a block and its indices are on different
            IPUs, or if no `ipus` are given and those of the tensors of a block are unknown.
        PopxlError: if shapes or dtypes do not fit.

    Example:
        Five classes on two IPUs.

        >>> with popxl.Ir().main_graph:
        ...     logits = [popxl.variable(np.zeros((3, classes)), popxl.float32) for classes in (2, 3)]
        ...     labels = [popxl.constant([0, 4, 2], popxl.int32) for _ in range(2)]
        ...     cross_entropy_sharded_wr_loss(logits, labels, ipus=[0, 1]).shape
        (3,)
    """
    name = "cross_entropy_sharded_wr_loss"
    for what, tensors in {"logits": logits, "indices": indices}.items():
        if not isinstance(tensors, list | tuple) or not all(isinstance(t, popxl.Tensor) for t in tensors):
            raise TypeError(f"{name}: `{what}` must be a list of tensors, one for each IPU; got {tensors!r}.")
    if not logits or len(logits) != len(indices):
        raise ValueError(
            f"{name}: there are {len(logits)} `logits` and {len(indices)} `indices`; give one of each for every IPU."
        )
    places = _ipus_of(name, logits, indices) if ipus is None else tuple(ipus)
    if len(places) != len(logits):
        raise ValueError(f"{name}: `ipus` is {places}, for {len(logits)} blocks of classes; give one IPU for each.")
    loss, *_ = _cross_entropy_sharded_wr(*logits, *indices, ipus=(places[0], *places))
    return loss


def _ipus_of(name: str, logits: Sequence[popxl.Tensor], indices: Sequence[popxl.Tensor]) -> tuple[int, ...]:
    """IPU of each block of classes: that of the logits or of the labels, whichever is known."""
    places, others = (tuple(t.location[0] for t in tensors) for tensors in (logits, indices))
    pairs = list(zip(places, others, strict=True))
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise ValueError(f"{name}: `logits` are on the IPUs {places}, and `indices` on {others}; expected the same.")
    found = tuple(label if block is None else block for block, label in pairs)
    known = tuple(ipu for ipu in found if ipu is not None)
    if len(known) < len(found):
        t = logits[found.index(None)]
        raise ValueError(f"{name}: The IPU of {t!r} is not known. Say in `ipus` where the blocks of classes are.")
    return known
