"""Losses of large logits in chunks: the cross entropy of a matrix product becomes `ops.linear_cross_entropy`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import popxl
from popxl import Op, ops
from popxl.extend.memory import Logits
from popxl.extend.ops import cast_if_needed, logit_chunks


class _LossOfProduct(NamedTuple):
    """A loss and the product that computes its logits, which nothing else reads.

    Attributes:
        loss: the op of the loss.
        x, weight: factors of the product.
        labels: labels of the loss.
        before: ops from the product to the loss, in reverse order; none if the loss computes the logits itself.
    """

    loss: Op
    x: popxl.Tensor
    weight: popxl.Tensor
    labels: popxl.Tensor
    before: tuple[Op, ...] = ()

    @property
    def logits(self) -> Logits:
        """Size of the logits."""
        width, classes = self.weight.shape
        samples = math.prod(self.x.shape[:-1])
        chunks = 1 if self.before else logit_chunks(samples, classes)
        return Logits(samples, width, classes, self.x.dtype.name, self.x.dtype.itemsize, chunks)


def logits_of(graph: popxl.Graph) -> list[Logits]:
    """Sizes of the logits that `chunk_logits` divides."""
    return [head.logits for head in _heads(graph)]


def chunk_logits(graph: popxl.Graph, chunks: int) -> None:
    """Compute the logits of the losses of a graph in chunks, in place.

    A loss qualifies if it is the cross entropy (a mean or sum) of a product of samples and a matrix, with only casts to
    a wider dtype and reshapes in between, and nothing else reads these logits; or if it is an
    `ops.linear_cross_entropy` without `chunks`. Differentiate afterwards.

    Example:
        >>> from popxl_addons.ops import cross_entropy
        >>> def loss(x, w, labels):
        ...     return cross_entropy((x @ w).astype(popxl.float32), labels)
        >>> ir = popxl.Ir()
        >>> x, w = popxl.TensorSpec((6, 3), popxl.float16), popxl.TensorSpec((3, 9), popxl.float16)
        >>> graph = ir.create_graph(loss, x, w, popxl.TensorSpec((6,), popxl.int32))
        >>> chunk_logits(graph, 2)
        >>> print(*(op.op_type for op in graph.ops))
        LinearCrossEntropy Div
    """
    for head in [*_heads(graph)]:
        if not head.before:
            head.loss.edit(attributes={**head.loss.attributes, "chunks": head.logits.chunk_count(chunks)})
            continue
        graph.replace([head.loss], lambda *_, head=head: _in_chunks(head, chunks))
        graph.remove(head.before)


def _in_chunks(head: _LossOfProduct, chunks: int) -> popxl.Tensor:
    how, (loss,) = head.loss.attributes, head.loss.outputs
    number = head.logits.chunk_count(chunks)
    total = ops.linear_cross_entropy(head.x, head.weight, head.labels, how["ignore_index"], how["reduction"], number)
    return cast_if_needed(total, loss.dtype)


def _heads(graph: popxl.Graph) -> Iterator[_LossOfProduct]:
    """Losses whose logits can be computed in chunks."""
    reads = Counter(t for op in graph.ops for t in op.inputs) + Counter(graph.outputs)
    for op in graph.ops:
        if op.op_type == "LinearCrossEntropy" and op.attributes["chunks"] is None:
            x, weight, labels, *_ = op.inputs
            yield _LossOfProduct(op, x, weight, labels)
        elif op.op_type == "CrossEntropy" and op.attributes["reduction"] != "none":
            logits, labels = op.inputs
            before = tuple(_producers(logits, reads))
            if before and _is_product(before[-1]):
                x, weight = before[-1].inputs
                yield _LossOfProduct(op, x, weight, labels, before)


def _producers(t: popxl.Tensor, reads: Counter[popxl.Tensor]) -> Iterator[Op]:
    """Ops before a tensor, back to the first that computes more than another dtype or shape of the same rows, while
    nothing else reads their results."""
    while t.producer is not None and reads[t] == 1:
        op = t.producer
        yield op
        if op.op_type not in ("Cast", "Reshape") or not _keeps_rows(op):
            return
        (t,) = op.inputs


def _keeps_rows(op: Op) -> bool:
    """Whether an op keeps the last dimension, and rounds nothing."""
    (before,), (after,) = op.inputs, op.outputs
    is_exact = before.dtype == after.dtype or before.dtype.itemsize < after.dtype.itemsize
    return before.shape[-1:] == after.shape[-1:] and is_exact


def _is_product(op: Op) -> bool:
    """Whether an op multiplies samples of a float dtype by a matrix of the same."""
    if op.op_type != "MatMul" or len(op.inputs) != 2:
        return False
    x, weight = op.inputs
    is_plain = op.outputs[0].dtype == x.dtype == weight.dtype and x.dtype.is_floating_point
    return is_plain and x.rank > 0 and weight.rank == 2 and x.shape[-1] == weight.shape[0]
