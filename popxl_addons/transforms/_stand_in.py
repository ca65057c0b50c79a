"""Replacements for outside tensors that ops read when they move into a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Container

import popxl


def stand_in(
    t: popxl.Tensor,
    inside: Container[popxl.Tensor],
    graph: popxl.Graph,
    input_for: Callable[[popxl.Tensor], popxl.Tensor],
) -> popxl.Tensor:
    """Replacement for `t` in `graph`.

    If `t` is not `inside`, it is replaced by its storage, and a view by a view of that, made again: tensors that share
    storage continue to share it.

    Args:
        inside: tensors that are used unchanged, even if they are views.
        input_for: function that returns the replacement of a tensor with its own storage, for example an input; the
            same one each time.
    """
    if t in inside:
        return input_for(t)
    op = t.origin.producer
    if op is None or op.kind.view is None:
        return input_for(t.origin)
    bases = [stand_in(base, inside, graph, input_for) for base in op.bases]
    with graph:
        return op.clone(bases).outputs[0]
