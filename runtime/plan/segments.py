"""`Segment`: ops that are compiled and executed together, as one step of a plan; `PlanRun`: the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from popxl.base.arrays import Array
from popxl.base.names import identifier
from popxl.core.printing import summary
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.fp8_utils import in_transit
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import HostToDeviceStream, Stream
from runtime.compile_pool import lower
from runtime.files.executables import donating
from runtime.jax_private import copied
from runtime.lowering import remote_buffers as remote
from runtime.lowering.channels import Channel, Channels, Failure, channels_of_ops
from runtime.lowering.collectives import devices_meet
from runtime.lowering.lower import Lowering
from runtime.lowering.platform_hooks import CollectiveLock, hooks_for
from runtime.plan.compile_options import CompileOptions
from runtime.plan.stages import Stages, call_now
from runtime.plan.structure import StructuralEncoder, Structure, structure_of
from runtime.targets.compile_target import HOST
from runtime.timeline import Recorder

Key = Tensor | tuple[Tensor, int]
"""Key of a value: a storage, or its copy on another IPU."""

Values = dict[Any, Array]
"""Contents of storages and copies, by their keys."""


class PlanRun:
    """Run of a plan: stream and buffer state, and step execution.

    Args:
        where: the IPU of each stream and buffer.
        recorder: calls executables, and copies, in place of the steps.
        stages: stages of the program, if some belong to other processes.
    """

    def __init__(
        self,
        options_at: Mapping[int, CompileOptions],
        where: Mapping[Channel, int],
        channels: Mapping[int, Channels],
        recorder: Recorder | None,
        stages: Stages | None,
    ) -> None:
        self._options_at = options_at
        self._ipus = dict(where)
        self._channels = channels
        self._recorder = recorder
        self._stages = stages

    def call(
        self, executable: Any, name: Callable[[], str], *arguments: Any, lock: CollectiveLock | None = None
    ) -> Any:
        """Call an executable, holding `lock` if given."""
        if self._recorder is not None:
            executable = partial(self._recorder, name(), executable)
        return call_now(executable, name, *arguments, lock=lock)

    def copy_to_ipu(self, array: Array, ipu: int) -> Array:
        """Copy an array to another IPU."""
        return self._copy(array, self._options_at[ipu].replicas.sharding())

    def own_copy(self, array: Array) -> Array:
        """An array restricted to this process's devices, which may include none of its IPU."""
        return array if self._stages is None else self._stages.own_copy(array, self.call)

    def _copy(self, array: Array, sharding: Any) -> Array:
        if self._stages is not None:
            return self._stages.copy(array, sharding, self.call)
        return copied(array, sharding) if self._recorder is None else self._recorder.copy(array, sharding)

    def execute(self, step: Step, values: Values) -> None:
        """Execute a step."""
        step.run(values, self)

    def constants_of(self, subplan: Any) -> Values:
        """Initial values that a graph has from constants."""
        return subplan.constants()

    def duplicate(self, array: Array) -> Array:
        """A copy in memory of its own."""
        if isinstance(array, jax.ShapeDtypeStruct):  # of another process
            return array
        return copied(array, array.sharding)

    def number(self, value: Any, ipu: int) -> Array:
        """Host scalar as an array of all replicas on an IPU."""
        return self._options_at[ipu].replicas.broadcast(np.asarray(value))

    def channels(self, ipu: int, shared: Iterable[Channel] = ()) -> Channels:
        """Channels of IPU `ipu`, after transferring `shared` channels from other IPUs."""
        here = self._channels[ipu]
        for c in shared:
            if self._ipus[c] != ipu:
                (state,) = self._channels[self._ipus[c]].states((c,))
                options = self._options_at[ipu]
                sharding = options.slots if isinstance(c, RemoteBuffer) else options.replicas.sharding()
                array, position = state
                there = position if isinstance(position, int) else self.copy_to_ipu(position, ipu)
                here.set_states((c,), [(self._copy(array, sharding), there)])
                self._ipus[c] = ipu
        return here


