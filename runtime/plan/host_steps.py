"""`HostSteps`: the steps of one graph that the host executes in order, as planned by `runtime.plan.planning`.

A step is a compiled segment, or an op whose graphs the host executes: `HostControlFlow`, with the steps of these.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.graph import Graph
from popxl.values.spec import size_in_bytes
from runtime.lowering.channels import FAILURE, Channel
from runtime.plan.compile_options import CompileOptions
from runtime.plan.segments import Key, PlanRun, Segment, Step, Values

if TYPE_CHECKING:
    from runtime.plan.overlap import OverlappedLoop


class LiveValue(NamedTuple):
    """Value that is live between segments: IPU, bytes, and numbers of its defining and last using segments."""

    tensor: Tensor
    ipu: int
    size: int
    first: int
    last: int


@dataclass
class SubPlan:
    """Host-executed graph, with its input and output bindings.

    Attributes:
        arguments: storages outside, and the graph inputs bound to them.
        constant_inputs: inputs bound to constants that are never changed; they have no key of their own.
        results: storages outside that have a new value afterwards, and the inner storages that hold it.
        carried: inner storages passed to the next iteration of a loop, by the storages that receive them.
        carried_copies: copies to make before the next iteration: storages, and their target IPUs.
        final_copies: copies to make at the end, to the IPUs where other branches leave these storages.
    """

    graph: Graph
    arguments: tuple[tuple[Tensor, Tensor], ...]
    constant_inputs: dict[Tensor, Constant]
    results: tuple[tuple[Tensor, Tensor], ...]
    carried: dict[Tensor, Tensor]
    plan: HostSteps = field(init=False)  # by `runtime.plan.planning`
    keys: tuple[Key, ...] = ()
    carried_copies: tuple[tuple[Tensor, int], ...] = ()
    final_copies: tuple[tuple[Tensor, int], ...] = ()
    _constants: Values = field(init=False)

    def prepare(self, options_at: Mapping[int, CompileOptions], ipu: int) -> None:
        """Upload constant arguments, and the graph's own constants, to the IPUs that read them."""
        starts = self.plan.initial_ipus
        self._constants = {t: options_at[starts.get(t, ipu)].upload(c) for t, c in self.constant_inputs.items()}
        self.plan.prepare(options_at, ipu)

    @cached_property
    def keys_by_input(self) -> dict[Tensor, Key]:
        """Keys of arguments outside, by graph input; without constants."""
        pairs = zip(self.arguments, self.keys, strict=True)
        return {t: key for (_, t), key in pairs if t not in self.constant_inputs}

    def constants(self) -> Values:
        """Initial values that do not come from outside."""
        return self._constants | self.plan.initial_constants

    def initial_values(self, values: Values) -> Values:
        """Initial values of the steps."""
        inner = dict(self._constants)
        inner.update((t, values[key]) for (_, t), key in zip(self.arguments, self.keys, strict=True) if t not in inner)
        return inner

    def next(self, inner: Values, run: PlanRun) -> Values:
        """Values for the next iteration."""
        inner = {t: inner[result] for t, result in self.carried.items()}
        for t, ipu in self.carried_copies:
            inner[t] = run.copy_to_ipu(inner[t], ipu)
        return inner

    def finish(self, inner: Values, values: Values, run: PlanRun) -> None:
        """Store results in the outer values, with copies to their final IPUs."""
        values.update((t, inner[result]) for t, result in self.results)
        for t, ipu in self.final_copies:
            values[t] = run.copy_to_ipu(values[t], ipu)


@dataclass(kw_only=True)
class HostControlFlow(Step):
    """Op with host-executed graphs: a call, a loop (iteration by iteration), or a conditional (one branch).

    Attributes:
        subplans: graphs of the op: for a conditional, the two branches.
        condition: condition of a branch. The host has to wait for it.
        numbers: iterations that execute the graph, in order.
        loop_inputs: inputs that only the graph of a loop has: the iteration number, and true.
        overlapped: execution of a loop with overlapping iterations, if the op asks for it and the plan permits it.
    """

    op: Op
    subplans: tuple[SubPlan, ...]
    condition: Tensor | None
    numbers: range
    loop_inputs: tuple[Tensor, ...]
    overlapped: OverlappedLoop | None = None

    @property
    def operand_keys(self) -> tuple[Key, ...]:
        """Keys of the values that the op reads."""
        keys = [key for subplan in self.subplans for key in subplan.keys_by_input.values()]
        return (*keys, *(() if self.condition is None else (self.condition,)))

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Streams and buffers used by the graphs."""
        segments = [segment for subplan in self.subplans for segment in subplan.plan.segments()]
        return tuple(c for segment in segments for c in segment.channels)

    @property
    def iterations(self) -> int:
        """Number of executions of the graph in a run."""
        return len(self.numbers)

    def prepare(self, options_at: Mapping[int, CompileOptions], shared: Container[Channel]) -> None:
        """Upload constant arguments to the IPUs that read them."""
        for subplan in self.subplans:
            subplan.prepare(options_at, self.ipu)

    @cached_property
    def _numbered_inputs(self) -> tuple[tuple[Tensor, int], ...]:
        """Used inputs specific to a loop's graph, with their IPUs."""
        starts = self.subplans[0].plan.initial_ipus
        return tuple((t, starts[t]) for t in self.loop_inputs if t in starts)

    def set_number(self, inner: Values, iteration: int, run: PlanRun) -> None:
        """Set the inputs that a loop gives its graph."""
        for t, ipu in self._numbered_inputs:
            inner[t] = run.number(np.int32(iteration) if t is self.loop_inputs[0] else np.True_, ipu)

    def run(self, values: Values, run: PlanRun) -> None:
        """Run the op."""
        self.copy_operands(values, run)
        subplan = self.subplans[0]
        if self.condition is not None and not np.asarray(run.own_copy(values[self.condition])).item():
            subplan = self.subplans[1]
        if self.overlapped is not None:
            (inner,) = deque(self.overlapped.iterate(values, run, self.iterations), maxlen=1)
        else:
            inner = subplan.initial_values(values)
            for iteration in self.numbers:
                if iteration != self.numbers[0]:
                    inner = subplan.next(inner, run)
                self.set_number(inner, iteration, run)
                subplan.plan.run(inner, run)
        subplan.finish(inner, values, run)
        for key in self.drops:
            values.pop(key, None)  # a `Frame` has none of the values of branches that were not taken


