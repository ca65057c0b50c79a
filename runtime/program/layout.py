"""Placement of a program's variables, remote buffers and streams: devices and arrays.

Known entirely before compilation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from popxl.analysis.transfers import transfers_of, unread_streams
from popxl.base.arrays import Array
from popxl.core.aliasing import reachable
from popxl.core.tensor import Tensor, Variable
from popxl.fp8_utils import in_transit
from popxl.ir import Ir
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import sharing_of
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.values.spec import size_in_bytes
from runtime.lowering import remote_buffers as remote
from runtime.lowering.channels import FAILURE, Channel, Failure, State, channels_of, prints
from runtime.lowering.collectives import devices_meet
from runtime.plan.compile_options import CompileOptions
from runtime.plan.decision import Decision
from runtime.plan.host_steps import HostSteps
from runtime.plan.stages import stages_of
from runtime.program.blocks import VariableBlock, blocks_of
from runtime.targets.compile_target import HOST, CompileTarget
from runtime.targets.replicas import DividedReplicas, Replicas


class Layout:
    """Inputs, outputs and state of a compiled program, with their placement.

    A program is a function ``(changing, constant, feeds) -> (changing, fetches)``: `changing` are the variables that it
    changes, followed by its remote buffers; `constant` are the variables that it only reads; and `feeds` are the arrays
    of its input streams. Arrays have a leading dimension for the replicas, if there are several.

    Args:
        resident: storages of its variables on the device, and the variables; see the attribute.
        changed: storages among these of variables that it changes.
        decision: mode of called graphs, and the IPUs of ops.
        steps: see the attribute.

    Attributes:
        steps: steps that the host executes, for planned programs; else `None`.
        homes: IPUs of the variables, streams and buffers of planned programs.
        stages: its stages, if some belong to other processes.
        replicas: replicas that run the program, on the first IPU of this process.
        divided: the same, if several processes drive them.
        main: graph to run.
        capacity: capacity of each stream, in transfers.
        buffers: the remote buffers that it uses, in the order of their numbers.
        inputs, outputs: streams to load from, and to store to, in the order of their ids.
        kept_outputs: outputs of which some runs write fewer transfers, depending on conditions. Their arrays are sent
            to the device, too, and come back with the other transfers unchanged.
        used_inputs: inputs with loaded values that are used, and `kept_outputs`: only the arrays of these are sent.
        channels: all of these streams and, if anything is checked, the failure flag.
        checks: whether anything is checked.
        resident: storages of variables on the device, and the variables: a variable itself, or the shard that is used
            in its place. Unused variables are absent.
        changed, unchanged: storages of changed variables, and of variables only read.
        changing, constant: arrays of these; an array that changes may include variables that are only read.
        shared_storages: storages of variables that no replica changes and that are equal on all, which share one array.
        in_buffers: for each remote buffer, the variables in its slots.
        stored_to: the remote buffers that it changes.
        counts: maximum number of transfers of each stream in one run.
        limited: streams whose transfers exceed their capacity in some runs, depending on conditions; a run checks them.
        prints: whether it prints from the device.
        uses_x64: whether it uses 64-bit numbers.
        mode: mode of called graphs: see the option `calledGraphs`.
        rerolling: loops of rerolled calls, if there are any.
        options: options of the Ir.
        compile_options: compile options of ops, by IPU if IPUs are separate devices; else by 0, which represents all.
        first_options: those of the first IPU.
    """

    def __init__(
        self,
        ir: Ir,
        compile_target: CompileTarget,
        resident: Mapping[Tensor, Variable],
        changed: Sequence[Tensor],
        decision: Decision,
        steps: HostSteps | None,
    ) -> None:
        self.main, self.options = ir.main_graph, ir.options
        self.compile_target, self.decision, self.steps = compile_target, decision, steps
        self.mode, self.rerolling = decision.mode, decision.rerolling
        self.homes: Mapping[Any, int] = {} if steps is None else steps.initial_ipus | steps.homes()
        self.prints = prints(self.main)
        ops = (op for graph in reachable(self.main) for op in graph.ops)
        self.uses_x64 = any(t.dtype.is_wide for op in ops for t in (*op.inputs, *op.outputs))
        self._default_capacity = ir.num_host_transfers
        self._set_channels()
        self._set_devices()
        self._set_variables(resident, changed)

    def _set_channels(self) -> None:
        """Set streams, remote buffers, and the failure flag if anything is checked."""
        self.counts = transfers_of(self.main)
        channels = channels_of(self.main)
        fewest = transfers_of(self.main, fewest=True)
        over = [c for c in channels if isinstance(c, Stream) and self.counts[c] > c.num_host_transfers]
        self.limited = tuple(s for s in over if fewest[s] <= s.num_host_transfers)
        if self.limited and FAILURE not in channels:
            channels = (FAILURE, *channels)
        self.buffers = tuple(c for c in channels if isinstance(c, RemoteBuffer))
        self.channels = tuple(c for c in channels if not isinstance(c, RemoteBuffer))
        self.inputs = tuple(s for s in self.channels if isinstance(s, HostToDeviceStream))
        self.outputs = tuple(s for s in self.channels if isinstance(s, DeviceToHostStream))
        unread = unread_streams(self.main)
        self.kept_outputs = tuple(s for s in self.outputs if fewest[s] < self.counts[s])
        self.used_inputs = (*(s for s in self.inputs if s not in unread), *self.kept_outputs)
        self.capacity = {s: s.num_host_transfers for s in (*self.inputs, *self.outputs)}
        self.checks = FAILURE in self.channels
        self.in_buffers = {b: remote.variables_in(b, self.main.variables) for b in self.buffers}
        self.stored_to = remote.stored_to(self.main)

    def _set_devices(self) -> None:
        """Set the compile options of each IPU, and the replicas."""
        target, placement = self.compile_target, self.decision.placement
        ipus = (0,) if placement is None else placement.ipus
        targets = [target] if placement is None else [target.of_ipu(i, len(ipus)) for i in range(len(ipus))]
        self.compile_options: Mapping[int, CompileOptions] = {
            ipu: CompileOptions(each, self.options, self.uses_x64) for ipu, each in zip(ipus, targets, strict=True)
        }
        self.first_options = self.compile_options[ipus[0]]
        self.stages = stages_of(self.compile_options)
        own_options = self.first_options if self.stages is None else self.compile_options[self.stages.own_ipu]
        self.replicas = own_options.replicas
        self.divided = self.replicas if isinstance(self.replicas, DividedReplicas) else None

    def _set_variables(self, resident: Mapping[Tensor, Variable], changed: Sequence[Tensor]) -> None:
        """Set the variables on the device, and the arrays that hold them."""
        self.resident, self.changed = resident, tuple(changed)
        self.variables = tuple(resident.values())
        for v in (*self.variables, *(v for inside in self.in_buffers.values() for v in inside)):
            sharing_of(self.main.ir, v.replica_grouping, f"Session: `replica_grouping` of {v!r}")
        written = frozenset(changed)
        self.unchanged = tuple(t for t in resident if t not in written)
        packed = () if self.rerolling is None else self.rerolling.packed
        self.changing = blocks_of(self.changed, packed)
        changing = {t for block in self.changing for t in block.tensors}
        self.constant = blocks_of((t for t in self.unchanged if t not in changing), packed)
        # A plan knows only one kind of arrays.
        alike = {t for t in self.unchanged if t is resident[t] and t.replica_grouping.num_groups == 1}
        alone = [b for b in self.constant if alike.issuperset(b.tensors) and self.mode != "dispatched"]
        self.shared_storages = frozenset(t for block in alone if self.replicas.count > 1 for t in block.tensors)

    # Where it is ----------------------------------------------------------------------------------------------------

    @property
    def devices_meet(self) -> bool:
        """Whether devices synchronize during a run."""
        return any(devices_meet(self.main.ops, options.replicas) for options in self.compile_options.values())

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """JAX devices used by the program."""
        used = {
            device for options in self.compile_options.values() for device in options.replicas.sharding().device_set
        }
        return tuple(device for device in self.compile_target.devices if device in used)

    @property
    def ipus(self) -> tuple[int, ...]:
        """IPUs that are separate devices; otherwise only 0, representing all IPUs."""
        return tuple(self.compile_options)

    @property
    def own_ipus(self) -> tuple[int, ...]:
        """IPUs among `ipus` that this process drives."""
        return tuple(ipu for ipu, options in self.compile_options.items() if not options.compile_target.is_elsewhere)

    def ipu_of(self, thing: Variable | Stream | RemoteBuffer) -> int | None:
        """IPU number of a variable, stream or buffer; `None` unless IPUs are separate devices."""
        if len(self.compile_options) == 1:
            return None
        return self.homes.get(thing.on_replica if isinstance(thing, Variable) else thing)

    def compile_options_for(self, thing: Tensor | Channel) -> CompileOptions:
        """Compile options at a variable's, stream's or buffer's location."""
        return self.compile_options[self.homes[thing]] if thing in self.homes else self.first_options

    def is_elsewhere(self, thing: Tensor | Channel) -> bool:
        """Whether only IPUs of other processes hold a variable, stream or buffer."""
        return self.stages is not None and self.compile_options_for(thing).compile_target.is_elsewhere

    def x64_context(self) -> AbstractContextManager[Any]:
        """Context enabling 64-bit dtypes in JAX, for programs that use them."""
        return jax.enable_x64(True) if self.uses_x64 else nullcontext()

    @property
    def downloaded(self) -> Set[Variable]:
        """Downloaded variables: those changed by the program, in their order."""
        changed = [self.resident[t] for t in self.changed]
        return dict.fromkeys([*changed, *(v for b in self.stored_to for v in self.in_buffers[b])]).keys()

    # Sizes ----------------------------------------------------------------------------------------------------------

    def bytes_of_variables(self) -> dict[Variable, tuple[int, bool]]:
        """Variables resident on the device: bytes per device, and whether the program changes them."""
        copies = {t: 1 if t in self.shared_storages else self.replicas.per_device for t in self.resident}
        return {v: (copies[t] * size_in_bytes(t), t in self.changed) for t, v in self.resident.items()}

    def bytes_of_buffers(self) -> dict[RemoteBuffer, tuple[int, bool]]:
        """Remote buffers used by the program: bytes per device, and whether they reside on the host."""
        on_host = self.first_options.slots.memory_kind == HOST
        copies = self.replicas.per_device
        return {buffer: (copies * buffer.nbytes, on_host) for buffer in self.buffers}

    def bytes_of_streams(self) -> dict[Stream, int]:
        """Bytes transferred per stream and run to or from one device."""
        sent, copies = {*self.used_inputs, *self.outputs}, self.replicas.per_device
        return {s: copies * n * size_in_bytes(s.tensor) if s in sent else 0 for s, n in self.capacity.items()}

    # Arrays of the host ---------------------------------------------------------------------------------------------

    @property
    def leading_dimensions(self) -> tuple[int, ...]:
        """Leading dimensions of host arrays, for streams without `num_host_transfers` of their own."""
        return _several(self._default_capacity, self.replicas.local_count)

    def host_shape(self, stream: Stream) -> tuple[int, ...]:
        """Shape of a stream's host array: transfers, then this process's replicas, then stream shape; leading
        dimensions of size 1 are omitted."""
        return _several(self.capacity.get(stream, stream.num_host_transfers), self.replicas.local_count) + stream.shape

    def shape_of_all(self, stream: Stream) -> tuple[int, ...]:
        """Shape of a stream's host array for replicas of all processes."""
        return _several(self.capacity[stream], self.replicas.count) + stream.shape

    def axis(self, stream: Stream) -> int:
        """Replica dimension of a stream's host array."""
        return 1 if self.capacity[stream] > 1 else 0

    def feed_sharding(self, stream: Stream) -> Any:
        """Sharding of JAX arrays fed to a stream, for this process's replicas."""
        if self.divided is not None:
            return SingleDeviceSharding(self.divided.device)
        return self.compile_options_for(stream).replicas.sharding(self.axis(stream))

    # Arrays of the program ------------------------------------------------------------------------------------------

    def changing_specs(self) -> tuple[Any, ...]:
        """Abstract arrays of changed variables and remote buffers, for lowering."""
        slots = self.first_options.slots
        buffers = (remote.spec(buffer, self.replicas, slots) for buffer in self.buffers)
        return (*map(self._spec, self.changing), *buffers)

    def constant_specs(self) -> tuple[Any, ...]:
        """Abstract arrays of read-only variables, for lowering."""
        return tuple(map(self._spec, self.constant))

    def is_replicated(self, block: VariableBlock) -> bool:
        """Whether all replicas share one array."""
        return block.tensors[0] in self.shared_storages

    def _spec(self, block: VariableBlock) -> Any:
        if self.is_replicated(block):
            return jax.ShapeDtypeStruct(block.shape, block.dtype, sharding=self.replicas.sharding(None))
        return self.replicas.spec(block.shape, block.dtype)

    def feed_specs(self, replicas: Replicas, channels: Sequence[Stream | Failure]) -> tuple[Any, ...]:
        """Abstract arrays of feeds on `replicas` for lowering, restricted to streams in `channels`."""

        def spec(s: Stream) -> Any:
            sharding = replicas.sharding(self.axis(s))
            return jax.ShapeDtypeStruct(self.shape_of_all(s), in_transit(s.dtype), sharding=sharding)

        return tuple(spec(s) for s in self.used_inputs if s in channels)

    def initial_states(self, feeds: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[State, ...]:
        """Initial state of channels: transfer array, and index of the next transfer."""
        given = dict(zip((s for s in self.used_inputs if s in channels), feeds, strict=True))

        def transfers(channel: Stream | Failure) -> Array:
            if isinstance(channel, Failure):
                return jnp.asarray(channel.start)
            shape = (self.capacity[channel], *channel.shape)
            return given[channel].reshape(shape) if channel in given else jnp.zeros(shape, in_transit(channel.dtype))

        return tuple((transfers(channel), 0) for channel in channels)

    def fetches(self, results: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """Fetches of a run: output stream transfers, followed by the failed check if the program has checks."""
        known = dict(zip((c for c in channels if not isinstance(c, HostToDeviceStream)), results, strict=True))
        fetches = tuple(known[s] for s in self.outputs if s in known)
        return (*fetches, known[FAILURE]) if FAILURE in known else fetches

    def replicas_first(self, feeds: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """Move the replica dimension of host arrays to the front."""
        if self.replicas.count == 1:
            return tuple(feeds)
        streams = (s for s in self.used_inputs if s in channels)
        return tuple(jnp.moveaxis(feed, self.axis(s), 0) for s, feed in zip(streams, feeds, strict=True))

    def transfers_first(self, fetches: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """Convert replica-major fetches to host array layout."""
        outputs = [s for s in self.outputs if s in channels]
        stored, checks = fetches[: len(outputs)], fetches[len(outputs) :]
        if self.replicas.count > 1:
            stored = [jnp.moveaxis(fetch, 0, 1) for fetch in stored]
        return (*(fetch.reshape(self.shape_of_all(s)) for s, fetch in zip(outputs, stored, strict=True)), *checks)


def _several(*counts: int) -> tuple[int, ...]:
    """The counts greater than 1, as array dimensions."""
    return tuple(count for count in counts if count > 1)
