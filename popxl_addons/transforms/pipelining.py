"""Pipelines: a graph's micro-batches go through stages, which all work at once, each on another micro-batch.

A program assigns ops to stages with `pipelined_execution`. A value goes to a later stage as an operand of its ops,
copied to another IPU where needed; or it is stashed: kept in a ring buffer of slots, which one stage writes and the
other reads. `_pipeline` turns ops with stages into graphs that run in overlapping cycles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import SupportsIndex

import popxl
from popxl import initial, ops
from popxl.context import get_current_context
from popxl.extend.memory import current_request
from popxl.op import Op
from popxl.ops import CallSiteInfo
from popxl_addons.grad_info import as_grad_graph_info
from popxl_addons.graph_common import GradGraphInfoLike
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.transforms._pipeline import BEFORE, OpId, PipelineBoundGraph, Pipelining, get_op_pipeline_stage
from popxl_addons.transforms.list_scheduling import Task
from popxl_addons.transforms.schedule import PipelineSchedule, PipelineTimeline, PipelineValue, Search
from popxl_addons.variable_factory import NamedVariableFactories

__all__ = [
    "PipelineBoundGraph",
    "PipelineSchedule",
    "Pipelining",
    "Restore",
    "StageContext",
    "Stash",
    "get_op_pipeline_stage",
    "pipelined_execution",
]


@contextmanager
def pipelined_execution(steps: int, schedule: PipelineSchedule | str | Search | None = None) -> Iterator[StageContext]:
    """Make the ops of the block, in the graph that is current at its start, a pipeline over `steps` micro-batches.

    At the end of the block its ops move into one graph for each stage. Each cycle calls each stage once, for its next
    micro-batch: the pipeline fills up, a loop runs the full cycles, and it drains. The numbers are those of the block
    executed `steps` times, one after the other, as long as no stage reads state that another one changes. A stage has
    its own copy of values from another one: others do not see its in-place changes.

    Each stage takes one element of its streams a step, so ``ir.num_host_transfers`` has to be `steps` (times the
    iterations of loops around the pipeline). Variables, constants, streams and subgraphs may be made anywhere in the
    block. After it, variables hold the result of all steps; other tensors of the block cannot be used any more.

    With a `schedule` the stages are called in its order instead, unrolled, and there may be any number of
    micro-batches. There are no rings then: a stage's result waits for the last stage that reads it. Sums over
    micro-batches are the same bit for bit with each schedule.

    Args:
        steps: number of micro-batches, at least twice the number of stages if there is no `schedule`.
        schedule: order of the stages' tasks: a `PipelineSchedule`, or the name of one, for the IPUs on which the
            program has its stages: ``"gpipe"``, ``"1f1b"`` (interleaved, if an IPU has several forward stages),
            ``"zero_bubble"``, ``"zero_bubble_v"``, ``"dualpipe_v"`` or ``"cycles"``, which is the order without a
            schedule; or ``"search"``, the shortest that is found within a memory limit, for stages on any IPUs.
            ``functools.partial(PipelineSchedule.search, memory=2**30, durations=[...])`` gives the search the limit and
            the stages' times.

    Returns:
        A context manager for a `StageContext`, which assigns ops to stages.

    Raises:
        TypeError: if `steps` is not an integer.
        RuntimeError: for an op that is created in the block outside of any stage.
        ValueError: at the end of the block, if there are too few steps; if the schedule is for another number of stages
            or steps, or not for stages on these IPUs, or impossible; if stages are missing; if an op needs a value of a
            later stage; if two stages use the same stream; if a tensor from outside is changed through an alias that
            another stage makes; or if the graph returns a result of the pipeline. After an error, here or in the block,
            all ops are where they were created.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     numbers = popxl.h2d_stream((), popxl.float32)
        ...     results = popxl.d2h_stream((), popxl.float32)
        ...     with pipelined_execution(8) as p:
        ...         with p.stage(0), popxl.ipu(0):
        ...             x = (ops.host_load(numbers) + 1).copy_to_ipu(1)
        ...         with p.stage(1), popxl.ipu(1):
        ...             ops.host_store(results, x * 2)
        >>> ir.num_host_transfers = 8
        >>> with popxl.Session(ir, "ipu_model") as session:
        ...     session.run({numbers: np.arange(8, dtype=np.float32)})[results].tolist()
        [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]
    """
    graph = popxl.gcg()
    if not isinstance(steps, SupportsIndex):
        raise TypeError(
            f"pipelined_execution: `steps` is {steps!r} ({type(steps).__name__}), expected the number of micro-batches."
        )
    if not isinstance(schedule, PipelineSchedule | str | None) and not callable(schedule):
        raise TypeError(
            f"pipelined_execution: `schedule` is {schedule!r} ({type(schedule).__name__}), expected a "
            "PipelineSchedule, the name of one, a function that makes one, or nothing."
        )
    context = StageContext(in_rings=schedule is None)
    handle = graph.register_op_created_hook(context.hook)
    try:
        yield context
    finally:
        graph.remove_op_created_hook(handle)
    pipeline = Pipelining(graph, operator.index(steps), schedule)
    pipeline.apply(context.stages)
    context.pipeline = pipeline
    context.note_held_activations()


class StageContext:
    """Context of `pipelined_execution`: it assigns ops to stages, and passes values from stage to stage.

    Attributes:
        stages: the stage of each op of the pipeline, by the id of the op.
        pipeline: the resulting pipeline, after the block.
    """

    pipeline: Pipelining

    def __init__(self, in_rings: bool = True) -> None:
        self.stages: dict[OpId, int] = {}
        self._in_rings = in_rings
        self._stashed = list[tuple[popxl.Graph, int, int]]()
        self._current: int | None = None
        self._stash = Stash(cache=True)
        self._restore = Restore(cache=True)

    @property
    def schedule(self) -> PipelineSchedule:
        """Pipeline schedule, known after the block."""
        return self.pipeline.schedule

    @property
    def values(self) -> tuple[PipelineValue, ...]:
        """Values that wait between stages: ``p.schedule.simulate(durations, p.values)`` gives their memory over time.

        Known after the block. Without a schedule, rings that the program has requested are not among them.
        """
        return self.pipeline.values

    def durations(self, session: popxl.Session) -> list[float]:
        """Seconds of each stage for one micro-batch, estimated from its compiled graph, for the device of a session.

        Args:
            session: a session of the program, for a target such as `"gpu h100:4"`, or for a device that
                `popxl calibrate` has measured.

        Raises:
            PopxlError: if no figures of the device are known.
        """
        step = session.cost().step
        if step is None:
            raise popxl.errors.PopxlError(
                "durations: no figures are known of the device of the session. Compile the program for a target, such "
                "as 'gpu h100:4'; or measure the device, with `popxl calibrate --save cpu.json`, and set "
                "POPXL_CHIP=cpu.json."
            )
        stages = self.pipeline.stages
        return [step.inclusive.get(stage.graph.name, 0.0) / self.pipeline.steps for stage in stages]

    def simulate(self, session: popxl.Session) -> PipelineTimeline:
        """Simulate the pipeline on a session's device: timeline of its schedule, with the `durations` of the stages.

        It excludes the time in which a stage waits for copies from others, which `session.cost().seconds` includes. For
        example, the bubble of a program on four H100: ``p.simulate(popxl.Session(ir, "gpu h100:4")).bubble``.

        Args:
            session: as for `durations`.
        """
        return self.schedule.simulate(self.durations(session), self.values)

    def note_held_activations(self) -> None:
        """Tell a tool that plans memory how many micro-batches wait for their gradients, at most on one device."""
        requested = current_request()
        if requested is None or not self._stashed:
            return
        rows = self.schedule.rows
        for graph in dict.fromkeys(graph for graph, _, _ in self._stashed):
            values = [
                PipelineValue(graph.name, source, (reader,), 1, _row_of(rows, source))
                for called, source, reader in self._stashed
                if called is graph
            ]
            stashed = self.schedule.simulate(values=values).stashed_bytes
            requested.live_micro_batches[graph] = max(requested.live_micro_batches.get(graph, 1), *stashed)

    def hook(self, op: Op) -> None:
        """Record a new op's stage. Raises `RuntimeError` without stage."""
        if op.execution_context is not popxl.ExecutionContext.Normal:
            self.stages[op.id] = BEFORE  # it moves weights, when they are loaded or read back
        elif self._current is not None:
            self.stages[op.id] = self._current
        get_op_pipeline_stage(op, self.stages)

    @contextmanager
    def stage(self, i: int) -> Iterator[None]:
        """Assign ops of a `with` block to stage `i`, counted from 0; inner blocks take precedence.

        `ValueError` for a negative number.
        """
        if i < 0:
            raise ValueError(f"pipelined_execution: the stage {i} is negative; stages are numbered from 0.")
        with self._stage_context(i):
            yield

    def stash_and_restore_tensor(self, t: popxl.Tensor, from_stage: int | None = None) -> popxl.Tensor:
        """Value of `t` from an earlier stage, for the current stage's micro-batch.

        It waits in a ring of as many slots as there are stages from the one to the other, both included; with a
        schedule, until the last stage has read it.

        Args:
            t: tensor of the pipeline, or a tensor common to all stages, such as a variable.
            from_stage: the stage that stashes it; by default the one that makes it.

        Returns:
            A tensor like `t`, for the current stage; a scalar comes back with the shape (1,).

        Raises:
            RuntimeError: outside of a stage, and if `from_stage` is needed, since no op of the pipeline makes `t`.
            TypeError: if the current stage does not come after `from_stage`.
            ValueError: if `t` is not in the current graph.

        Example:
            >>> ir = popxl.Ir()
            >>> with ir.main_graph:
            ...     stream, total = popxl.h2d_stream((3,), popxl.float32), popxl.variable(np.zeros(3), popxl.float32)
            ...     with pipelined_execution(4) as p:
            ...         with p.stage(0):
            ...             x = ops.host_load(stream)
            ...             y = ops.exp(x)
            ...         with p.stage(1):
            ...             total += y * p.stash_and_restore_tensor(x)
        """
        to_stage = self._current_stage("stash_and_restore_tensor")
        if t not in popxl.gcg():
            raise ValueError(f"stash_and_restore_tensor: {t!r} is not in the current graph, {popxl.gcg().title}.")
        source = self._producing_stage(t)
        if from_stage is None and source is None:
            raise RuntimeError(
                f"stash_and_restore_tensor: no op of the pipeline makes {t!r}, so `from_stage` has to say which stage "
                "it comes from."
            )
        return self._carry_to_stage(t, source if from_stage is None else from_stage, to_stage)  # type: ignore[arg-type]

    def stash_and_restore_activations(
        self, call_info: CallSiteInfo, grad_info: GradGraphInfoLike
    ) -> dict[popxl.Tensor, popxl.Tensor]:
        """The inputs of a gradient graph from a forward call, for the micro-batch of the current stage.

        Args:
            call_info: the call of the forward graph, in this or an earlier stage.
            grad_info: the gradient graph, or how it relates to the forward graph.

        Returns:
            ``grad_info.inputs_dict(call_info)``, with values that the pipeline makes stashed in the stage of the call
            and restored in this one. If both are the same stage nothing is stashed, nor are tensors from outside, such
            as variables. Call the gradient graph with it: ``grad.call(dy, args=...)``.

        Raises:
            RuntimeError: outside of a stage.
            TypeError: if the call was made in a later stage.
        """
        to_stage = self._current_stage("stash_and_restore_activations")
        inputs = as_grad_graph_info(grad_info).inputs_dict(call_info)
        from_stage = self.stages.get(call_info.op.id, BEFORE)
        if from_stage in (BEFORE, to_stage):
            return inputs
        self._stashed.append((call_info.called_graph, from_stage, to_stage))
        from_pipeline = dict.fromkeys(t for t in inputs.values() if self._producing_stage(t) is not None)
        restored = {t: self._carry_to_stage(t, from_stage, to_stage) for t in from_pipeline}
        restored = {t: value if t.shape else value.reshape(()) for t, value in restored.items()}
        return {of_graph: restored.get(t, t) for of_graph, t in inputs.items()}

    def _carry_to_stage(self, t: popxl.Tensor, from_stage: int, to_stage: int) -> popxl.Tensor:
        """Earlier stage's tensor in the current stage, for one micro-batch."""
        slots = to_stage - from_stage + 1
        if slots <= 1:
            raise TypeError(
                f"A value can only be stashed for a later stage: {t!r} was to go from stage {from_stage} to stage "
                f"{to_stage}. In the stage that makes it, use the tensor itself."
            )
        if not self._in_rings:
            with self._stage_context(from_stage):
                copy = ops.identity(t)  # `t` may be changed in place later
            return copy if t.shape else copy.reshape((1,))
        with get_current_context().on_ipu(t.location[0]):
            facts, write = self._stash.create_graph(t, slots)
            ring = self._zeros(facts)
            with self._stage_context(from_stage):
                write.bind(ring).call(t)
        facts, restore = self._restore.create_graph(ring.stash)
        (restored,) = restore.bind(self._zeros(facts)).call(ring.stash)
        return restored

    def _zeros(self, facts: NamedVariableFactories) -> NamedTensors:
        """Initial zero tensors of a pipeline, not variables: stashes die with their pipeline."""
        with self._stage_context(BEFORE):
            return facts.init_zero()

    def _producing_stage(self, t: popxl.Tensor) -> int | None:
        """Stage that produces a tensor; `None` for outside tensors."""
        stage = BEFORE if t.producer is None else self.stages.get(t.producer.id, BEFORE)
        return None if stage == BEFORE else stage

    def _current_stage(self, name: str) -> int:
        if self._current is None:
            raise RuntimeError(f"{name}: must be called in a stage context, `with p.stage(i):`.")
        return self._current

    @contextmanager
    def _stage_context(self, stage: int) -> Iterator[None]:
        outer, self._current = self._current, stage
        try:
            yield
        finally:
            self._current = outer