@dataclass
class HostSteps:
    """Host steps of one graph, in order.

    Attributes:
        owned: storages without other owners at the end.
        changed: constants that the steps overwrite: storages that start with the constant's numbers in each run.
        initial_constants: arrays of `changed`, once the plan is prepared.
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
    initial_constants: Values = field(init=False)

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

    def shared_channels(self) -> set[Channel]:
        """Streams and buffers that segments on several IPUs use."""
        ipus: defaultdict[Channel, set[int]] = defaultdict(set)
        for segment in self.segments():
            for c in segment.channels:
                ipus[c].add(segment.ipu)
        return {c for c, used_on in ipus.items() if len(used_on) > 1 and c is not FAILURE}

    def prepare(self, options_at: Mapping[int, CompileOptions], ipu: int) -> None:
        """Upload initial values of modified constants to their IPUs. These arrays are never donated."""
        self.initial_constants = {t: options_at[self.initial_ipus.get(t, ipu)].upload(t) for t in self.changed}

    def run(self, values: Values, run: PlanRun) -> None:
        """Execute the steps."""
        values.update(self.initial_constants)
        for step in self.steps:
            step.run(values, run)

    def curve(self, copies: int) -> MemoryCurve:
        """Memory over the steps of a run, where each value counts `copies` times."""
        curve = MemoryCurve(copies)
        for step in self.steps:
            curve.add(step, ())
        curve.release(())
        return curve


@dataclass
class MemoryCurve:
    """Memory of each device over a run, besides variables and feeds.

    Attributes:
        copies: number of replicas that share a device: each value counts so often.
        segments: segments in order, each with bytes in use on its IPU besides step inputs: of earlier values, and of
            its own results and temporaries.
        lives: values that are live between segments.
    """

    copies: int
    segments: list[tuple[Segment, int, int]] = field(default_factory=list)
    lives: list[LiveValue] = field(default_factory=list)
    _alive: dict[Hashable, dict[Key, tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, step: Segment | HostControlFlow, scope: Hashable) -> None:
        """Add a step. `scope` tells values of one execution of a graph from those of others."""
        if isinstance(step, Segment):
            executable = step.structure.executable  # `None` where another process runs it
            temporaries = 0 if executable is None else executable.memory_analysis().temp_size_in_bytes
            held = sum(size for alive in self._alive.values() for ipu, size, _ in alive.values() if ipu == step.ipu)
            self.segments.append((step, held, sum(self._made(step).values()) + temporaries))
        elif step.overlapped is not None:
            step.overlapped.add_to(self, scope)
        else:
            for number, subplan in enumerate(step.subplans):
                for inner in subplan.plan.steps:
                    self.add(inner, (scope, step.op, number))
                self.release((scope, step.op, number))
        self.add_results(step, scope)

    def add_results(self, step: Step, scope: Hashable) -> None:
        """Add the results of a step, and end the lives of values that it frees."""
        now, alive = len(self.segments) - 1, self._alive[scope]
        alive |= {t: (step.result_ipus[t], size, now) for t, size in self._made(step).items()}
        for t in step.frees:
            self._end(t, alive.pop(t, None))

    def move(self, scope: Hashable, key: Key, to: Hashable, result: Key) -> None:
        """Hand a value to another execution, where it has another key."""
        if key in self._alive[scope]:
            self._alive[to][result] = self._alive[scope].pop(key)

    def drop(self, scope: Hashable, key: Key) -> None:
        """End the life of a value."""
        self._end(key, self._alive[scope].pop(key, None))

    def release(self, scope: Hashable) -> None:
        """End the lives of all values of one execution of a graph."""
        for key, known in self._alive.pop(scope, {}).items():
            self._end(key, known)

    def _end(self, key: Key, known: tuple[int, int, int] | None) -> None:
        if known is not None and isinstance(key, Tensor):  # copies on other IPUs do not count
            self.lives.append(LiveValue(key, *known, len(self.segments) - 1))

    def _made(self, step: Step) -> dict[Tensor, int]:
        """Bytes of new values."""
        return {t: self.copies * size_in_bytes(t) for t in step.makes if t not in step.reads}