@dataclass
class Step:
    """Host step of a plan.

    Attributes:
        reads: storages that the step reads, including those that it overwrites.
        makes: storages that have a new value afterwards.
        frees: storages that are not needed afterwards.
        ipu: IPU of the step, and of storages that it does not use.
        copies: copies to make first: storages, and their target IPUs.
        result_ipus: IPUs of its results afterwards.
        drops: keys of values that are not needed afterwards, including copies.
    """

    reads: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]
    frees: tuple[Tensor, ...] = ()
    ipu: int = 0
    copies: tuple[tuple[Tensor, int], ...] = ()
    result_ipus: dict[Tensor, int] = field(default_factory=dict)
    drops: tuple[Key, ...] = ()

    def prepare(self, options_at: Mapping[int, CompileOptions], shared: Container[Channel]) -> None:
        """Get ready for runs.

        Args:
            shared: streams and buffers that segments on several IPUs use.
        """
        raise NotImplementedError

    def run(self, values: Values, run: PlanRun) -> None:
        """Run the step."""
        raise NotImplementedError

    def copy_operands(self, values: Values, run: PlanRun) -> None:
        """Copy values needed on other IPUs."""
        for t, ipu in self.copies:
            values[t, ipu] = run.copy_to_ipu(values[t], ipu)


def described_state(channel: Stream | Failure, options: CompileOptions) -> tuple[Any, Any]:
    """Types of a stream's transfers, or of the failure flag, and of the index of the next transfer."""
    position = options.replicas.spec((), np.dtype(np.int32))
    if isinstance(channel, Failure):
        return options.replicas.spec(channel.shape, channel.start.dtype), position
    shape = (channel.num_host_transfers, *channel.shape)
    return options.replicas.spec(shape, in_transit(channel.dtype)), position


class CompiledSegment(NamedTuple):
    """XLA executable of a segment, its input text, and compilation time in seconds."""

    executable: Any
    text: Callable[[], str]
    seconds: float