def _row_of(rows: Sequence[Sequence[Task]], stage: int) -> int:
    """Device of a stage."""
    return next(device for device, row in enumerate(rows) if any(task.stage == stage for task in row))


class Stash(Module):
    """Writes a tensor into the next slot of a ring of `stash_size` slots. Variables: ``counter`` and ``stash``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = Stash().create_graph(popxl.TensorSpec((3, 2), popxl.float32), 4)
        >>> facts.stash.shape, facts.counter.shape
        ((4, 3, 2), ())
    """

    @popxl.in_sequence()
    def build(self, t: popxl.Tensor, stash_size: int) -> None:
        counter = _counter(self)
        empty = partial(initial.zeros, (stash_size, *t.shape))
        stash = self.add_variable_input("stash", empty, t.dtype, by_ref=True)
        ops.dynamic_update_(stash, counter, t.reshape((1, *t.shape)), axes=[0], sizes=[1], no_overlap=True)
        ops.increment_mod_(counter, 1, stash_size)


class Restore(Module):
    """Reads the next slot of a ring that a `Stash` writes. Variable: ``counter``.

    The first slot read is the one that was written first, whenever that was. Slots of scalars come back with the shape
    (1,).

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = Restore().create_graph(popxl.TensorSpec((4, 3, 2), popxl.float32))
        >>> graph.graph.outputs[0].shape
        (3, 2)
    """

    @popxl.in_sequence()
    def build(self, stash: popxl.Tensor) -> popxl.Tensor:
        counter = _counter(self)
        slot = ops.dynamic_slice(stash, counter, axes=[0], sizes=[1], no_overlap=True)
        ops.increment_mod_(counter, 1, stash.shape[0])
        return slot.reshape(stash.shape[1:] or (1,))


def _counter(module: Module) -> popxl.Tensor:
    """The number of the slot that comes next."""
    return module.add_variable_input("counter", partial(initial.zeros, ()), popxl.uint32, by_ref=True)
