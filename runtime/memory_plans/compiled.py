"""A program compiled with a memory plan: what the search for a plan within a budget reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from popxl.analysis.memory import Memory
from popxl.base.memory_requests import RequestedMemory, StateLocation
from popxl.core.recording import Op
from popxl.graph import Graph
from popxl.ir import Ir
from runtime.costs.cost import Cost
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.memory_plans.needs import GraphNeeds
from runtime.memory_plans.solver import Release
from runtime.program.compiled import CompiledProgram
from runtime.targets.chip import Chip

RELEASES: Mapping[str, Release] = {"inlined": "read", "rolled": "loop", "batched": "loop"}
"""Release of activations, by mode of called graphs; in other modes, memory is free after a call."""


class Division(NamedTuple):
    """Division of a step that reduces its memory, besides a memory plan.

    Attributes:
        micro_batches: number of micro-batches of a batch.
        state: location of the optimiser state between steps.
    """

    micro_batches: int = 1
    state: StateLocation = "device"

    def __str__(self) -> str:
        """Text for messages: "4 micro-batches, state on the host"."""
        divided = "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return divided if self.state == "device" else f"{divided}, state on the host"


IN_ONE_PIECE = Division()


class Compiled(NamedTuple):
    """Program compiled with a memory plan.

    Attributes:
        ir: the program.
        memory, cost: figures of the compiler.
        chip: published figures, if there are any.
        offloadable: names of graphs whose offloaded activations are on the host meanwhile: those that rerolled loops
            call, on TPUs. XLA fetches those of other calls long before they are read; on GPUs, no plan of a budget with
            them has been compiled.
        release: time when the memory of an activation is freed.
        divisions: divisions that the program leaves open, from few micro-batches to many; those with its state on the
            host last.
        applied: object that applied the plan: its `needs` are the graphs, its `plan` is the applied plan, and
            `plan_with(treatments)` another plan for the same program.
        updates_early: whether variables are updated as soon as their gradients are known, and kernels hold little
            beside activations: on GPUs and TPUs, except between noinline calls.
        fuses_factors: whether products compute their factors from operands in memory: on TPUs.
        chosen_mode: mode of called graphs, if it was chosen as the fastest one.
    """

    ir: Ir
    memory: Memory
    cost: Cost
    chip: Chip | None
    offloadable: frozenset[str]
    release: Release
    divisions: tuple[Division, ...]
    applied: Any
    updates_early: bool = False
    fuses_factors: bool = False
    chosen_mode: str | None = None

    @property
    def needs(self) -> Sequence[GraphNeeds]:
        """Memory needs of the planned graphs on this device."""
        needs: Sequence[GraphNeeds] = self.applied.needs
        if self.updates_early:
            needs = [g.with_early_updates() for g in needs]
        return [g.with_fused_factors() for g in needs] if self.fuses_factors else needs

    def weight(self, planned: int) -> float:
        """Bytes of the peak for a planned byte, by estimate: kernels may hold further values beside activations."""
        if self.updates_early:
            return 1.0
        return min(max((self.memory.temporaries or 0) / planned, 1.0), 2.0) if planned else 1.0


def compiled_program(ir: Ir, program: CompiledProgram, requested: RequestedMemory) -> Compiled:
    """Compiled program, with the data for the plan search.

    Args:
        requested: request under which it was built.

    Raises:
        ValueError: if the program applies no memory plan, the requested one to several models, or another one.
    """
    asked = requested.request.memory
    applied = [each for each in requested.applied if each.memory == asked] or requested.applied
    if len(applied) > 1:
        raise ValueError(
            f"plan_memory: the program applies {len(applied)} memory plans; expected one, as a budget is planned for "
            "one model at a time. Give the argument of `build` to one `memory`, such as that of the pipeline's stage "
            "that needs most. Leave the others out, or give them a policy other than 'everything', or the plan that "
            "was found for them."
        )
    if not applied:
        raise ValueError(
            "plan_memory: the program applies 0 memory plans; expected one. Give `memory` to the one "
            "`train_step` or `autodiff` of the program. A `poptorch.trainingModel` applies one where it is compiled, "
            "unless its model has checkpoints, or its options recompute (`autoRecomputation`, a pipeline). Nothing "
            "runs, so a program has to train before it runs anything else."
        )
    stated = applied[0].memory
    if asked != stated and str in (type(asked), type(stated)):
        raise ValueError(
            f"plan_memory: the program applies {_described(stated)} where {_described(asked)} is asked for. Give the "
            "argument of `build` to `memory`, instead of a policy or plan of its own. `popxl plan` plans a "
            "`train_step`; with `autodiff(memory=…)`, call `addons.plan_memory`."
        )
    release = "read" if applied[0].covers_model else RELEASES.get(program.layout.mode, "call")
    offloadable = frozenset(_offloadable(program, applied[0].names))
    memory, cost = memory_of_program(ir, program), cost_of(program)
    platform = program.layout.compile_target.platform
    is_chosen = platform != "cpu" and ir.options.calledGraphs == "auto" and not applied[0].covers_model
    return Compiled(
        ir,
        memory,
        cost,
        program.device.chip,
        offloadable,
        release,
        tuple(_divisions(program, requested)),
        applied[0],
        updates_early=platform != "cpu" and release != "call",
        fuses_factors=platform == "tpu",
        chosen_mode=program.layout.mode if is_chosen and program.layout.mode in RELEASES else None,
    )


def _described(memory: Any) -> str:
    """A plan or policy in an error."""
    return f"the policy {memory!r}" if isinstance(memory, str) else "a plan"


def _divisions(program: CompiledProgram, requested: RequestedMemory) -> Iterator[Division]:
    """Divisions left open by a program. On CPUs, host and device memory are the same."""
    has_choice = requested.is_state_open and not program.layout.replicas.is_cpu
    states: Sequence[StateLocation] = ("device", "host") if has_choice else ("device",)
    for state in states:
        for count in range(1, requested.samples + 1):
            if requested.samples % count == 0:
                yield Division(count, state)


def _offloadable(program: CompiledProgram, names: Mapping[Graph, str]) -> Iterator[str]:
    """Names of planned graphs that only loops call, on devices where loops offload."""
    layout = program.layout
    rerolling = layout.rerolling
    if rerolling is None or layout.mode != "rolled" or layout.compile_target.platform != "tpu":
        return
    in_loops = {op for loop in rerolling.loops for op in loop.all_ops}
    for graph, name in names.items():
        if all(call in in_loops or "repeat_count" in _caller(call) for call in graph.call_sites):
            yield name


def _caller(call: Op) -> Mapping[str, Any]:
    """Attributes of the op whose graph makes a call; none in the main graph, and in graphs called several times."""
    callers = call.graph.call_sites
    return callers[0].attributes if len(callers) == 1 else {}


def planned_program(programs: Sequence[tuple[Ir, CompiledProgram]], requested: RequestedMemory) -> Compiled:
    """Compiled program that a memory plan was applied to, among those of a user's file; the first one without any.

    Raises:
        ValueError: as for `compiled_program`.
    """
    planned = (each for each in programs if any(each[0] is by.model.ir for by in requested.applied))
    return compiled_program(*next(planned, programs[0]), requested)