@dataclass(kw_only=True)
class Segment(Step):
    """Segment: ops compiled and executed together.

    Attributes:
        size: number of ops for XLA.
        encoding: structural encoding of the ops.
        donated: storages that the ops overwrite, whose new value is needed, and that have no other owner.
        keys: keys of the segment's inputs, for those that are on another IPU.
        shared_channels: streams and buffers that segments on other IPUs also use; set by `prepare`.
        structure: key of the executable, with the executable once it is compiled; set by `prepare`.
    """

    ops: tuple[Op, ...]
    size: int
    encoding: StructuralEncoder
    donated: tuple[Tensor, ...] = ()
    keys: dict[Tensor, Key] = field(default_factory=dict)
    shared_channels: tuple[Channel, ...] = field(init=False)
    structure: Structure = field(init=False)
    _constants: dict[Key, Array] = field(init=False)
    _described: Values | None = None  # results, where another process runs the segment
    _lock: CollectiveLock | None = None

    @cached_property
    def op_structure(self) -> Structure:
        """Structure of the ops alone."""
        return structure_of(tuple(self.encoding.code))

    @property
    def name(self) -> str:
        """Short description of the ops."""
        return summary(self.ops)

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Streams and buffers used by the ops."""
        return channels_of_ops(self.ops)

    def _executable_key(self, options: CompileOptions) -> Structure:
        """Executable key of the segment: structure of its ops, donated inputs, required results, and compile
        options."""
        number = self.encoding.numbers
        results = (tuple(number[t] for t in self.donated), tuple(number[t] for t in self.makes))
        return structure_of((*self.encoding.code, results, options.key()))

    @property
    def operand_keys(self) -> tuple[Key, ...]:
        """Keys of the values that the ops read."""
        return tuple(self.keys.get(t, t) for t in self.reads)

    @cached_property
    def feeds(self) -> tuple[HostToDeviceStream, ...]:
        """Input streams used by the ops."""
        return tuple(c for c in self.channels if isinstance(c, HostToDeviceStream))

    @cached_property
    def borrowed(self) -> tuple[Tensor, ...]:
        """Storages read without donation."""
        return tuple(t for t in self.encoding.roots if t not in self.donated)

    @cached_property
    def _fresh_results(self) -> tuple[Tensor, ...]:
        """Storages with new values in separate memory."""
        return tuple(t for t in self.makes if t not in self.donated)

    @cached_property
    def _donated_keys(self) -> tuple[Key, ...]:
        return tuple(self.keys.get(t, t) for t in self.donated)

    @cached_property
    def _borrowed_keys(self) -> tuple[Key, ...]:
        return tuple(self.keys.get(t, t) for t in self.borrowed)

    @cached_property
    def _result_copies(self) -> tuple[tuple[Tensor, int], ...]:
        return tuple((t, ipu) for t, ipu in self.result_ipus.items() if ipu != self.ipu)

    def prepare(self, options_at: Mapping[int, CompileOptions], shared: Container[Channel]) -> None:
        """Look up the executable, and upload constants to the segment's IPU."""
        self.shared_channels = tuple(c for c in self.channels if c in shared)
        options = options_at[self.ipu]
        passed = (t for t in self.borrowed if isinstance(t, Constant) and t not in self.reads)
        self._constants = {t: options.upload(t) for t in passed}
        if options.compile_target.is_elsewhere:
            self._described = {t: options.spec(t) for t in self.makes}
        if devices_meet(self.ops, options.replicas):
            self._lock = hooks_for(options.compile_target.platform).collective_lock
        self.structure = self._executable_key(options)

    def lowered(self, options: CompileOptions) -> Callable[[], CompiledSegment]:
        """Trace the ops. Returns a function that compiles them with XLA, callable from any thread."""
        start = perf_counter()
        buffers = [c for c in self.channels if isinstance(c, RemoteBuffer)]
        in_order = not (buffers and options.slots.memory_kind == HOST)
        lowering = Lowering(self.ops, options.session_options, not options.inlines, options.replicas, in_order=in_order)

        def run_segment(donated: Any, kept: Any, feeds: Any, positions: Any) -> Any:
            channels = Channels({c: (feed, 0) for c, feed in zip(self.feeds, feeds, strict=True)})
            channels.set_carried(self.channels, positions)
            values = dict(zip((*self.donated, *self.borrowed), (*donated, *kept), strict=True))
            environment = lowering.run(self.ops, values, channels)
            overwritten, new = ([environment.values[t] for t in ts] for ts in (self.donated, self._fresh_results))
            return overwritten, channels.carried(self.channels), new

        run_segment.__name__ = identifier(self.name) or "piece"  # also the name of the module
        spread = options.replicas.vmap_replicas(run_segment)
        lowered = lower(lambda: options.compile_target.lower(donating(spread, 0, 3), *self._arguments(options)))
        traced = perf_counter() - start

        def compile() -> CompiledSegment:
            start = perf_counter()
            executable = options.compile_target.compile(lowered)
            if buffers and options.has_slots_on_host:
                remote.check_places(
                    executable.as_text(), self._results(lowered.out_info), self.ops[0].graph.ir.main_graph
                )
            return CompiledSegment(executable, lowered.as_text, traced + perf_counter() - start)

        return compile

    def _results(self, info: Any) -> list[RemoteBuffer | None]:
        """Remote buffer of each executable result, in order; `None` for other results."""
        overwritten, positions, new = info

        def channel_state(i: int, result: Any) -> Any:
            channel = self.channels[i]
            return [channel] if isinstance(channel, RemoteBuffer) else [None] * len(jax.tree.leaves(result))

        carried = [each for i, result in sorted(positions.items()) for each in channel_state(i, result)]
        return [*[None] * len(overwritten), *carried, *[None] * len(new)]

    def _arguments(self, options: CompileOptions) -> tuple[Any, ...]:
        def carried(c: Channel) -> Any:
            if isinstance(c, RemoteBuffer):
                return remote.spec(c, options.replicas, options.slots)
            transfers, position = described_state(c, options)
            return position if isinstance(c, HostToDeviceStream) else (transfers, position)

        return (
            list(map(options.spec, self.donated)),
            list(map(options.spec, self.borrowed)),
            [described_state(c, options)[0] for c in self.feeds],
            {i: carried(c) for i, c in enumerate(self.channels)},
        )

    def run(self, values: Values, run: PlanRun) -> None:
        """Run the ops, unless another process does."""
        self.copy_operands(values, run)
        channels = run.channels(self.ipu, self.shared_channels)
        if self._described is None:
            self._run_ops(values, run, channels)
        else:
            values.update(self._described)
        self.copy_results(values, run)
        for key in self.drops:
            del values[key]

    def copy_results(self, values: Values, run: PlanRun) -> None:
        """Copy results needed on other IPUs."""
        for t, ipu in self._result_copies:
            values[t] = run.copy_to_ipu(values[t], ipu)

    def _run_ops(self, values: Values, run: PlanRun, channels: Channels) -> None:
        overwritten, positions, new = run.call(
            self.structure.executable,
            lambda: self.name,
            [values[key] for key in self._donated_keys],
            self._borrowed_arguments(values),
            [channels.transfers(c) for c in self.feeds],
            channels.carried(self.channels),
            lock=self._lock,
        )
        channels.set_carried(self.channels, positions)
        values.update(zip(self.donated, overwritten, strict=True))
        values.update(zip(self._fresh_results, new, strict=True))

    def _borrowed_arguments(self, values: Values) -> list[Array]:
        """Arguments read without donation; constants passed to calls are identical in all runs."""
        if not self._constants:
            return [values[key] for key in self._borrowed_keys]
        return [self._constants[key] if key in self._constants else values[key] for key in self._borrowed_keys]
