"""Conversion of ops with stages to a pipeline: one graph for each stage, called in overlapping cycles.

In cycle `c` stage `s` works on micro-batch `c - s`, so with `S` stages there are ``steps + S - 1`` cycles. In the first
and the last ``S - 1``, some stages are idle; these cycles are unrolled. The full ones in between are a loop. A value
that stage `s` makes and stage `t` reads waits ``t - s`` cycles: the loop carries waiting values.

Each stage is one graph, which every cycle calls in one place, and within a cycle no call needs a result of another:
with stages on several devices, all calls of a cycle can run at once. Copies from IPU to IPU belong to the stage that
makes them. The assignment of ops to stages by programs is in `pipelining`.

With a schedule there are no cycles: the stages are called in its order, and values are passed on to their readers. So
the number of waiting values follows from the schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.graphs import reachable, storages, written_inputs
from popxl.op import Op
from popxl.tensor import Constant
from popxl_addons.graph import BoundGraph
from popxl_addons.named_tensors import TensorMap
from popxl_addons.transforms._stand_in import stand_in
from popxl_addons.transforms.schedule import PipelineSchedule, PipelineValue, Search, scheduled

OpId = int

BEFORE = -1
"""Stage number of ops that run once before the pipeline."""

Waiting = dict[str, deque[Any]]
"""Queues of values for later stages, oldest first, by tensor id; `None` for empty entries."""


def get_op_pipeline_stage(op: Op, op_dict: Mapping[OpId, int]) -> int:
    """Stage of an op, looked up by id. Raises `RuntimeError` for missing stages."""
    if op.id not in op_dict:
        raise RuntimeError(
            f"Operation must be created in a stage context. {op!r} ({op.source}) is in a `pipelined_execution` block, "
            "and in none of its stages: create it inside `with p.stage(i):`, or before the block."
        )
    return op_dict[op.id]


class PipelineBoundGraph(BoundGraph):
    """A pipeline stage: graph inputs and outputs stand for program tensors, identified by original ids.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x, y = popxl.variable(1.0, name="x"), popxl.variable(2.0, name="y")
        ...     stage = PipelineBoundGraph(ir.create_empty_graph("stage"))
        ...     with stage.graph:
        ...         stage.add_output_tensor(stage.add_variable_input(x) * 2.0, "double")
        ...     stage.reconnect_input("x", y)
        ...     (double_y,) = stage.call()
        >>> stage.original_input_ids, stage.original_output_ids
        (('x',), ('double',))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inputs: dict[str, popxl.Tensor] = {}
        self._output_ids: list[str] = []

    def __contains__(self, value: popxl.Tensor) -> bool:
        return value in self.graph

    @property
    def original_input_ids(self) -> tuple[str, ...]:
        """Original ids of inputs, in order."""
        return tuple(self._inputs)

    @property
    def original_output_ids(self) -> tuple[str, ...]:
        """Original ids of outputs, in order."""
        return tuple(self._output_ids)

    def add_variable_input(self, tensor: popxl.Tensor) -> popxl.Tensor:
        """Input bound to `tensor`, created on demand."""
        if tensor.id not in self._inputs:
            self._inputs[tensor.id] = self.graph.add_input_like(tensor)
            self.args[self._inputs[tensor.id]] = tensor
        return self._inputs[tensor.id]

    def add_output_tensor(self, tensor: popxl.Tensor, original_id: str) -> None:
        """Add output `tensor` for `original_id`."""
        self.graph.add_output(tensor)
        self._output_ids.append(original_id)

    def reconnect_input(self, original_id: str, new: popxl.Tensor) -> None:
        """Rebind the input for `original_id` to another tensor."""
        self.args[self._inputs[original_id]] = new

    def call(self, *args: Any, inputs_dict: TensorMap | None = None) -> tuple[popxl.Tensor, ...]:  # type: ignore[override]
        """Call the graph like `BoundGraph.call`; `inputs_dict` overrides bindings."""
        return super().call(*args, args=inputs_dict)


