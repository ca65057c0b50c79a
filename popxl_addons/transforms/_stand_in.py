"""What ops read in place of a tensor from outside when they move into a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Container

import popxl


def stand_in(
    t: popxl.Tensor,
    inside: Container[popxl.Tensor],
    graph: popxl.Graph,
    input_for: Callable[[popxl.Tensor], popxl.Tensor],
) -> popxl.Tensor:
    """A tensor of `graph` for `t`.

    If `t` is not `inside` it comes as the storage that it is in, and a view as a view of that, made again: what shares
    storage goes on sharing it.

    Args:
        t: what an op that moves reads.
        inside: tensors that are taken as they are, even if they are views.
        graph: where the op moves to.
        input_for: gives the tensor that stands for one with storage of its own, an input say; the same one each time.
    """
    if t in inside:
        return input_for(t)
    op = t.origin.producer
    if op is None or op.kind.view is None:
        return input_for(t.origin)
    bases = [stand_in(base, inside, graph, input_for) for base in op.bases]
    with graph:
        return op.clone(bases).outputs[0]
