"""Losses: the loss of a trace, and PyTorch's errors about arguments of one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.base.logging_ import logger
from poptorch.capture.preserved_functions import LOSSES
from poptorch.capture.torch_private import without_modes
from poptorch.capture.trace import Node, Trace, Value
from poptorch.errors import createPoptorchError

MARKED = frozenset({*LOSSES, "poptorch.identity_loss"})
"""Names of the ops whose result is a loss."""

_ELSEWHERE = ", in a module around the model if a package computes it"


def final_loss(trace: Trace) -> Value:
    """Final loss: the only one on which no other loss depends.

    Among several losses, those without influence on a returned value are ignored, unless no other remains.

    Raises:
        poptorch.Error: for no loss, or several final losses.
    """
    nodes = trace.nodes
    marked = [node for node in nodes if node.op in MARKED]
    parts: set[int] = set()  # values that some loss depends on
    final = []
    for node in reversed(nodes):
        is_part = any(id(result) in parts for result in node.results)
        if node.op in MARKED and not is_part:
            final.append(node)
        if node.op in MARKED or is_part:
            parts.update(map(id, node.inputs))
    if not marked:
        raise createPoptorchError(
            "Couldn't find a loss in graph. A model to be trained needs one: a loss of `torch.nn`, or a tensor that "
            f"`poptorch.identity_loss(x, reduction)` marks as one{_ELSEWHERE}."
        )
    if len(final) > 1:
        returned = trace.without_unused(trace.outputs)
        final = [node for node in final if node in returned] or final
    if len(final) > 1:
        raise createPoptorchError(
            "Multiple independent losses found in graph. Graph must have one final loss. Wrap final graph loss in "
            'poptorch.identity_loss. Add them up, and mark the sum: `poptorch.identity_loss(a + b, reduction="none")`'
            f"{_ELSEWHERE}. "
            f"They are {', '.join(str(node) for node in reversed(final))}."
        )
    (loss, *_) = final[0].results
    if loss.dtype.is_complex:
        raise createPoptorchError(
            f"The loss is complex: {final[0]}. What is to become smaller has to be real, as `loss.abs()` and "
            "`loss.real` are."
        )
    return loss


_SAME = frozenset(
    f"aten.{name}" for name in ("_to_copy", "alias", "clone", "reshape", "squeeze", "sum", "unsqueeze", "view")
) | {"poptorch.nop"}
"""Ops that preserve the sum of their operand."""


def warn_about_other_loss(trace: Trace, loss: Value) -> None:
    """Warn if the function returns a value that resembles a training objective but differs from the loss.

    This is a number computed from the loss and another value that gradients flow through; or from the loss alone, if
    that is not returned.
    """
    is_mixed = {id(loss): False}  # by identity of values computed from the loss
    same = {id(loss)}
    for node in trace.nodes:
        if any(id(value) in is_mixed for value in node.inputs):
            mixes = any(is_mixed.get(id(value), value.requires_grad) for value in node.inputs)
            flowing = [r for i, r in enumerate(node.results) if r.requires_grad and i not in node.stops]
            is_mixed.update((id(result), mixes) for result in flowing)
            if not mixes and _has_the_same_sum(node):
                same.update(id(result) for result in flowing if all(id(value) in same for value in node.inputs))
    is_returned = any(id(value) in same for value in trace.outputs)
    others = [value for value in trace.outputs if id(value) in is_mixed and id(value) not in same]
    misleading = next((value for value in others if is_mixed[id(value)] or not is_returned), None)
    if misleading is not None:
        logger.warning(
            "The model is trained by its loss, %s, and returns %s, made of that. What is done to a loss has no "
            'effect on the training. To train by the result, mark it: `poptorch.identity_loss(x, reduction="none")`%s.',
            loss.producer,
            misleading.producer,
            _ELSEWHERE,
        )


def _has_the_same_sum(node: Node) -> bool:
    """Whether an op preserves the sum of its input elements, and therefore their gradients."""
    if node.op == "aten.mean":
        return all(prod(value.shape) == 1 for value in node.inputs)
    return node.op in _SAME


def retry_loss(loss: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Retry a loss that fake tensors reject: with real tensors, for PyTorch's own error message, then with fake ones
    again. Labels of dtype uint8, which only fake tensors reject, are widened."""

    def zeros(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=t.dtype).expand(t.shape)

    def labels(t: torch.Tensor) -> torch.Tensor:
        return t.long() if t.dtype is torch.uint8 else t

    with without_modes():
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, zeros, (args, kwargs))
        loss(*real_args, **real_kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, labels, (args, kwargs))
    return loss(*args, **kwargs)
