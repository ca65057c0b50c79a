"""On which IPU each part of an optimiser's step runs: on that of the variable, so that its state lies there, too."""

from __future__ import annotations

import popxl
from popxl.context import get_current_context
from popxl.core.aliasing import reachable
from popxl.ops.repeat import left_on

__all__ = ["Placement"]


class Placement:
    """The IPUs of the tensors of the main graph, and copies of tensors on the IPUs that need them."""

    def __init__(self) -> None:
        self._reading: dict[popxl.Graph, dict[popxl.Tensor, int | None]] = {}
        self._copies: dict[tuple[popxl.Tensor, int], popxl.Tensor] = {}
        self._current = get_current_context().ipu_id
        self._read_on = self._readers(popxl.gmg())

    def ipu_of(self, t: popxl.Tensor) -> int | None:
        """The IPU whose op makes a tensor; of a variable, the first that reads it; the current one, if none does."""
        ipu = self._read_on.get(t) if t.origin.producer is None else left_on(t)
        return self._current if ipu is None else ipu

    def on(self, t: popxl.Tensor, ipu: int | None) -> popxl.Tensor:
        """`t` on an IPU: itself where it is there already, or where nothing has used it yet; otherwise a copy."""
        is_free = t.origin.producer is None and t not in self._read_on and t.location[0] is None
        if ipu is None or is_free or self.ipu_of(t) == ipu:
            return t
        if (t, ipu) not in self._copies:
            self._copies[t, ipu] = popxl.ops.ipu_copy(t, ipu, self.ipu_of(t))
        return self._copies[t, ipu]

    def _readers(self, graph: popxl.Graph) -> dict[popxl.Tensor, int | None]:
        """For the tensors that a graph reads, the IPU of the first reader, which may be in a called graph."""
        if graph not in self._reading:
            found = self._reading[graph] = {}
            for op in graph.ops:
                for run in op.runs:
                    # A graph that is on one IPU runs where it is called.
                    if len({inner.ipu for each in reachable(run.graph) for inner in each.ops}) > 1:
                        inside = self._readers(run.graph)
                        for t, inner in zip(run.given, run.inputs, strict=False):
                            if inner in inside:
                                found.setdefault(t, inside[inner])
                for t in op.inputs:
                    found.setdefault(t, op.ipu)
        return self._reading[graph]
