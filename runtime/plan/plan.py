"""Program plan: segments, each compiled once, dispatched sequentially and asynchronously by the host.

A graph that is called often is a segment; so are the ops between such calls. Segments of equal structure share one
executable, so that compile time does not grow with the number of calls, and programs that call the same graph share it
too. Storages that a segment overwrites are donated to it. The alternative, one program with noinline calls, is in
`runtime.program.compiled`; `runtime.plan.decision` chooses.

If each IPU of the program is a separate device, a segment is on one of them, and inputs from other IPUs are copied
there (`runtime.plan.placement`). The host does not wait for results, so segments on different devices run concurrently
unless they depend on each other, and so do the stages of a pipeline, whose loop the host executes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from popxl.core.recursion import raised_recursion_limit
from popxl.core.tensor import Tensor
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import HostToDeviceStream, Stream
from runtime.compile_pool import CompilePool
from runtime.lowering.channels import FAILURE, Channel, Channels, Failure
from runtime.lowering.environment import no_value
from runtime.plan.compile_options import CompileOptions
from runtime.plan.host_steps import HostSteps, MemoryCurve
from runtime.plan.segments import Array, CompiledSegment, PlanRun, Segment, described_state
from runtime.plan.stages import stages_of
from runtime.plan.structure import Structure
from runtime.progress import report_compilation
from runtime.targets.compile_target import HOST
from runtime.timeline import Recorder


def compile_all(
    segments: Iterable[Segment], options_at: Mapping[int, CompileOptions]
) -> Iterator[tuple[Segment, CompiledSegment]]:
    """Compile segments in parallel, using all CPU cores; yields all of them, once they are compiled.

    They are traced one after the other in this thread, while XLA compiles earlier ones in other threads: the largest
    first, as it takes longest. Devices of several processes need the same compilations in the same order: one at a
    time, then.
    """
    segments = sorted(segments, key=lambda segment: segment.size, reverse=True)
    if not segments:
        return
    is_divided = any(options.replicas.local_count < options.replicas.count for options in options_at.values())
    with CompilePool(1 if is_divided else os.cpu_count() or 1) as pool:
        report_compilation(segments[0].name, 0, len(segments))
        compilations = [pool.submit(segment.lowered(options_at[segment.ipu])) for segment in segments]
        compiled = []
        for number, (segment, compilation) in enumerate(zip(segments, compilations, strict=True)):
            if number:
                report_compilation(segment.name, number, len(segments))
            compiled.append(compilation.result())
    yield from zip(segments, compiled, strict=True)


def _check_shared(shared: Collection[Channel], options_at: Mapping[int, CompileOptions]) -> None:
    """Raise `NotImplementedError` for a buffer in host memory that stages of several processes use."""
    buffers = [c for c in shared if isinstance(c, RemoteBuffer)]
    if buffers and any(options.slots.memory_kind == HOST for options in options_at.values()):
        raise NotImplementedError(
            f"Session: ops on several IPUs use {buffers[0]!r}, which is in the memory of one host, and the IPUs are of "
            "several processes. Give each stage a buffer of its own; or set `ir.options.remoteBuffers = 'device'`."
        )


def _check_values(steps: HostSteps, variables: Iterable[Tensor]) -> None:
    """Raise an error for a step that reads a value before any step makes it."""
    known = {*variables, *steps.changed}
    for step in steps.steps:
        for t in step.reads:
            if t not in known:
                raise no_value(t)
        known.update(step.makes)


@dataclass(frozen=True)
class PlanStreams:
    """Streams and failed checks of a plan: their states at the start of a run, and the fetches at its end.

    Attributes:
        inputs, outputs: streams, in the order of feeds and of fetches.
        channels: streams, and the failed checks, of each IPU.
        limited: streams whose transfers are counted.
        ends: two compiled JAX functions for each IPU with streams: the first computes the initial state of its
            channels from the feeds, where `None` in place of the transfers of a feed means the feed itself; the second
            computes the fetches from the final state, and from the counts of limited streams. The first one is `None`
            if the IPU belongs to another process.
        options_at: compile options of each IPU.
    """

    inputs: Sequence[Stream]
    outputs: Sequence[Stream]
    channels: Mapping[int, Sequence[Stream | Failure]]
    limited: Sequence[Stream]
    ends: Mapping[int, tuple[Any, Any]]
    options_at: Mapping[int, CompileOptions]

    def initial_states(self, ipu: int, feeds: Mapping[Channel, Array], run: PlanRun) -> dict[Channel, Any]:
        """States of an IPU's channels at the start of a run."""
        if ipu not in self.ends:
            return {}
        here = self.channels[ipu]
        begin, _ = self.ends[ipu]
        if begin is None:
            return {c: described_state(c, self.options_at[ipu]) for c in here}
        states = run.call(begin, lambda: "feeds", tuple(feeds[s] for s in self.inputs if s in here))
        return {
            c: (self._fed(feeds[c], ipu) if array is None else array, position)
            for c, (array, position) in zip(here, states, strict=True)
        }

    def _fed(self, feed: Array, ipu: int) -> Array:
        """Feed used without a prologue copy. Several segments, such as loop iterations, may read it."""
        return feed if len(self.options_at) == 1 else jax.device_put(feed, self.options_at[ipu].replicas.sharding())

    def fetches(self, shared: Collection[Channel], run: PlanRun) -> tuple[Array, ...]:
        """Transfers of the output streams, and failed checks of each IPU, at the end of a run.

        Args:
            shared: channels that several IPUs use.
        """
        transfers: dict[Channel, Array] = {}
        failures: list[Array] = []
        for ipu, (_, end) in self.ends.items():
            here = [c for c in self.channels[ipu] if not isinstance(c, HostToDeviceStream)]
            limited = [s for s in self.limited if s in self.channels[ipu]]
            states = run.channels(ipu, [c for c in dict.fromkeys((*here, *limited)) if c in shared])
            results = [*map(states.transfers, here), *map(states.count, limited)]
            found = run.call(end, lambda: "fetches", [run.own_copy(array) for array in results])
            streams = [c for c in here if c is not FAILURE]
            transfers |= zip(streams, found[: len(streams)], strict=True)
            failures += found[len(streams) :]
        return (*(transfers[s] for s in self.outputs), *failures)


