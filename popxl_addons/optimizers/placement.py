"""Placement of an optimiser's step: each part runs on the IPU of its variable, so that its state is there too."""

from __future__ import annotations

import popxl
from popxl.context import get_current_context
from popxl.extend.graphs import final_ipu, reading_ipus


class Placement:
    """IPU placement of main-graph tensors, with copies on demand."""

    def __init__(self) -> None:
        self._copies: dict[tuple[popxl.Tensor, int], popxl.Tensor] = {}
        self._current = get_current_context().ipu_id
        self._reading_ipus = reading_ipus(popxl.gmg())

    def ipu_of(self, t: popxl.Tensor) -> int | None:
        """IPU of the producing op; for variables, of the first reader; by default the current IPU."""
        ipu = next(iter(self._reading_ipus.get(t, ())), None) if t.origin.producer is None else final_ipu(t)
        return self._current if ipu is None else ipu

    def copy_to(self, t: popxl.Tensor, ipu: int | None) -> popxl.Tensor:
        """`t` on an IPU: itself if already there or unused, otherwise a copy."""
        is_free = t.origin.producer is None and t not in self._reading_ipus and t.location[0] is None
        if ipu is None or is_free or self.ipu_of(t) == ipu:
            return t
        if (t, ipu) not in self._copies:
            self._copies[t, ipu] = popxl.ops.ipu_copy(t, ipu, self.ipu_of(t))
        return self._copies[t, ipu]
