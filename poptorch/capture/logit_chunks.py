"""Losses of large logits in chunks: the cross entropy of a linear layer becomes one op."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from poptorch.base.dtypes import device_dtype
from poptorch.capture.trace import Node, Value
from popxl.extend.memory import Logits
from popxl.extend.ops import is_fused, logit_chunks

_RESHAPES = ("aten.view", "aten._unsafe_view")
_COPIES = ("aten.clone", "aten.alias")


class Chunks(NamedTuple):
    """Number of chunks of a loss, where PyTorch has its `LinearCrossEntropyOptions`."""

    number: int


class _LossOfLinear(NamedTuple):
    """A loss and the linear layer that computes its logits, which nothing else reads.

    Attributes:
        before: ops between these two, in order: casts to a wider dtype, and moves of whole rows.
    """

    linear: Node
    before: tuple[Node, ...]
    loss: Node

    @property
    def logits(self) -> Logits:
        """Size of the logits of the loss."""
        x, (classes, width) = self.linear.arguments["input"], self.linear.arguments["weight"].shape
        samples, dtype = math.prod(self.loss.arguments["target"].shape), device_dtype(x.dtype)
        name = str(dtype).removeprefix("torch.")
        return Logits(samples, width, classes, name, dtype.itemsize, logit_chunks(samples, classes))


def logits_of(nodes: Sequence[Node], wanted: Sequence[Value]) -> list[Logits]:
    """Sizes of the logits that `with_logit_chunks` divides."""
    return [head.logits for head in _heads(nodes, wanted)]


def with_logit_chunks(nodes: Sequence[Node], wanted: Sequence[Value], chunks: int) -> list[Node]:
    """Replace losses of linear layers by losses that compute logits in chunks, together with their gradients.

    There are as many chunks as given, or more if there are more by default. Losses of few logits in one chunk stay.

    A loss qualifies if it is the mean or sum of `F.cross_entropy` with classes as targets, without weights and label
    smoothing, and if its logits are results of a linear layer, which nothing else reads: only casts to a wider dtype,
    reshapes and slices of whole rows come between.

    Args:
        wanted: values that are used outside of `nodes`.
    """
    replaced: dict[int, list[Node]] = {}
    for head in _heads(nodes, wanted):
        count = head.logits.chunk_count(chunks)
        if count > 1 or is_fused(head.logits.samples, head.logits.classes):
            replaced |= {id(node): [] for node in (head.linear, *head.before)}
            replaced[id(head.loss)] = _in_chunks(head, count)
    return [new for node in nodes for new in replaced.get(id(node), [node])]


def _in_chunks(head: _LossOfLinear, chunks: int) -> list[Node]:
    """The rows of the layer's input that belong to the targets, and their loss."""
    rows, new = head.linear.arguments["input"], list[Node]()
    width = rows.shape[-1]
    for node in head.before:
        if node.op in _RESHAPES or node.op == "aten.slice":
            (result,) = node.results
            arguments = {**node.arguments, "input": rows}
            if node.op in _RESHAPES:
                arguments["size"] = [*result.shape[:-1], width]
            moved = replace(node, arguments=arguments, results=[])
            rows = Value((*result.shape[:-1], width), rows.dtype, producer=moved, requires_grad=rows.requires_grad)
            moved.results.append(rows)
            new.append(moved)
    loss, (result,) = head.loss, head.loss.results
    arguments = {
        "input": rows,
        "linear_weight": head.linear.arguments["weight"],
        "target": loss.arguments["target"],
        "linear_bias": head.linear.arguments["bias"],
        "weight": None,
        "reduction": loss.arguments["reduction"],
        "ignore_index": loss.arguments["ignore_index"],
        "label_smoothing": 0.0,
        "options": Chunks(chunks),
    }
    in_chunks = replace(loss, op="torch.linear_cross_entropy", overload="", arguments=arguments)
    result.producer = in_chunks
    return [*new, in_chunks]


def _heads(nodes: Sequence[Node], wanted: Sequence[Value]) -> Iterator[_LossOfLinear]:
    """Losses whose logits can be computed in chunks."""
    reads = Counter(id(value) for node in nodes for value in node.inputs) + Counter(map(id, wanted))
    for loss in nodes:
        if loss.op != "torch.cross_entropy" or not _is_plain(loss):
            continue
        before = list[Node]()
        value = loss.arguments["input"]
        while value.producer is not None and reads[id(value)] == 1 and _is_alike(value.producer, loss):
            node = value.producer
            if node.op == "torch.linear" and _fits(node, loss):
                yield _LossOfLinear(node, tuple(reversed(before)), loss)
            if not _moves_rows(node):
                break
            before.append(node)
            value = node.arguments["input"]


def _is_plain(loss: Node) -> bool:
    """Whether a cross entropy is a mean or sum over classes as targets."""
    given = loss.arguments
    has_options = given["weight"] is not None or given["label_smoothing"] or given["size_average"] is not None
    is_reduced = given["reduction"] in ("mean", "sum") and given["reduce"] is None
    is_of_classes = len(given["input"].shape) == 2 and not given["target"].dtype.is_floating_point
    return is_reduced and is_of_classes and not has_options


def _is_alike(node: Node, loss: Node) -> bool:
    """Whether an op runs where the loss does, and is neither kept nor without a gradient."""
    same = (node.placement.unit, node.regions) == (loss.placement.unit, loss.regions)
    return same and not (node.is_saved or node.stops or node.has_effect)


def _fits(linear: Node, loss: Node) -> bool:
    """Whether a layer computes logits by a matrix, of a float dtype that is no wider than that of the loss."""
    (logits,), weight = linear.results, linear.arguments["weight"]
    return (
        len(weight.shape) == 2
        and weight.dtype.is_floating_point
        and logits.dtype.itemsize <= loss.results[0].dtype.itemsize
    )


def _moves_rows(node: Node) -> bool:
    """Whether an op only moves whole rows of its input, or casts them to a wider dtype."""
    if node.op not in (*_RESHAPES, *_COPIES, "aten.slice", "aten._to_copy"):
        return False
    value, (result,) = node.arguments["input"], node.results
    if value.shape[-1:] != result.shape[-1:]:
        return False
    if node.op == "aten._to_copy":
        return result.dtype.is_floating_point and value.dtype.itemsize < result.dtype.itemsize
    if node.op == "aten.slice":
        return node.arguments.get("dim", 0) % len(value.shape) != len(value.shape) - 1
    return value.dtype == result.dtype
