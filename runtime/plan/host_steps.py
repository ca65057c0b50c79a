"""`HostSteps`: the steps of one graph that the host executes in order, as planned by `runtime.plan.planning`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from popxl.core.tensor import Constant, Tensor
from popxl.fp8_utils import to_device
from popxl.values.spec import size_in_bytes
from runtime.lowering.channels import Channel
from runtime.plan.compile_options import CompileOptions
from runtime.plan.segments import HostControlFlow, Run, Segment, Values


class LiveRange(NamedTuple):
    """Live range of a value between segments: IPU, bytes, and numbers of its defining and last using segments."""

    tensor: Tensor
    ipu: int
    size: int
    first: int
    last: int


@dataclass
class HostSteps:
    """Host steps of one graph, in order.

    Attributes:
        owned: storages without other owners at the end.
        changed: constants that the steps overwrite: storages that start with the constant's numbers in each run.
        initial_ipus: IPUs of storages at the start, determined by the first step that uses them.
        final_ipus: IPUs of storages at the end.
        nesting: number of graphs inside of each other that the host executes.
    """

    steps: list[Segment | HostControlFlow]
    owned: set[Tensor]
    changed: tuple[Constant, ...]
    initial_ipus: dict[Tensor, int] = field(default_factory=dict)
    final_ipus: dict[Tensor, int] = field(default_factory=dict)
    nesting: int = 0
    _initial_constants: Values = field(init=False)

    def all_steps(self) -> Iterator[tuple[Segment | HostControlFlow, int]]:
        """All steps, including nested steps, with execution counts."""
        waiting = [(step, 1) for step in reversed(self.steps)]
        while waiting:
            step, times = waiting.pop()
            yield step, times
            if isinstance(step, HostControlFlow):
                inside = [inner for subplan in step.subplans for inner in subplan.plan.steps]
                waiting += [(inner, times * step.iterations) for inner in reversed(inside)]

    def segments(self) -> tuple[Segment, ...]:
        """Segments, ordered by first execution."""
        return tuple(step for step, _ in self.all_steps() if isinstance(step, Segment))

    def homes(self) -> dict[Channel, int]:
        """IPU of each stream and buffer: that of its first using segment."""
        homes: dict[Channel, int] = {}
        for segment in self.segments():
            for c in segment.channels:
                homes.setdefault(c, segment.ipu)
        return homes

    def prepare(self, options_at: Mapping[int, CompileOptions], ipu: int) -> None:
        """Upload initial values of modified constants to their IPUs. These arrays are never donated."""
        self._initial_constants = {
            t: options_at[self.initial_ipus.get(t, ipu)].replicas.broadcast(to_device(t.data, t.dtype))
            for t in self.changed
        }

    def run(self, values: Values, run: Run) -> None:
        """Execute the steps."""
        values.update(self._initial_constants)
        for step in self.steps:
            step.run(values, run)

    def curve(self, copies: int) -> tuple[list[tuple[Segment, int, int]], list[LiveRange]]:
        """Memory curve: segments in order, each with bytes in use on its IPU besides step inputs, split into earlier
        values and its own results and temporaries. Also returns values live between segments. Each value counts
        `copies` times."""
        alive: dict[Tensor, tuple[int, int, int]] = {}
        curve: list[tuple[Segment, int, int]] = []
        lives: list[LiveRange] = []

        def bytes_on(ipu: int) -> int:
            return sum(size for p, size, _ in alive.values() if p == ipu)

        for step in self.steps:
            made = {t: copies * size_in_bytes(t) for t in step.makes if t not in step.reads}
            if isinstance(step, Segment):
                executable = step.structure.executable  # `None` where another process runs it
                needed = 0 if executable is None else executable.memory_analysis().temp_size_in_bytes
                curve.append((step, bytes_on(step.ipu), sum(made.values()) + needed))
            else:  # the steps of host control flow make its results
                for subplan in step.subplans:
                    inner, within = subplan.plan.curve(copies)
                    lives += (LiveRange(t, ipu, size, len(curve) + a, len(curve) + b) for t, ipu, size, a, b in within)
                    curve += [(segment, bytes_on(segment.ipu) + before, inside) for segment, before, inside in inner]
            now = len(curve) - 1
            alive |= {t: (step.result_ipus[t], size, now) for t, size in made.items()}
            for t in step.frees:
                if t in alive:
                    lives.append(LiveRange(t, *alive.pop(t), now))
        lives += (LiveRange(t, *known, len(curve) - 1) for t, known in alive.items())
        return curve, lives
