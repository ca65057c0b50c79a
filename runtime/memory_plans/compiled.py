"""A program compiled with a memory plan: what the search for a plan within a budget reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product, starmap
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from popxl.analysis.memory import Memory
from popxl.base.memory_requests import Logits, RequestedMemory, StateLocation
from popxl.core.recording import Op
from popxl.graph import Graph
from popxl.ir import Ir
from runtime.costs.cost import Cost
from runtime.costs.memory import memory_of_ipus, memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.jax_analysis import Analysis
from runtime.memory_plans.models import PlannedModels
from runtime.memory_plans.needs import GraphNeeds
from runtime.memory_plans.solver import Release, keep_all
from runtime.program.compiled import CompiledProgram
from runtime.targets.chip import Chip, of_device
from runtime.targets.offline import Target

RELEASES: Mapping[str, Release] = {"inlined": "read", "rolled": "loop", "batched": "loop"}
"""Release of activations, by mode of called graphs; in other modes, memory is free after a call."""


class Division(NamedTuple):
    """Division of a step that reduces its memory, besides a memory plan.

    Attributes:
        micro_batches: number of micro-batches of a batch.
        state: location of the optimiser state between steps.
        logit_chunks: number of chunks of the logits of losses.
    """

    micro_batches: int = 1
    state: StateLocation = "device"
    logit_chunks: int = 1

    def __str__(self) -> str:
        """Text for messages: "4 micro-batches, state on the host"."""
        parts = ["1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"]
        parts += ["state on the host"] if self.state == "host" else []
        parts += [f"logits in {self.logit_chunks} chunks"] if self.logit_chunks > 1 else []
        return ", ".join(parts)


IN_ONE_PIECE = Division()

_LOGIT_CHUNKS = (2, 4, 8, 16)
"""Numbers of chunks of logits that come into question, beside one. With 16, the other chunks leave little to save."""


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
        divisions: divisions that the program leaves open; that in one piece first.
        applied: the models that applied the plan.
        updates_early: whether variables are updated as soon as their gradients are known, and kernels hold little
            beside activations: on GPUs and TPUs, except between noinline calls.
        fuses_factors: whether products compute their factors from operands in memory: on TPUs.
        chosen_mode: mode of called graphs, if it was chosen as the fastest one.
        bytes_of_ipus: memory of each IPU, if several IPUs are separate devices.
        sharing_devices: number of devices that divide each value among them.
        is_jax_function: whether it is a function of JAX, whose state is among its arguments.
        logits: logits that can be computed in chunks.
    """

    ir: Ir
    memory: Memory
    cost: Cost
    chip: Chip | None
    offloadable: frozenset[str]
    release: Release
    divisions: tuple[Division, ...]
    applied: PlannedModels
    updates_early: bool = False
    fuses_factors: bool = False
    chosen_mode: str | None = None
    bytes_of_ipus: Mapping[int, int] = MappingProxyType({})
    sharing_devices: int = 1
    is_jax_function: bool = False
    logits: tuple[Logits, ...] = ()

    @property
    def needs(self) -> Sequence[GraphNeeds]:
        """Memory needs of the planned graphs on this device."""
        needs: Sequence[GraphNeeds] = self.applied.needs
        if self.updates_early:
            needs = [g.with_early_updates() for g in needs]
        needs = [g.with_fused_factors() for g in needs] if self.fuses_factors else needs
        needs = [g.divided(self.sharing_devices) for g in needs] if self.sharing_devices > 1 else needs
        return self._on_devices(needs) if len(self.bytes_of_ipus) > 1 else needs

    def _on_devices(self, needs: Sequence[GraphNeeds]) -> list[GraphNeeds]:
        """Needs of models on separate devices, if this program keeps everything: models on other devices do not count,
        and a limit for the fullest device leaves others more, or less, by their other memory."""
        ipus = {g.model: g.ipus for g in needs}
        graphs = []
        for g in needs:
            live = {model: calls for model, calls in g.live_models.items() if ipus[model] & g.ipus}
            ended = frozenset(model for model in g.ended_models if model in live or ipus.get(model, g.ipus) & g.ipus)
            graphs.append(replace(g, live_models=live, ended_models=ended))
        planned = {
            ipu: keep_all([g for g in graphs if not g.ipus or ipu in g.ipus], self.release).bytes
            for ipu in self.bytes_of_ipus
        }
        fullest = max(self.bytes_of_ipus, key=lambda ipu: self.bytes_of_ipus[ipu])
        weight = self.weight(planned[fullest])
        fixed = {ipu: size / weight - planned[ipu] for ipu, size in self.bytes_of_ipus.items()}
        return [
            replace(g, device_bytes=max(fixed[ipu] - fixed[fullest] for ipu in fixed.keys() & g.ipus or [fullest]))
            for g in graphs
        ]

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
        ValueError: if the program applies no memory plan, another one, or the requested one to fewer models.
    """
    planned = _planned_models(ir, requested)
    release = "read" if planned.are_whole else RELEASES.get(program.layout.mode, "call")
    offloadable = frozenset(_offloadable(program, planned.graphs))
    memory, cost = memory_of_program(ir, program), cost_of(program)
    platform = program.layout.compile_target.platform
    is_chosen = platform != "cpu" and ir.options.calledGraphs == "auto" and not planned.are_whole
    return Compiled(
        ir,
        memory,
        cost,
        program.device.chip,
        offloadable,
        release,
        tuple(_divisions(program, requested)),
        planned,
        updates_early=platform != "cpu" and release != "call",
        fuses_factors=platform == "tpu",
        chosen_mode=program.layout.mode if is_chosen and program.layout.mode in RELEASES else None,
        bytes_of_ipus={ipu: each.device for ipu, each in memory_of_ipus(ir, program).items()},
        logits=tuple(requested.open_logits),
    )


def compiled_function(analysis: Analysis, target: Target | None, requested: RequestedMemory) -> Compiled:
    """Compiled JAX function, with the data for the plan search.

    Args:
        analysis: figures of the compiler for the function, which calls `popxl_addons.value_and_grad`.
        target: the machine; `None` for the local devices.
        requested: request under which it was traced.

    Raises:
        ValueError: as for `compiled_program`; if the function has several such gradients.
    """
    applied = [each for each in requested.applied if each.memory is requested.request.memory] or requested.applied
    irs = [*dict.fromkeys(each.model.ir for each in applied)]
    planned = _planned_models(irs[-1] if irs else None, requested)  # JAX may trace a function several times
    if any(each.plan != applied[0].plan for each in applied):
        raise ValueError(
            f"plan_memory: {analysis.name} calls `value_and_grad` for {len(irs)} functions, or with different "
            "arguments; expected one. Give the argument of `build` to one of them, and a policy or plan to the others."
        )
    device = jax.devices()[0] if target is None else target.devices[0]
    platform = device.platform
    release: Release = "read" if planned.are_whole or platform != "cpu" else "call"
    return Compiled(
        irs[-1],
        analysis.memory,
        analysis.cost,
        of_device(device.device_kind) if target is None else target.chip,
        frozenset(),
        release,
        (IN_ONE_PIECE,),
        planned,
        updates_early=platform != "cpu",
        fuses_factors=platform == "tpu",
        sharing_devices=1 if analysis.is_replicated else analysis.devices,
        is_jax_function=True,
    )


def _planned_models(ir: Ir | None, requested: RequestedMemory) -> PlannedModels:
    """Models of a program that the requested plan was applied to."""
    asked = requested.request.memory
    in_program = [each for each in requested.applied if each.model.ir is ir]
    applied = (
        [each for each in in_program if each.memory is asked]
        or [each for each in in_program if each.memory == asked]
        or in_program
    )
    if not applied:
        raise ValueError(
            "plan_memory: the program applies 0 memory plans; expected one. Give `memory` to each "
            "`train_step`, `autodiff` or `value_and_grad` of the program, and build it anew for each plan. A "
            "`poptorch.trainingModel` applies one where it is compiled, unless its model has checkpoints, or its "
            "options recompute (`autoRecomputation`, a pipeline). Nothing runs, so a program has to train before it "
            "runs anything else."
        )
    stated = applied[0].memory
    if asked != stated and (isinstance(asked, str) or isinstance(stated, str)):
        raise ValueError(
            f"plan_memory: the program applies {_described(stated)} where {_described(asked)} is asked for. Give the "
            "argument of `build` to `memory`, instead of a policy or plan of its own."
        )
    if not requested.overrides and 0 < requested.open_steps < len(applied):
        raise ValueError(
            f"plan_memory: the program gives the argument of `build` to {len(applied) - requested.open_steps} of "
            f"{len(applied)} models; expected `memory` for each. Give it to the other `train_step`, too, to plan them "
            "together; or state memory='everything' there, to keep its activations."
        )
    names = {each.name for each in applied}
    planned = () if isinstance(asked, str) else dict.fromkeys(graph.model for graph in asked.graphs if graph.model)
    if missing := [name for name in planned if name not in names]:
        raise ValueError(
            f"plan_memory: the program gives the plan to the models {sorted(names)}, and it was made for {missing}, "
            "too, which got the policy 'everything'. Give the argument of `build` to the same models each time."
        )
    return PlannedModels(applied, requested)


def _described(memory: Any) -> str:
    """A plan or policy in an error."""
    return f"the policy {memory!r}" if isinstance(memory, str) else "a plan"


def _divisions(program: CompiledProgram, requested: RequestedMemory) -> Iterator[Division]:
    """Divisions left open by a program. On CPUs, host and device memory are the same."""
    has_choice = requested.is_state_open and not program.layout.replicas.is_cpu
    states: Sequence[StateLocation] = ("device", "host") if has_choice else ("device",)
    counts = [count for count in range(1, requested.samples + 1) if requested.samples % count == 0]
    fewest = min((each.chunks for each in requested.open_logits), default=1)
    most = max((each.samples for each in requested.open_logits), default=1)
    chunks = [1, *(chunks for chunks in _LOGIT_CHUNKS if fewest < chunks <= most)]
    yield from starmap(Division, product(counts, states, chunks))


def _offloadable(program: CompiledProgram, graphs: Iterable[tuple[str, Graph]]) -> Iterator[str]:
    """Names of planned graphs that only loops call, on devices where loops offload."""
    layout = program.layout
    rerolling = layout.rerolling
    if rerolling is None or layout.mode != "rolled" or layout.compile_target.platform != "tpu":
        return
    in_loops = {op for loop in rerolling.loops for op in loop.all_ops}
    for name, graph in graphs:
        if all(call in in_loops or "repeat_count" in _caller(call) for call in graph.call_sites):
            yield name


def _caller(call: Op) -> Mapping[str, Any]:
    """Attributes of the op whose graph makes a call; none in the main graph, and in graphs called several times."""
    callers = call.graph.call_sites
    return callers[0].attributes if len(callers) == 1 else {}


def planned_program(programs: Sequence[tuple[Ir, CompiledProgram]], requested: RequestedMemory) -> Compiled:
    """Compiled program that a memory plan was applied to, among those of a user's file; the first one without any.

    Raises:
        ValueError: as for `compiled_program`; if the models are in several programs.
    """
    irs = {applied.model.ir for applied in requested.applied}
    planned = {ir: program for ir, program in programs if ir in irs}
    if len(planned) > 1:
        raise ValueError(
            f"plan_memory: {len(planned)} programs of the file apply a memory plan; expected one, as a budget is that "
            "of one program. Train the models in one program, or plan each in a file of its own."
        )
    return compiled_program(*next(iter(planned.items()), programs[0]), requested)
