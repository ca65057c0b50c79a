"""Which value of a trace is the loss."""

from __future__ import annotations

from poptorch.capture.trace import Trace, Value
from poptorch.capture.whole import LOSSES
from poptorch.errors import createPoptorchError

__all__ = ["final_loss"]

MARKED = frozenset({*LOSSES, "poptorch.identity_loss"})
"""Names of the ops whose result is a loss."""


def final_loss(trace: Trace) -> Value:
    """The one loss that no other is made of.

    Of several, those do not count that nothing is made of that the function returns, if one of them is left.

    Raises:
        poptorch.Error: if there is none, or more than one.
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
            "`poptorch.identity_loss(x, reduction)` marks as one."
        )
    if len(final) > 1:
        returned = trace.without_unused(trace.outputs)
        final = [node for node in final if node in returned] or final
    if len(final) > 1:
        raise createPoptorchError(
            "Multiple independent losses found in graph. Graph must have one final loss. Wrap final graph loss in "
            'poptorch.identity_loss. Add them up, and mark the sum: `poptorch.identity_loss(a + b, reduction="none")`. '
            f"They are {', '.join(str(node) for node in reversed(final))}."
        )
    (loss, *_) = final[0].results
    if loss.dtype.is_complex:
        raise createPoptorchError(
            f"The loss is complex: {final[0]}. What is to become smaller has to be real, as `loss.abs()` and "
            "`loss.real` are."
        )
    return loss