class Pipelining:
    """Puts a pipeline over `steps` micro-batches in the place of ops of a graph."""

    def __init__(self, graph: popxl.Graph, steps: int, schedule: PipelineSchedule | str | Search | None = None):
        self.graph = graph
        self.steps = steps
        self._wanted = schedule
        self.stages: list[PipelineBoundGraph] = []
        self._ipus: list[int | None] = []  # where each stage is called
        self._transfers: list[tuple[tuple[popxl.Tensor, int | None], int, tuple[int, ...]]] = []  # makers and readers
        self._makers: dict[str, int] = {}  # the stages that make values for others
        self._waits: dict[str, int] = {}  # the cycles until the last of these reads them
        self._outer_tensors: dict[str, popxl.Tensor] = {}  # the tensors from outside
        self._changed: set[str] = set()  # tensors among them that some stage changes

    def apply(self, include_ops: Mapping[OpId, int]) -> None:
        """Replace the ops that `include_ops` gives stages, by their ids. `ValueError` if that makes no pipeline."""
        by_stage = self._sorted(include_ops)
        self._check(by_stage, include_ops)
        self._plan(by_stage)
        with get_current_context().set(scope_prefix=""):  # names have the scopes that they were made in
            self.construct_graphs(by_stage)
            with self.graph:
                self.build() if self._wanted is None else self.build_scheduled()

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """Pipeline schedule, known after application. Raises `ValueError` if absent."""
        stages = range(len(self._ipus))
        needs = [{source for _, source, readers in self._transfers if s in readers} for s in stages]
        wanted = "cycles" if self._wanted is None else self._wanted
        return scheduled(wanted, self._ipus, needs, self.steps, self._values_by_row)

    @cached_property
    def values(self) -> tuple[PipelineValue, ...]:
        """Values passed between stages, known after application."""
        return self._values_by_row(self.schedule.device_of)

    def _values_by_row(self, device_of: Sequence[int]) -> tuple[PipelineValue, ...]:
        """Values passed between stages, if each stage is in the row that `device_of` gives."""
        rows = dict(zip(self._ipus, device_of, strict=True))
        return tuple(
            PipelineValue(t.name, source, readers, t.nelms * t.dtype.itemsize, rows.get(ipu, device_of[source]))
            for (t, ipu), source, readers in self._transfers
        )

    def _plan(self, by_stage: Sequence[Sequence[Op]]) -> None:
        """Determine stage devices and waiting values. Raises `ValueError` for an incompatible schedule."""
        self._ipus = [Counter(op.ipu for op in members).most_common(1)[0][0] for members in by_stage]
        makers = _makers(by_stage)
        readers: dict[popxl.Tensor, list[int]] = {}
        for s, members in enumerate(by_stage):
            for t in dict.fromkeys(t for op in members for t in op.inputs if makers.get(t, s) != s):
                readers.setdefault(t, []).append(s)
        self._transfers = [((t, t.location[0]), makers[t], tuple(stages)) for t, stages in readers.items()]
        if self._wanted is not None:
            self.schedule  # noqa: B018  # what is wrong with it is said before anything moves

    def construct_graphs(self, by_stage: Sequence[Sequence[Op]]) -> None:
        """Move stage ops into separate graphs, last stage first, since no stage depends on it."""
        makers = _makers(by_stage)
        ids = {t: t.id for t in makers}
        self.stages = [
            PipelineBoundGraph(self.graph.ir.create_empty_graph(f"pipeline_stage_{s}")) for s in range(len(by_stage))
        ]
        for s, stage in reversed([*enumerate(self.stages)]):
            operands = dict.fromkeys(t for op in by_stage[s] for t in op.inputs if makers.get(t) != s)
            for t in operands:
                if t in makers:
                    self._makers[t.id] = makers[t]
                    self._waits[t.id] = max(self._waits.get(t.id, 0), s - makers[t])
            stand_ins = {t: stand_in(t, makers, stage.graph, partial(_stage_tensor, stage)) for t in operands}
            self._outer_tensors.update((t.id, t) for t in stage.args.values() if t not in makers)
            self.graph.move(by_stage[s], stage.graph, stand_ins)
            for t in ids:
                if makers[t] == s and ids[t] in self._waits:
                    stage.add_output_tensor(t, ids[t])
            for i in written_inputs(stage.graph):
                if (id := stage.original_input_ids[i]) in self._outer_tensors:
                    stage.graph.inputs[i].by_ref = True
                    self._changed.add(id)

    def build(self) -> None:
        """Add pipeline cycles to the graph: fill phase, main loop, drain phase."""
        count = len(self.stages)
        waiting: Waiting = {id: deque([None] * wait, wait) for id, wait in self._waits.items()}
        for first_idle in range(1, count):
            self.cycle(range(first_idle), self._outer_tensors, waiting)
        self.main_cycle(waiting)
        for first_busy in range(1, count):
            self.cycle(range(first_busy, count), self._outer_tensors, waiting)

    @popxl.in_sequence()
    def build_scheduled(self) -> None:
        """Add a call per scheduled task, in order of earliest start."""
        timeline = self.schedule.simulate()
        outputs: dict[tuple[str, int], popxl.Tensor] = {}
        for _, (s, m), *_ in timeline.tasks:
            stage = self.stages[s]
            for id in stage.original_input_ids:
                stage.reconnect_input(id, outputs[id, m] if id in self._makers else self._outer_tensors[id])
            with get_current_context().set(ipu_id=self._ipus[s]):
                outputs.update(zip([(id, m) for id in stage.original_output_ids], stage.call(), strict=True))

    def cycle(self, busy: Iterable[int], outer: Mapping[str, popxl.Tensor], waiting: Waiting) -> None:
        """Call each busy stage once. Reads `waiting` values and replaces them."""
        outputs: dict[str, popxl.Tensor] = {}
        for s in busy:
            stage = self.stages[s]
            for id in stage.original_input_ids:
                stage.reconnect_input(id, waiting[id][self._makers[id] - s] if id in waiting else outer[id])
            with get_current_context().set(ipu_id=self._ipus[s]):
                outputs.update(zip(stage.original_output_ids, stage.call(), strict=True))
        for id, queue in waiting.items():
            queue.append(outputs.get(id))

    def main_cycle(self, waiting: Waiting) -> None:
        """Loop over full cycles, carrying `waiting` values."""
        body = self.graph.ir.create_empty_graph("pipeline_cycle")
        carried = [t for queue in waiting.values() for t in queue]
        with body:
            inner_waiting: Waiting = {
                id: deque([body.add_input_like(t) for t in queue], queue.maxlen) for id, queue in waiting.items()
            }
            outer = {id: body.add_input_like(t, id in self._changed) for id, t in self._outer_tensors.items()}
            self.cycle(range(len(self.stages)), outer, inner_waiting)
            for queue in inner_waiting.values():
                for t in queue:
                    body.add_output(t)
        full = self.steps - len(self.stages) + 1
        results = iter(ops.repeat(body, full, carried, self._outer_tensors.values()))
        for queue in waiting.values():
            queue.extend([next(results) for _ in queue])

    # Checks

    def _sorted(self, stages: Mapping[OpId, int]) -> list[list[Op]]:
        """Ops of each stage. `ValueError` for empty stages, and too few steps."""
        members = defaultdict(list)
        for op in self.graph.ops:
            if stages.get(op.id, BEFORE) != BEFORE:
                members[stages[op.id]].append(op)
        count = 1 + max(members, default=0)
        if missing := [s for s in range(count) if s not in members]:
            raise ValueError(
                f"pipelined_execution: there are no ops in the stages {missing}. Stages are numbered from 0, without "
                f"gaps, and each has ops; there are some in {sorted(members)}."
            )
        if self._wanted is None and self.steps < 2 * count:
            raise ValueError(
                f"pipelined_execution: `steps` is {self.steps}, expected at least {2 * count}, twice the number of "
                "stages. Use more micro-batches, fewer stages, or a `schedule`."
            )
        return [members[s] for s in range(count)]

    def _check(self, by_stage: Sequence[Sequence[Op]], stages: Mapping[OpId, int]) -> None:
        """Refuse what a pipeline cannot do."""
        makers = _makers(by_stage)
        for op in self.graph.ops:
            for t in op.inputs:
                if t in makers and (s := get_op_pipeline_stage(op, stages)) < makers[t]:
                    raise ValueError(
                        f"pipelined_execution: {op!r} ({op.source}) in stage {s} needs {t!r}, which the later stage "
                        f"{makers[t]} makes. Values go to later stages only."
                    )
        if outputs := [t for t in self.graph.outputs if t in makers]:
            raise ValueError(
                f"pipelined_execution: {self.graph.title} returns {outputs}, which the pipeline computes anew for each "
                "micro-batch. Write it into a tensor from outside, or store it to the host."
            )
        self._check_updates(by_stage, makers)
        _check_streams(by_stage)

    def _check_updates(self, by_stage: Sequence[Sequence[Op]], makers: Mapping[popxl.Tensor, int]) -> None:
        """Raise `ValueError` for an update of a tensor from outside through an alias that another stage makes."""
        storages_of = storages(self.graph.ops)
        for s, members in enumerate(by_stage):
            for t in (op.inputs[i] for op in members for i in op.modified):
                if not makers.keys() >= {*storages_of[t]} and any(makers.get(u, s) != s for u in _chain(t, makers)):
                    raise ValueError(
                        f"pipelined_execution: stage {s} changes a tensor from outside in place by way of {t!r}, which "
                        f"is an alias of it that another stage makes. Make the alias in stage {s}."
                    )


