"""Where everything of a program lies: its variables, remote buffers and streams, on which devices and in which arrays.

All of it is known before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from popxl.analysis.transfers import transfers_of, unread_streams
from popxl.base.arrays import Array
from popxl.base.trampoline import done
from popxl.core.aliasing import reachable
from popxl.core.tensor import Tensor, Variable
from popxl.fp8_utils import in_transit
from popxl.ir import Ir
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from runtime.lowering import remote_buffers as remote
from runtime.lowering.channels import FAILURE, Channel, Failure, channels_of, prints
from runtime.lowering.collectives import devices_meet
from runtime.plan.decision import Decision
from runtime.plan.planning import Steps
from runtime.plan.terms import Terms
from runtime.program.blocks import Block, blocks_of
from runtime.targets.destination import HOST, Destination
from runtime.targets.replicas import DividedReplicas, Replicas


class Layout:
    """What a compiled program takes and gives, and where that lies.

    A program is a function ``(changing, constant, feeds) -> (changing, fetches)``: of the variables that it changes,
    and then of its remote buffers; of the variables that it only reads; and of the arrays of its input streams. Arrays
    have a leading dimension for the replicas, if there are several.

    Args:
        ir: the program.
        destination: what it is compiled for.
        held: what holds its variables on the device, and the variables; see `held` below.
        changed: of these, what holds variables that it changes.
        decision: how called graphs are compiled, and on which IPUs ops run.

    Attributes:
        destination, decision: as given.
        replicas: those that run the program.
        divided: the same, if several processes drive them.
        main: the graph that is run.
        options: those of the Ir.
        room: how many transfers of each stream there is room for.
        buffers: the remote buffers that it uses, in the order of their numbers.
        inputs, outputs: the streams that are loaded from, and stored to, in the order of their ids.
        fed: the inputs of which somebody looks at what is loaded: the arrays of these are sent, and no others.
        channels: all of these streams and, if anything is checked, what failed.
        checks: whether anything is.
        held: what holds variables on the device, and the variables: a variable itself, or the piece that the program
            uses in its place. Those that it does not use are not held.
        variables: those that it uses.
        changed, read: what holds variables that it changes, and those that it only reads.
        changing, constant: the arrays in which these are; a variable that is only read may lie in one that changes.
        shared: what holds variables that no replica changes and all have alike: there is one array for all of them.
        in_buffers: for each remote buffer, the variables that fill slots of it.
        stored_to: the remote buffers that it changes.
        counts: how many transfers of each stream one run makes.
        prints: whether it prints from the device.
        wide: whether it has numbers of 64 bits.
        calls: how called graphs are compiled: see the option `calledGraphs`.
        rolling: the loops that are made of calls, if they are.
        terms: on what terms ops are compiled, by the IPUs that are devices of their own; by 0, which stands for all, if
            none is.
    """

    def __init__(
        self,
        ir: Ir,
        destination: Destination,
        held: Mapping[Tensor, Variable],
        changed: Sequence[Tensor],
        decision: Decision,
    ) -> None:
        main = self.main = ir.main_graph
        self.destination, self.decision = destination, decision
        self.replicas = destination.replicas
        self.divided = self.replicas if isinstance(self.replicas, DividedReplicas) else None
        self.options = ir.options
        channels = channels_of(main)
        self.buffers = tuple(c for c in channels if isinstance(c, RemoteBuffer))
        self.channels = tuple(c for c in channels if not isinstance(c, RemoteBuffer))
        self.inputs = tuple(s for s in self.channels if isinstance(s, HostToDeviceStream))
        self.outputs = tuple(s for s in self.channels if isinstance(s, DeviceToHostStream))
        unread = unread_streams(main)
        self.fed = tuple(s for s in self.inputs if s not in unread)
        self._usual_room = ir.num_host_transfers
        self.room = {s: s.num_host_transfers for s in (*self.inputs, *self.outputs)}
        self.checks = FAILURE in self.channels
        self.held, self.changed = held, tuple(changed)
        self.variables = tuple(held.values())
        written = frozenset(changed)
        self.read = tuple(t for t in held if t not in written)
        self.in_buffers = {b: remote.variables_in(b, main.variables) for b in self.buffers}
        self.stored_to = remote.stored_to(main)
        self.prints = prints(main)
        self.counts = transfers_of(main)
        ops = (op for graph in reachable(main) for op in graph.ops)
        self.wide = any(t.dtype.is_wide for op in ops for t in (*op.inputs, *op.outputs))
        self.calls, places, self.rolling = decision.calls, decision.places, decision.rolling
        self._choice = decision.choice if self.calls == "dispatched" else None
        together = () if self.rolling is None else self.rolling.together
        self.changing = blocks_of(self.changed, together)
        changing = {t for block in self.changing for t in block.tensors}
        self.constant = blocks_of((t for t in self.read if t not in changing), together)
        ipus = (0,) if places is None else places.ipus
        destinations = [destination] if places is None else [destination.of_ipu(i, len(ipus)) for i in range(len(ipus))]
        self.terms: Mapping[int, Terms] = {
            ipu: Terms(each, self.options, self.wide) for ipu, each in zip(ipus, destinations, strict=True)
        }
        # A plan knows only one kind of arrays.
        alike = {t for t in self.read if t is self.held[t] and t.replica_grouping.num_groups == 1}
        alone = [b for b in self.constant if alike.issuperset(b.tensors) and self.calls != "dispatched"]
        self.shared = frozenset(t for block in alone if self.replicas.count > 1 for t in block.tensors)

    # Where it is ----------------------------------------------------------------------------------------------------

    @property
    def devices_meet(self) -> bool:
        """Whether devices wait for each other in a run."""
        return any(devices_meet(self.main.ops, terms.replicas) for terms in self.terms.values())

    @cached_property
    def _planned(self) -> tuple[Mapping[Any, int], list[Steps]]:
        """Where the steps of a plan find variables, streams and buffers; and such steps, until a plan takes them."""
        steps = self._new_steps()
        return steps.starts | steps.homes(), [steps]

    def _new_steps(self) -> Steps:
        assert self._choice is not None
        steps: Steps = done(Steps(self.main.ops, self._choice, self.changed, self.changed).planned())
        return steps

    def steps(self) -> Steps | None:
        """What the host does, if the program is a plan. Each plan has its own, where it keeps what it compiles."""
        if self._choice is None:
            return None
        _, spare = self._planned
        return spare.pop() if spare else self._new_steps()

    @property
    def homes(self) -> Mapping[Any, int]:
        """Where the steps of a plan find variables, streams and buffers."""
        return {} if self._choice is None else self._planned[0]

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The JAX devices that it runs on."""
        used = {device for terms in self.terms.values() for device in terms.replicas.sharding().device_set}
        return tuple(device for device in self.destination.devices if device in used)

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that are devices of their own; 0, which stands for all, if none is."""
        return tuple(self.terms)

    def ipu_of(self, thing: Variable | Stream | RemoteBuffer) -> int | None:
        """The IPU that a variable, stream or buffer is on, if IPUs are devices of their own."""
        if len(self.terms) == 1:
            return None
        return self.homes.get(thing if not isinstance(thing, Variable) or thing.piece is None else thing.piece)

    def terms_for(self, thing: Tensor | Channel | None) -> Terms:
        """The terms of where a variable, stream or buffer is."""
        first = next(iter(self.terms))
        return self.terms[self.homes.get(thing, first)]

    def precision(self) -> AbstractContextManager[Any]:
        """JAX drops 64-bit numbers unless it is told to keep them; only programs that have some pay for that."""
        return jax.enable_x64(True) if self.wide else nullcontext()

    @property
    def read_back(self) -> Set[Variable]:
        """The variables whose values a download copies to the host: those that the program changes."""
        return {self.held[t] for t in self.changed} | {v for b in self.stored_to for v in self.in_buffers[b]}

    # Sizes ----------------------------------------------------------------------------------------------------------

    def bytes_of_variables(self) -> dict[Variable, tuple[int, bool]]:
        """The variables that the program keeps on its device: the bytes of each on one device, and whether the program
        changes it."""
        copies = {t: 1 if t in self.shared else self.replicas.per_device for t in self.held}
        return {v: (copies[t] * t.nelms * t.dtype.itemsize, t in self.changed) for t, v in self.held.items()}

    def bytes_of_buffers(self) -> dict[RemoteBuffer, tuple[int, bool]]:
        """The remote buffers that the program uses: the bytes of each for one device, and whether they are on the
        host."""
        on_host = self.terms_for(None).slots.memory_kind == HOST
        copies = self.replicas.per_device
        return {b: (copies * b.entries * b.slot_nelms * b.tensor_dtype.itemsize, on_host) for b in self.buffers}

    def bytes_of_streams(self) -> dict[Stream, int]:
        """The bytes that one device gets of each stream in a run, or gives."""
        sent = {*self.fed, *self.outputs}
        sizes = {
            s: room * self.replicas.per_device * s.tensor.nelms * s.dtype.itemsize for s, room in self.room.items()
        }
        return {s: size if s in sent else 0 for s, size in sizes.items()}

    # Arrays of the host ---------------------------------------------------------------------------------------------

    @property
    def leading_dimensions(self) -> tuple[int, ...]:
        """The dimensions that host arrays have before those of the stream, if it has no number of transfers of its
        own."""
        return _several(self._usual_room, self.replicas.local_count)

    def host_shape(self, stream: Stream) -> tuple[int, ...]:
        """Shape of the host array of a stream: all transfers of all replicas of this process; dimensions for what
        there are several."""
        return _several(self.room.get(stream, stream.num_host_transfers), self.replicas.local_count) + stream.shape

    def shape_of_all(self, stream: Stream) -> tuple[int, ...]:
        """The same, for the replicas of all processes."""
        return _several(self.room[stream], self.replicas.count) + stream.shape

    def axis(self, stream: Stream) -> int:
        """The dimension of its host array that counts the replicas."""
        return 1 if self.room[stream] > 1 else 0

    def feed_sharding(self, stream: Stream) -> Any:
        """Where JAX arrays for a stream have to be: with the replicas of this process."""
        replicas = self.terms_for(stream).replicas
        return replicas.sharding(self.axis(stream)) if self.divided is None else SingleDeviceSharding(replicas.device)

    # Arrays of the program ------------------------------------------------------------------------------------------

    def changing_specs(self) -> tuple[Any, ...]:
        """For lowering: the variables that the program changes, and the remote buffers."""
        slots = self.terms_for(None).slots
        buffers = (remote.spec(buffer, self.replicas, slots) for buffer in self.buffers)
        return (*map(self._spec, self.changing), *buffers)

    def constant_specs(self) -> tuple[Any, ...]:
        """For lowering: the variables that it only reads."""
        return tuple(map(self._spec, self.constant))

    def is_shared(self, block: Block) -> bool:
        """Whether there is one array for all replicas."""
        return block.tensors[0] in self.shared

    def _spec(self, block: Block) -> Any:
        if self.is_shared(block):
            return jax.ShapeDtypeStruct(block.shape, block.dtype, sharding=self.replicas.sharding(None))
        return self.replicas.spec(block.shape, block.dtype)

    def feed_specs(self, replicas: Replicas, channels: Sequence[Stream | Failure]) -> tuple[Any, ...]:
        """For lowering: the feeds, where these replicas are, of the streams among some channels."""

        def spec(s: Stream) -> Any:
            sharding = replicas.sharding(self.axis(s))
            return jax.ShapeDtypeStruct(self.shape_of_all(s), in_transit(s.dtype), sharding=sharding)

        return tuple(spec(s) for s in self.fed if s in channels)

    def begin(self, feeds: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[tuple[Array, Any], ...]:
        """The first state of channels: the array of the transfers of each, and the number of the next one."""
        given = dict(zip((c for c in channels if c in self.fed), feeds, strict=True))

        def transfers(channel: Stream | Failure) -> Array:
            if isinstance(channel, Failure):
                return jnp.asarray(channel.start)
            shape = (self.room[channel], *channel.shape)
            return given[channel].reshape(shape) if channel in given else jnp.zeros(shape, in_transit(channel.dtype))

        return tuple((transfers(channel), 0) for channel in channels)

    def end(self, results: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """What is fetched: the transfers of the output streams; last, if anything is checked, which check failed."""
        known = dict(zip((c for c in channels if not isinstance(c, HostToDeviceStream)), results, strict=True))
        fetches = tuple(known[s] for s in self.outputs if s in known)
        return (*fetches, known[FAILURE]) if FAILURE in known else fetches

    def replicas_first(self, feeds: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """Host arrays, whose first dimension is that of the transfers, for the replicas."""
        if self.replicas.count == 1:
            return tuple(feeds)
        streams = (s for s in self.fed if s in channels)
        return tuple(jnp.moveaxis(feed, self.axis(s), 0) for s, feed in zip(streams, feeds, strict=True))

    def transfers_first(self, fetches: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """What the replicas fetched, as host arrays."""
        outputs = [s for s in self.outputs if s in channels]
        stored, checks = fetches[: len(outputs)], fetches[len(outputs) :]
        if self.replicas.count > 1:
            stored = [jnp.moveaxis(fetch, 0, 1) for fetch in stored]
        return (*(fetch.reshape(self.shape_of_all(s)) for s, fetch in zip(outputs, stored, strict=True)), *checks)


def _several(*counts: int) -> tuple[int, ...]:
    """Dimensions for what there are several of."""
    return tuple(count for count in counts if count > 1)
