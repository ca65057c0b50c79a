"""`CompiledProgram`: a program's device layout and its executables: a single executable, or a plan of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from popxl.ir import Ir
from popxl.streams import HostToDeviceStream, Stream
from runtime.compile_pool import CompilePool, lower
from runtime.files.cache import compiling, compiling_afresh
from runtime.files.executables import donating
from runtime.lowering import remote_buffers as remote
from runtime.lowering.channels import FAILURE, Channels, Failure
from runtime.lowering.environment import Environment
from runtime.lowering.lower import Lowering, recursing_into
from runtime.lowering.rerolled_loops import ProgramOrder
from runtime.plan.host_steps import HostSteps
from runtime.plan.plan import Plan, PlanStreams
from runtime.plan.segments import described_state
from runtime.plan.structure import Structure, clear_cache
from runtime.program.build_layout import layout_for
from runtime.program.layout import Layout
from runtime.progress import compilation, report_compilation
from runtime.targets.compile_target import HOST
from runtime.targets.devices import Device


@dataclass(frozen=True)
class Precompiled:
    """Compilation results known in advance: the mode of compiling called graphs, possibly also executables.

    Attributes:
        mode: as in `Layout.mode`.
        executables: executables from a file, as returned by `CompiledProgram.executables`.
    """

    mode: str
    executables: Sequence[Any] | None = None


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """Ir compiled for a device: layout and executables. Holds no variables; reusable for any number of runs.

    Attributes:
        device: device of the program.
        layout: placement of its variables, remote buffers and streams.
        reason: reason for the mode of called graphs, in a sentence or two.
        executable: a JAX executable, or a `runtime.plan.plan.Plan`.
        text: function that returns its StableHLO.
        seconds: the time that compiling took.
        is_cached: whether some executables may come from a file or a cache.
    """

    device: Device
    layout: Layout
    reason: str
    executable: Any
    text: Callable[[], str]
    seconds: float
    is_cached: bool

    @property
    def plan(self) -> Plan | None:
        """The executable, if it is a plan."""
        return self.executable if isinstance(self.executable, Plan) else None

    @property
    def is_serializable(self) -> bool:
        """Whether XLA compiled all executables in this process. Executables from files or caches cannot be serialized
        again: after loading, XLA for CPUs no longer has their code in serializable form."""
        segments = () if self.plan is None else self.plan.structures
        return not self.is_cached and _cached.isdisjoint(segments)

    def executables(self) -> tuple[Any, ...]:
        """All distinct JAX executables of the program, in deterministic order."""
        if self.plan is None:
            return (self.executable,)
        ends = (each for pair in self.plan.streams.ends.values() for each in pair if each is not None)
        return (*ends, *(structure.executable for structure in self.plan.structures))

    def temporaries(self) -> int:
        """Temporary device memory of one run in bytes, excluding variables and streams."""
        if self.plan is None:
            return self.executable.memory_analysis().temp_size_in_bytes
        return self.plan.temporaries()


_cached: WeakSet[Structure] = WeakSet()  # segments that may have come from a file or cache, in any program


def compile_program(ir: Ir, device: Device, precompiled: Precompiled | None = None) -> CompiledProgram:
    """Compile an Ir for a device."""
    mode, executables = (None, None) if precompiled is None else (precompiled.mode, precompiled.executables)
    layout = layout_for(ir, device, mode)
    if executables is None:
        return _compiled(device, layout, compiling(ir, device, layout.mode, layout.prints, is_serializable(layout)))
    return _compiled(device, layout, nullcontext(True), executables)


def compile_uncached(program: CompiledProgram) -> CompiledProgram:
    """Recompile a program, bypassing executables from files and caches."""
    clear_cache()
    layout = layout_for(program.layout.main.ir, program.device, program.layout.mode)
    return replace(_compiled(program.device, layout, compiling_afresh()), reason=program.reason)


def _compiled(
    device: Device, layout: Layout, cache: AbstractContextManager[bool], executables: Sequence[Any] | None = None
) -> CompiledProgram:
    """Compile a layout for its target.

    Args:
        cache: context manager to enter; returns whether executables may come from a file or a cache instead of XLA.
        executables: result of an earlier `CompiledProgram.executables`; nothing is compiled then.
    """
    start = perf_counter()
    with layout.x64_context(), recursing_into(layout.main), cache as is_cached, compilation():
        if layout.steps is None:
            executable, text = _one_program(layout, executables)
        else:
            executable = _plan(layout, layout.steps, executables)
            text = executable.text
            _cached.update(executable.structures if is_cached else ())
    seconds = perf_counter() - start
    return CompiledProgram(device, layout, layout.decision.reason, executable, text, seconds, is_cached)


def is_serializable(layout: Layout) -> bool:
    """Whether other processes can run the compiled executables.

    Where XLA for CPUs reads an executable that it has written, it no longer knows in which order collectives of
    several devices come: devices meet in different ones, and the process hangs or ends (jaxlib 0.10.2).
    """
    return layout.compile_target.platform != "cpu" or not layout.devices_meet


# As one program ------------------------------------------------------------------------------------------------------


def _one_program(layout: Layout, executables: Sequence[Any] | None) -> tuple[Any, Callable[[], str]]:
    """Compile the entire program as one executable. Returns it, and a function that returns its StableHLO."""
    if executables is not None and _feed_count(executables) == len(layout.used_inputs):
        (executable,) = executables
        return executable, executable.as_text
    report_compilation("the program", 0, 1)
    lowered = lowered_program(layout)

    def compile() -> Any:
        executable = layout.compile_target.compile(lowered)
        if layout.buffers and layout.first_options.has_slots_on_host:
            results = [None] * len(layout.changing) + [*layout.buffers]
            fetched = len(jax.tree.leaves(lowered.out_info)) - len(results)
            remote.check_places(executable.as_text(), results + [None] * fetched, layout.main)
        return executable

    with CompilePool(1) as pool:
        return pool.submit(compile).result(), lowered.as_text


def _feed_count(takers: Sequence[Any]) -> int:
    """Number of feeds that executables take in all: those of files from before `kept_outputs` do not take these."""
    return sum(each.in_tree.children()[0].children()[-1].num_leaves for each in takers if each is not None)


def lowered_program(layout: Layout) -> Any:
    """Lower the entire program as one function, for its target."""
    step, arguments = _step(layout)
    return lower(lambda: layout.compile_target.lower(donating(step, 0), *arguments))


def _step(layout: Layout) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Function for one run of the entire program, and its argument types."""
    scheduling = ProgramOrder() if layout.rerolling is None else layout.rerolling
    in_order = not (layout.buffers and layout.first_options.slots.memory_kind == HOST)
    lowering = Lowering(layout.main.ops, layout.options, layout.mode == "kept", layout.replicas, scheduling, in_order)
    own = tuple(block for block in layout.constant if not layout.is_replicated(block))
    shared = tuple(block for block in layout.constant if layout.is_replicated(block))

    def run_replica(changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array], others: Any) -> Any:
        known = dict(zip((*own, *shared), (*constant, *others), strict=True))
        values, channels = begin_run(layout, changing, [known[block] for block in layout.constant], feeds)
        environment = lowering.run(lowering.scheduling.schedule(layout.main), values, channels)
        return end_run(layout, environment, channels)

    spread = layout.replicas.vmap_replicas(run_replica, shared=True)

    def step(changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array]) -> Any:
        """Function for one run of the main graph on all replicas."""
        known = dict(zip(layout.constant, constant, strict=True))
        read, others = (tuple(known[block] for block in blocks) for blocks in (own, shared))
        changed, fetches = spread(changing, read, layout.replicas_first(feeds, layout.channels), others)
        return changed, layout.transfers_first(fetches, layout.channels)

    feeds = layout.feed_specs(layout.replicas, layout.channels)
    return step, (layout.changing_specs(), layout.constant_specs(), feeds)