def _check_streams(by_stage: Sequence[Sequence[Op]]) -> None:
    """Raise `ValueError` for a stream that several stages use."""
    users: dict[Any, int] = {}
    for s, members in enumerate(by_stage):
        for stream in _streams(members):
            if users.setdefault(stream, s) != s:
                raise ValueError(
                    f"pipelined_execution: the stages {users[stream]} and {s} both use {stream}, but work on "
                    "different micro-batches at a time, so the order of its elements would change. Use it in one "
                    "stage; `stash_and_restore_tensor` takes the value to or from the other."
                )


def _makers(by_stage: Iterable[Iterable[Op]]) -> dict[popxl.Tensor, int]:
    """Map pipeline tensors to producing stages."""
    return {t: s for s, members in enumerate(by_stage) for op in members for t in op.outputs}


def _chain(t: popxl.Tensor, inside: Container[popxl.Tensor]) -> Iterator[popxl.Tensor]:
    """Follow aliases and views of a tensor through the pipeline."""
    yield t
    if t in inside and t.producer is not None:
        for base in t.producer.bases:
            yield from _chain(base, inside)


def _stage_tensor(stage: PipelineBoundGraph, t: popxl.Tensor) -> popxl.Tensor:
    """Stage counterpart of an outside tensor; constants are copied per stage."""
    if not isinstance(t, Constant):
        return stage.add_variable_input(t)
    with stage.graph:
        return popxl.constant(t.data, t.dtype, t.name)


def _streams(members: Iterable[Op]) -> set[Any]:
    """Streams used by ops or their callees."""
    called = dict.fromkeys(graph for op in members for callee in op.called_graphs for graph in reachable(callee))
    all_ops = (*members, *(op for graph in called for op in graph.ops))
    return {member.attributes["stream"] for op in all_ops for member in op.parts if member.kind.exchange == "stream"}