class Plan:
    """Host-executed program: `(changing, constant, feeds) -> (changing, fetches)`. Before the first run, `compile` or
    `adopt` provides the executables of its segments.

    Fetched are the transfers of the output streams; then, where anything is checked, which check failed: an array for
    each IPU.

    Args:
        changed, read: storages of changed variables, and of variables only read.
        buffers: remote buffers that it uses, and their IPUs; their arrays follow those of `changed` as inputs and
            outputs.

    Attributes:
        steps, streams: as passed.
        changed: storages that the program changes, with their IPUs at the start and at the end of the steps.
        compile_seconds: compile times of structures that no earlier program had compiled.
    """

    def __init__(
        self,
        steps: HostSteps,
        changed: Sequence[Tensor],
        read: Sequence[Tensor],
        buffers: Mapping[RemoteBuffer, int],
        streams: PlanStreams,
    ) -> None:
        self.steps = steps
        self._variables = (*changed, *read)
        self.changed = tuple((v, steps.initial_ipus[v], steps.final_ipus[v]) for v in changed)
        self._buffers = buffers
        self.streams = streams
        self._ipus = {c: ipu for ipu, channels in streams.channels.items() for c in channels} | dict(buffers)
        self._options_at = streams.options_at
        self._stages = stages_of(self._options_at)
        self.compile_seconds: dict[Structure, float] = {}
        _check_values(steps, self._variables)
        self._shared_channels = steps.shared_channels()
        if self._stages is not None:
            _check_shared(self._shared_channels, self._options_at)
        steps.prepare(self._options_at, next(iter(self._options_at)))
        for step, _ in steps.all_steps():
            step.prepare(self._options_at, self._shared_channels)

    def compile(self) -> None:
        """Compile the structures of this process's segments that have no executable yet."""
        fresh: dict[Structure, Segment] = {}
        for segment in self._own_segments:
            if segment.structure.executable is None:
                fresh.setdefault(segment.structure, segment)
        for segment, compiled in compile_all(fresh.values(), self._options_at):
            segment.structure.executable, segment.structure.text = compiled.executable, compiled.text
            self.compile_seconds[segment.structure] = compiled.seconds

    def adopt(self, executables: Sequence[Any]) -> None:
        """Use precompiled executables, of `structures`, for those that have none yet."""
        for structure, executable in zip(self.structures, executables, strict=True):
            if structure.executable is None:
                structure.executable, structure.text = executable, executable.as_text

    def __call__(
        self,
        changing: Sequence[Array],
        constant: Sequence[Array],
        feeds: Sequence[Array],
        recorder: Recorder | None = None,
    ) -> Any:
        """Run the program. A recorder, if given, calls the executables in place of the plan."""
        count = len(self.changed)
        values = dict(zip(self._variables, (*changing[:count], *constant), strict=True))
        channels: dict[int, Channels] = {}
        run = PlanRun(self._options_at, self._ipus, channels, recorder, self._stages)
        given: dict[Channel, Array] = dict(zip(self.streams.inputs, feeds, strict=True))
        for ipu in self._options_at:
            channels[ipu] = Channels(self.streams.initial_states(ipu, given, run))
        for (buffer, ipu), slots in zip(self._buffers.items(), changing[count:], strict=True):
            channels[ipu].set_slots(buffer, slots)
        with raised_recursion_limit(self.steps.nesting):
            self.steps.run(values, run)
        fetches = self.streams.fetches(self._shared_channels, run)
        changed = [values[v] if start == end else run.copy_to_ipu(values[v], start) for v, start, end in self.changed]
        for buffer, ipu in self._buffers.items():
            changed.append(run.channels(ipu, self._shared_channels & {buffer}).slots(buffer))
        return tuple(changed), fetches

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments, ordered by first execution."""
        return self.steps.segments()

    @property
    def runs(self) -> Counter[Structure]:
        """Executions per run, for each segment structure."""
        runs: Counter[Structure] = Counter()
        for step, times in self.steps.all_steps():
            if isinstance(step, Segment):
                runs[step.structure] += times
        return runs

    @property
    def _own_segments(self) -> tuple[Segment, ...]:
        """Segments that this process runs."""
        return tuple(s for s in self.segments if not self._options_at[s.ipu].compile_target.is_elsewhere)

    @property
    def structures(self) -> tuple[Structure, ...]:
        """Distinct structures of the segments that this process runs."""
        return tuple(dict.fromkeys(segment.structure for segment in self._own_segments))

    def text(self) -> str:
        """Compiled text of each distinct segment."""
        return "\n".join(structure.text() for structure in self.structures)

    def curve(self) -> MemoryCurve:
        """Memory of each device over a run."""
        copies = next(iter(self._options_at.values())).replicas.per_device
        with raised_recursion_limit(self.steps.nesting):
            return self.steps.curve(copies)

    def temporaries(self) -> int:
        """Peak bytes of one run on one device, excluding variables and feeds."""
        return max((held + inside for _, held, inside in self.curve().segments), default=0)