def begin_run(
    layout: Layout, changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array]
) -> tuple[dict[Tensor, Any], Channels]:
    """Initial tensor storages and channels of the main graph, for one replica's run."""
    count = len(layout.changing)
    arrays = zip((*layout.changing, *layout.constant), (*changing[:count], *constant), strict=True)
    values = {t: value for block, array in arrays for t, value in block.unpack(array).items()}
    states = zip(layout.channels, layout.initial_states(feeds, layout.channels), strict=True)
    slots = ((buffer, (array, 0)) for buffer, array in zip(layout.buffers, changing[count:], strict=True))
    return values, Channels(dict((*states, *slots)))


def end_run(
    layout: Layout, environment: Environment, channels: Channels
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Changed state and fetches after one replica's run."""
    changed = (*(block.repack(environment) for block in layout.changing), *map(channels.slots, layout.buffers))
    for i, stream in enumerate(layout.limited):
        channels.check_count(i, channels.count(stream), layout.capacity[stream])
    return changed, layout.fetches(channels.results(), layout.channels)


# As a plan -----------------------------------------------------------------------------------------------------------


def _plan(layout: Layout, steps: HostSteps, executables: Sequence[Any] | None) -> Plan:
    """Compile the program as segments, executed sequentially by the host."""
    buffers = {buffer: layout.homes[buffer] for buffer in layout.buffers}
    channels = {ipu: _channels_in(ipu, layout, steps) for ipu in layout.compile_options}
    # Of several IPUs, some may have no streams; a single one always has a prologue and an epilogue.
    with_ends = [ipu for ipu, here in channels.items() if here or len(channels) == 1]
    if executables is not None and layout.kept_outputs:
        takes_all = _feed_count(executables[: 2 * len(with_ends) : 2]) == len(layout.used_inputs)
        executables = executables if takes_all else None
    if executables is None:
        ends = {ipu: _prologue_and_epilogue(layout, ipu, channels[ipu]) for ipu in with_ends}
    else:
        pairs = zip(executables[::2], executables[1::2], strict=False)
        ends = dict(zip(with_ends, pairs, strict=False))
    streams = PlanStreams(layout.used_inputs, layout.outputs, channels, layout.limited, ends, layout.compile_options)
    plan = Plan(steps, layout.changed, layout.unchanged, buffers, streams)
    if executables is None:
        plan.compile()
    else:
        plan.adopt(executables[2 * len(with_ends) :])
    return plan


def _channels_in(ipu: int, layout: Layout, steps: HostSteps) -> tuple[Stream | Failure, ...]:
    """Channels located at an IPU. The failure channel exists wherever a segment performs checks, or transfers are
    counted."""
    checks = any(FAILURE in segment.channels for segment in steps.segments() if segment.ipu == ipu)
    checks |= any(layout.homes[stream] == ipu for stream in layout.limited)
    return tuple(c for c in layout.channels if (checks if c is FAILURE else layout.homes[c] == ipu))


def _prologue_and_epilogue(layout: Layout, ipu: int, channels: Sequence[Stream | Failure]) -> tuple[Any, Any]:
    """Compile prologue and epilogue of a run: initial channel state from feeds, and fetches from final channel state,
    with the counts of limited streams.

    If host arrays have the layout of a stream's transfers, nothing is copied: those of feeds are `None` in the first
    state, for the plan to fill in, and the others are donated.

    IPUs of other processes have no prologue here, and their epilogue reads copies on this process's devices.
    """
    is_elsewhere = layout.compile_options[ipu].compile_target.is_elsewhere
    options = layout.compile_options[layout.stages.own_ipu if is_elsewhere and layout.stages is not None else ipu]
    replicas = options.replicas

    def has_host_layout(channel: Stream | Failure) -> bool:
        return replicas.count == 1 and not isinstance(channel, Failure) and layout.capacity[channel] > 1

    uncopied = [s for s in layout.used_inputs if s not in layout.outputs and has_host_layout(s)]
    ended = [c for c in channels if not isinstance(c, HostToDeviceStream)]
    limited = [s for s in layout.limited if s in channels]
    are_donated = not limited and all(map(has_host_layout, (c for c in channels if c in layout.outputs)))

    def begin_replica(feeds: Sequence[Array]) -> Any:
        states = zip(channels, layout.initial_states(feeds, channels), strict=True)
        return tuple(
            (None if c in uncopied else jnp.asarray(transfers), jnp.asarray(position, jnp.int32))
            for c, (transfers, position) in states
        )

    def begin(feeds: Sequence[Array]) -> Any:
        return replicas.vmap_replicas(begin_replica)(layout.replicas_first(feeds, channels))

    def end_replica(results: Sequence[Array]) -> Any:
        final = Channels({c: (array, 0) for c, array in zip(ended, results, strict=False)})
        for stream, count in zip(limited, results[len(ended) :], strict=True):
            final.check_count(layout.limited.index(stream), count, layout.capacity[stream])
        return layout.fetches(final.results(), channels)

    def end(results: Sequence[Array]) -> Any:
        return layout.transfers_first(replicas.vmap_replicas(end_replica)(results), channels)

    prologue = jax.jit(begin, out_shardings=replicas.sharding())
    epilogue = jax.jit(end, donate_argnums=0 if are_donated else ())
    target = options.compile_target
    results = [*(described_state(c, options)[0] for c in ended), *(described_state(s, options)[1] for s in limited)]
    lowered_prologue = lower(lambda: target.lower(prologue, layout.feed_specs(replicas, channels)))
    lowered_epilogue = lower(lambda: target.lower(epilogue, results))

    def compile() -> tuple[Any, Any]:
        return None if is_elsewhere else target.compile(lowered_prologue), target.compile(lowered_epilogue)

    with CompilePool(1) as pool:
        return pool.submit(compile).result()
