"""On which IPU each part of an optimiser's step runs: on that of the variable, so that its state lies there, too."""

from __future__ import annotations

import popxl
from popxl.context import get_current_context
from popxl.extend.graphs import final_ipu, reading_ipus

__all__ = ["Placement"]


class Placement:
    """The IPUs of the tensors of the main graph, and copies of tensors on the IPUs that need them."""

    def __init__(self) -> None:
        self._copies: dict[tuple[popxl.Tensor, int], popxl.Tensor] = {}
        self._current = get_current_context().ipu_id
        self._read_on = reading_ipus(popxl.gmg())

    def ipu_of(self, t: popxl.Tensor) -> int | None:
        """The IPU whose op makes a tensor; of a variable, the first that reads it; the current one, if none does."""
        ipu = next(iter(self._read_on.get(t, ())), None) if t.origin.producer is None else final_ipu(t)
        return self._current if ipu is None else ipu

    def on(self, t: popxl.Tensor, ipu: int | None) -> popxl.Tensor:
        """`t` on an IPU: itself where it is there already, or where nothing has used it yet; otherwise a copy."""
        is_free = t.origin.producer is None and t not in self._read_on and t.location[0] is None
        if ipu is None or is_free or self.ipu_of(t) == ipu:
            return t
        if (t, ipu) not in self._copies:
            self._copies[t, ipu] = popxl.ops.ipu_copy(t, ipu, self.ipu_of(t))
        return self._copies[t, ipu]
