"""A compiled Ir for one device, with the state that it keeps there: as one XLA program, or as a plan of several.

The device may be several of JAX's. They are of the replicas, or each of an IPU of a replica: `runtime.plan.placement`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from time import perf_counter
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from popxl.base.nesting import Nested, done
from popxl.core.aliasing import reachable, storages, written_tensors
from popxl.core.tensor import Tensor, Variable
from popxl.dtypes import dtype
from popxl.errors import ApplicationRuntimeError, PopxlError, PopxlRuntimeError
from popxl.fp8_utils import in_transit, to_device, to_host
from popxl.ir import Ir
from popxl.looking.transfers import transfers_of
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.values.sharding import parts_of
from runtime.aside import Aside, lower
from runtime.files.cache import compiling, compiling_afresh
from runtime.files.executables import donating, prepared
from runtime.interrupts import uninterrupted
from runtime.lowering import remote_buffers as remote
from runtime.lowering.effects import FAILURE, Channel, Channels, Failure, channels_of, prints
from runtime.lowering.lower import Lowering, room_to_recurse
from runtime.lowering.replicas import DividedReplicas, Replicas
from runtime.plan.choice import REPEATED, SMALLEST, Choice
from runtime.plan.pieces import Target
from runtime.plan.placement import Places
from runtime.plan.plan import Plan
from runtime.plan.planning import Steps
from runtime.plan.structure import Structure, forget
from runtime.program.debugging import Debugged, tell_given_nans, together
from runtime.progress import Watch
from runtime.targets.devices import Device
from runtime.timeline import Recorder, Timeline

Array = Any


@dataclass(frozen=True)
class Ready:
    """A program that is compiled already.

    Attributes:
        calls: as `Program.calls`.
        executables: as `Program.executables` gives them.
    """

    calls: str
    executables: Sequence[Any]


class Program:
    """An Ir, compiled for a device: `(variables, feeds) -> (variables, fetches)`.

    Variables that the program changes are donated at each run and replaced by their new values; so are the remote
    buffers that it uses. Other variables are only read. Nothing is fetched before somebody looks at it.

    Args:
        ir: the program.
        device: where it runs.
        ready: what compiling it would give, if that is known.
        afresh: take no executable from anywhere else.

    Attributes:
        replicas: those that run it. On the device, arrays have a leading dimension for them, if there are several.
        inputs, outputs: the streams that are loaded from, and stored to, in the order of their ids.
        variables: those that the program uses.
        stored_to: the remote buffers that the program changes.
        counts: how many transfers of each stream one run makes.
        calls: how called graphs are compiled: see the option `calledGraphs`.
        reason: why so, in a sentence or two.
        seconds: how long it took to make the executable.
        executable: what runs the program: a JAX executable, or a `runtime.plan.plan.Plan`.
        is_loaded: whether the variables are on the device.
        values_of_all: the values on all replicas of the variables that are read from all, as they were when they were
            last copied to the host.
        runs: how often it has been run.
        run_seconds: how long the host was busy with these runs.
        timeline: the last recording.
    """

    def __init__(self, ir: Ir, device: Device, ready: Ready | None = None, afresh: bool = False) -> None:
        main = ir.main_graph
        self.device = device
        self.replicas = Replicas.of(ir.instance_replication_factor, device.jax_devices)
        self._divided = self.replicas if isinstance(self.replicas, DividedReplicas) else None
        self.transfers = ir.num_host_transfers
        channels = channels_of(main)
        self._buffers = tuple(c for c in channels if isinstance(c, RemoteBuffer))
        self._channels = tuple(c for c in channels if not isinstance(c, RemoteBuffer))
        self.inputs = tuple(s for s in self._channels if isinstance(s, HostToDeviceStream))
        self.outputs = tuple(s for s in self._channels if isinstance(s, DeviceToHostStream))
        self._checks = FAILURE in self._channels
        used = {s for made_of in storages(main.ops).values() for s in made_of}
        written = written_tensors(main)
        # What holds a variable on the device is the variable, or the piece that the program uses in its place.
        holders = {v if v.piece is None else v.piece: v for v in main.variables}
        self._held = {t: v for t, v in holders.items() if t in used}
        self.variables = tuple(self._held.values())
        self._changed = tuple(t for t in self._held if t in written)
        self._read = tuple(t for t in self._held if t not in written)
        self._in_buffers = {b: remote.variables_in(b, main.variables) for b in self._buffers}
        self.stored_to = remote.stored_to(main)
        for v in main.variables:
            if v in used and v.location_info.isRemote():
                raise PopxlError(
                    f"Session: {v!r} is used by an op, and its numbers are in {v.location_info.buffer!r} or in pieces. "
                    "Use what `ops.remote_load` loads, or the piece that `replica_sharded_variable` returns."
                )
        self._prints = prints(main)
        self.counts = transfers_of(main)
        self._excess = {stream: count for stream, count in self.counts.items() if count > self.transfers}
        tensors = [t for graph in reachable(main) for op in graph.ops for t in (*op.inputs, *op.outputs)]
        self._wide = any(t.dtype in _WIDE for t in tensors)
        self._main = main
        self._options = ir.options
        self.is_loaded = False
        self.runs, self.run_seconds = 0, 0.0
        self.timeline: Timeline | None = None
        self._changing: tuple[Array, ...] | None = None
        self._constant: tuple[Array, ...] = ()
        self.values_of_all: dict[Variable, np.ndarray] = {}
        for t in tensors:
            if t.dtype.is_complex:
                raise PopxlError(f"Session: {t!r} is complex, and complex numbers cannot be run; use floats.")
        smallest = {"auto": SMALLEST, "kept": SMALLEST, "inlined": None}.get(ir.options.calledGraphs, 1)
        places, of_places = self._placement(smallest)
        self._targets = dict(self._targets_of(places))
        self._homes: Mapping[Any, int] = {}
        choice = Choice(main, smallest, places)
        if places is not None:
            self.calls, self.reason = "dispatched", of_places
        elif ready is not None:
            self.calls, self.reason = ready.calls, "It was so in the file."
        elif ir.options.calledGraphs == "auto":
            self.calls = "dispatched" if choice.is_worth_it() else "kept"
            repeated = (
                f"In one program XLA would compile {choice.repeated} ops again that it has compiled already; a plan "
                f"pays from {REPEATED} on."
            )
            nothing = (
                f"No graph of {SMALLEST} ops or more is called twice; a plan, in which such graphs are compiled by "
                "themselves, would save nothing."
            )
            self.reason = (repeated if choice.repeated else nothing) + of_places
        else:
            self.calls = ir.options.calledGraphs
            self.reason = f"`ir.options.calledGraphs` is {self.calls!r}.{of_places}"
        # A variable that no replica changes, and that all share, is there once; a plan knows only one kind of arrays.
        alone = [
            t
            for t in self._read
            if t is self._held[t] and t.replica_grouping.num_groups == 1 and self.calls != "dispatched"
        ]
        self._shared = frozenset(alone if self.replicas.count > 1 else ())
        start = perf_counter()
        cache = self._compiling(ir, ready, afresh)
        with self._precision(), room_to_recurse(main), cache as self._taken, Watch() as watch:
            known = None if ready is None else ready.executables
            if self.calls == "dispatched":
                self.executable = self._plan(choice, known, watch)
            else:
                self.executable = self._one_program(known, watch)
        if self._taken and isinstance(self.executable, Plan):
            _taken.update(self.executable.structures)
        self.seconds = perf_counter() - start
        self._call: Callable[..., Any] = self.executable
        self._by_ops: bool | None = None  # where it is run op by op: whether infinities are reported
        self._quick: Any = None  # calls the executable by C alone, where the feeds are of these types
        self._quick_for: tuple[type, ...] | None = None

    # Where it runs --------------------------------------------------------------------------------------------------

    def _placement(self, smallest: int | None) -> tuple[Places | None, str]:
        """The IPUs of the program, if each is a device of its own; and why, or why not, in a sentence."""
        places = Places(self._main, self.replicas.count)
        needed, found = len(places.ipus) * self.replicas.count, self.device.jax_devices
        if len(places.ipus) <= 1:
            return None, ""
        if self._options.placement == "one":
            why = "`ir.options.placement` says so"
        elif len(found) < needed:
            why = f"with {self.replicas.count} replica(s) they would need {needed}, and {len(found)} can be used"
        elif self._options.placement == "auto" and found[0].platform == "cpu" and not self._pays(smallest, places):
            why = "there is so little work that a CPU would take longer to share it out than to do it"
        else:
            shown = ", ".join(map(str, places.ipus))
            return places, f"Ops are on the IPUs {shown}, and each of these is a device of its own."
        return None, f" The {len(places.ipus)} IPUs of a replica are all on one device: {why}."

    def _pays(self, smallest: int | None, places: Places) -> bool:
        steps: Steps = done(Steps(self._main.ops, Choice(self._main, smallest, places), (), self._changed).planned())
        return steps.is_worthwhile()

    def _targets_of(self, places: Places | None) -> Iterator[tuple[int, Target]]:
        """What is compiled for, by IPU. Of several, IPU `i` of replica `r` is device ``r * count + i``."""
        ipus = (0,) if places is None else places.ipus
        for i, ipu in enumerate(ipus):
            replicas = self.replicas
            if places is not None:
                replicas = Replicas.of(self.replicas.local_count, self.device.jax_devices, len(ipus), i)
            slots = remote.sharding(replicas, self._options)
            yield ipu, Target(replicas, slots, self._options, self.transfers, self._wide)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The JAX devices that it runs on."""
        used = {device for target in self._targets.values() for device in target.replicas.sharding().device_set}
        return tuple(device for device in self.device.jax_devices if device in used)

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that are devices of their own; 0, which stands for all, if none is."""
        return tuple(self._targets)

    def ipu_of(self, thing: Variable | Stream | RemoteBuffer) -> int | None:
        """The IPU that a variable, stream or buffer is on, if IPUs are devices of their own."""
        if len(self._targets) == 1:
            return None
        return self._homes.get(thing if not isinstance(thing, Variable) or thing.piece is None else thing.piece)

    def _target(self, thing: Tensor | Channel | None) -> Target:
        """What is compiled for where a variable, stream or buffer is."""
        first = next(iter(self._targets))
        return self._targets[self._homes.get(thing, first)]

    # The function ---------------------------------------------------------------------------------------------------

    def _compiling(self, ir: Ir, ready: Ready | None, afresh: bool) -> contextlib.AbstractContextManager[bool]:
        if ready is not None:
            return contextlib.nullcontext(True)
        if not afresh:
            return compiling(ir, self.device, self._prints, self.can_be_kept)
        forget()
        return compiling_afresh()

    @property
    def can_be_kept(self) -> bool:
        """Whether other processes could run what is compiled.

        Where XLA for CPUs reads an executable that it has written, it no longer knows in which order collectives of
        several devices come: devices meet in different ones, and the process hangs or ends (jaxlib 0.10.2).
        """
        is_spread = any(target.replicas.mesh is not None for target in self._targets.values())
        if self.device.jax_devices[0].platform != "cpu" or not is_spread:
            return True
        parts = (part for graph in reachable(self._main) for op in graph.ops for part in op.parts)
        return not any(part.kind.between_replicas and part.attributes["group_size"] > 1 for part in parts)

    @property
    def is_fresh(self) -> bool:
        """Whether XLA compiled all executables in this process. Those from files and caches cannot be written again:
        where XLA has loaded an executable for the CPU, it no longer has its code in a form that it could write."""
        pieces = self.executable.structures if isinstance(self.executable, Plan) else ()
        return not self._taken and _taken.isdisjoint(pieces)

    def executables(self) -> tuple[Any, ...]:
        """All JAX executables of the program, each once, in an order that depends on the program only."""
        if isinstance(self.executable, Plan):
            ends = (executable for pair in self._ends.values() for executable in pair)
            return (*ends, *(structure.executable for structure in self.executable.structures))
        return (self.executable,)

    def _one_program(self, known: Sequence[Any] | None, watch: Watch) -> Any:
        """The whole program as one executable."""
        if known is not None:
            (executable,) = known
            self.text: Callable[[], str] = executable.as_text
            return executable
        watch.begins("the program", 0, 1)
        lowering = Lowering(self._main.ops, self._options, self.calls == "kept", self.replicas)
        own = tuple(v for v in self._read if v not in self._shared)
        shared = tuple(v for v in self._read if v in self._shared)

        def of_one(changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array], others: Any) -> Any:
            read = dict(zip((*own, *shared), (*constant, *others), strict=True))
            return done(self._of_one(lowering, changing, read, feeds))

        spread = self.replicas.spread(of_one, shared=True)

        def step(changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array]) -> Any:
            """One run of the main graph by all replicas."""
            known = dict(zip(self._read, constant, strict=True))
            read, others = (tuple(known[v] for v in variables) for variables in (own, shared))
            changed, fetches = spread(changing, read, self._replicas_first(feeds), others)
            return changed, self._transfers_first(fetches, self._channels)

        changing, constant = (tuple(map(self._of_variable, vs)) for vs in (self._changed, self._read))
        slots = self._target(None).slots
        changing += tuple(remote.spec(buffer, self.replicas, slots) for buffer in self._buffers)
        feeds = self._feeds(self.replicas, self._channels)
        lowered = lower(donating(step, 0), changing, constant, feeds)
        self.text = lowered.as_text
        with Aside(1) as aside:
            return aside.begin(lambda: self.replicas.compile(lowered)).result()

    def _of_one(
        self, lowering: Lowering, changing: Sequence[Array], read: Mapping[Tensor, Array], feeds: Sequence[Array]
    ) -> Nested[tuple[tuple[Array, ...], tuple[Array, ...]]]:
        """One run of the main graph by one replica."""
        count = len(self._changed)
        values = {**dict(zip(self._changed, changing[:count], strict=True)), **read}
        channels = Channels(dict(zip(self._channels, self._begin(feeds, self._channels), strict=True)))
        for buffer, slots in zip(self._buffers, changing[count:], strict=True):
            channels.set_slots(buffer, slots)
        environment = yield lowering.running(self._main.ops, values, channels)
        changed = (*(environment.values[t] for t in self._changed), *map(channels.slots, self._buffers))
        return changed, self._end(channels.results(), self._channels)

    def _plan(self, choice: Choice, known: Sequence[Any] | None, watch: Watch) -> Plan:
        """The program as pieces that the host runs one after the other."""
        steps: Steps = done(Steps(self._main.ops, choice, self._changed, self._changed).planned())
        self._homes = steps.starts | steps.homes()
        buffers = {buffer: self._homes[buffer] for buffer in self._buffers}
        channels = {place: self._channels_in(place, steps) for place in self._targets}
        # Of several places, some may have no streams; the only one always has its ends.
        with_ends = [place for place, here in channels.items() if here or len(channels) == 1]
        if known is None:
            self._ends = {place: self._begin_and_end(self._targets[place], channels[place]) for place in with_ends}
            held = []
        else:
            pairs = zip(known[::2], known[1::2], strict=False)
            self._ends = dict(zip(with_ends, pairs, strict=False))
            held = self._adopt(steps, known[2 * len(with_ends) :])
        streams = (self.inputs, self.outputs)
        plan = Plan(steps, self._changed, self._read, buffers, *streams, channels, self._targets, self._ends, watch)
        del held  # by now the pieces have them
        self.text = plan.text
        return plan

    def _channels_in(self, place: int, steps: Steps) -> tuple[Stream | Failure, ...]:
        """The streams that are in a place. What failed is noted where it is checked."""
        checks = any(FAILURE in piece.channels for piece in steps.pieces() if piece.place == place)
        return tuple(c for c in self._channels if (checks if c is FAILURE else self._homes[c] == place))

    def _adopt(self, steps: Steps, executables: Sequence[Any]) -> list[Structure]:
        """Have the pieces of the plan found compiled. They are, as long as somebody holds what this returns."""
        structures = dict.fromkeys(piece.found(self._targets[piece.place]) for piece in steps.pieces())
        for structure, executable in zip(structures, executables, strict=True):
            if structure.executable is None:
                structure.executable, structure.text = executable, executable.as_text
        return [*structures]

    def _begin_and_end(self, target: Target, channels: Sequence[Stream | Failure]) -> tuple[Any, Any]:
        """What makes the first state of channels of the feeds, and what makes the fetches of the last state.

        Where host arrays look like the transfers of a stream, nothing is copied: those of feeds are `None` in the first
        state, for the plan to fill in, and the others are donated.
        """
        replicas = target.replicas
        alike = self.transfers > 1 and replicas.count == 1

        def of_one(feeds: Sequence[Array]) -> Any:
            states = zip(channels, self._begin(feeds, channels), strict=True)
            return tuple(
                (None if alike and c in self.inputs else jnp.asarray(transfers), jnp.asarray(position, jnp.int32))
                for c, (transfers, position) in states
            )

        def begin(feeds: Sequence[Array]) -> Any:
            return replicas.spread(of_one)(self._replicas_first(feeds))

        def end(results: Sequence[Array]) -> Any:
            fetched = replicas.spread(lambda results: self._end(results, channels))(results)
            return self._transfers_first(fetched, channels)

        started = lower(jax.jit(begin, out_shardings=replicas.sharding()), self._feeds(replicas, channels))
        results = [
            jax.ShapeDtypeStruct(transfers.shape, transfers.dtype, sharding=replicas.sharding())
            for c, (transfers, _) in zip(channels, started.out_info, strict=True)
            if c not in self.inputs
        ]
        ended = lower(jax.jit(end, donate_argnums=0 if alike else ()), results)
        with Aside(1) as aside:
            return aside.begin(lambda: (replicas.compile(started), replicas.compile(ended))).result()

    def _begin(self, feeds: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[tuple[Array, Any], ...]:
        """The first state of channels: the array of the transfers of each, and the number of the next one."""
        given = dict(zip((c for c in channels if c in self.inputs), feeds, strict=True))

        def transfers(channel: Stream | Failure) -> Array:
            if isinstance(channel, Failure):
                return jnp.asarray(channel.start)
            shape = (self.transfers, *channel.shape)
            return given[channel].reshape(shape) if channel in given else jnp.zeros(shape, in_transit(channel.dtype))

        return tuple((transfers(channel), 0) for channel in channels)

    def _end(self, results: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """What is fetched: the transfers of the output streams; last, if anything is checked, which check failed."""
        known = dict(zip((c for c in channels if c not in self.inputs), results, strict=True))
        fetches = tuple(known[s] for s in self.outputs if s in known)
        return (*fetches, known[FAILURE]) if FAILURE in known else fetches

    def _replicas_first(self, feeds: Sequence[Array]) -> tuple[Array, ...]:
        """Host arrays, whose first dimension is that of the transfers, for the replicas."""
        if self.replicas.count == 1 or self.transfers == 1:
            return tuple(feeds)
        return tuple(jnp.moveaxis(feed, 1, 0) for feed in feeds)

    def _transfers_first(self, fetches: Sequence[Array], channels: Sequence[Stream | Failure]) -> tuple[Array, ...]:
        """What the replicas fetched, as host arrays."""
        outputs = [s for s in self.outputs if s in channels]
        stored, checks = fetches[: len(outputs)], fetches[len(outputs) :]
        if self.replicas.count > 1:
            stored = [jnp.moveaxis(fetch, 0, 1) for fetch in stored]
        return (*(fetch.reshape(self._shape_of_all(s)) for s, fetch in zip(outputs, stored, strict=True)), *checks)

    @property
    def _axis(self) -> int:
        """The dimension of host arrays that counts the replicas."""
        return 1 if self.transfers > 1 else 0

    def feed_sharding(self, stream: Stream) -> Any:
        """Where JAX arrays for a stream have to be: with the replicas of this process."""
        replicas = self._target(stream).replicas
        return replicas.sharding(self._axis) if self._divided is None else SingleDeviceSharding(replicas.device)

    def _feeds(self, replicas: Replicas, channels: Sequence[Stream | Failure]) -> tuple[Any, ...]:
        sharding = replicas.sharding(self._axis)
        return tuple(
            jax.ShapeDtypeStruct(self._shape_of_all(s), in_transit(s.dtype), sharding=sharding)
            for s in self.inputs
            if s in channels
        )

    def _of_variable(self, t: Tensor) -> Any:
        if t in self._shared:
            return jax.ShapeDtypeStruct(t.shape, t.dtype.as_jax(), sharding=self.replicas.sharding(None))
        return self.replicas.spec(t.shape, t.dtype.as_jax())

    def temporaries(self) -> int:
        """Bytes of device memory that one run needs, besides the variables and the streams."""
        if isinstance(self.executable, Plan):
            return self.executable.temporaries()
        return self.executable.memory_analysis().temp_size_in_bytes

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """JAX drops 64-bit numbers unless it is told to keep them; only programs that have some pay for that."""
        return jax.enable_x64(True) if self._wide else contextlib.nullcontext()

    def host_shape(self, stream: Stream) -> tuple[int, ...]:
        """Shape of the host array of a stream: all transfers of all replicas of this process; dimensions for what
        there are several."""
        return self.leading_dimensions + stream.shape

    def _shape_of_all(self, stream: Stream) -> tuple[int, ...]:
        """The same, for the replicas of all processes."""
        return tuple(count for count in (self.transfers, self.replicas.count) if count > 1) + stream.shape

    @property
    def leading_dimensions(self) -> tuple[int, ...]:
        """The dimensions that host arrays have before those of the stream."""
        return tuple(count for count in (self.transfers, self.replicas.local_count) if count > 1)

    def held(self) -> dict[Variable, tuple[int, bool]]:
        """The variables that the program keeps on its device: the bytes of each on one device, and whether the program
        changes it."""
        copies = {t: 1 if t in self._shared else self.replicas.per_device for t in self._held}
        return {v: (copies[t] * t.nelms * t.dtype.itemsize, t in self._changed) for t, v in self._held.items()}

    def buffers(self) -> dict[RemoteBuffer, tuple[int, bool]]:
        """The remote buffers that the program uses: the bytes of each for one device, and whether they are on the
        host."""
        on_host = self._target(None).slots.memory_kind == remote.HOST
        copies = self.replicas.per_device
        return {b: (copies * b.entries * b.slot_nelms * b.tensor_dtype.itemsize, on_host) for b in self._buffers}

    # Running --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[Timeline]:
        """Note, while the block lasts, when what runs on which device. It is all there at the end of the block."""
        timeline = self.timeline = Timeline()
        recorder, before = Recorder(timeline), self._call
        self._quick_for = None
        if isinstance(self.executable, Plan):
            self._call = partial(self.executable, recorder=recorder)
        else:
            self._call = partial(recorder, "the program", self.executable)
        try:
            yield timeline
        finally:
            self._call = before
            recorder.finish()

    @contextlib.contextmanager
    def debugging(self, infinities: bool) -> Iterator[None]:
        """While the block lasts, run op by op; see `Session.debugging`."""
        if self._divided is not None:
            raise NotImplementedError(
                f"Session.debugging: the program runs on {self.replicas}, and what other processes compute cannot be "
                "looked at here. Run it in one process: with `popxl.Ir(replication=...)`, without `poprun`."
            )
        before, self._by_ops, self._quick_for = self._by_ops, infinities, None
        try:
            yield
        finally:
            self._by_ops = before

    def _op_by_op(self, state: Sequence[Array], feeds: Sequence[Array], infinities: bool) -> Any:
        """What the executable does, without giving anything up."""
        count, mesh = self.replicas.count, self.replicas.mesh
        devices = [self.replicas.device] * count if mesh is None else list(mesh.devices.flat)

        def shares(array: Array, is_shared: bool = False) -> list[Array]:
            """What each replica has of an array, on its device, from wherever it is."""
            whole = self.replicas.fetched(array)
            alike = is_shared or count == 1
            return [jax.device_put(whole if alike else whole[i], device) for i, device in enumerate(devices)]

        def joined(parts: Sequence[Array], like: Array) -> Array:
            """The array of all replicas. It is a copy: arrays that are given up later must not be somebody else's."""
            whole = np.stack(parts) if count > 1 else np.array(parts[0])
            return self.replicas.place(whole, like.sharding)

        own = self._replicas_first([np.array(feed) for feed in feeds])
        held: list[Tensor | Channel] = [*self._changed, *self._buffers, *self._read]
        tell_given_nans(dict(zip([*held, *self.inputs], [*state, *self._constant, *own], strict=True)))
        changing, fed = (list(map(shares, arrays)) for arrays in (state, own))
        constant = [shares(array, t in self._shared) for t, array in zip(self._read, self._constant, strict=True)]
        lowerings = [Debugged(self._main.ops, self._options, self.replicas, i, infinities) for i in range(count)]
        works = []
        for i, lowering in enumerate(lowerings):
            of_one = [[shares[i] for shares in each] for each in (changing, constant, fed)]
            read = dict(zip(self._read, of_one[1], strict=True))
            works.append(self._of_one(lowering, of_one[0], read, of_one[2]))
        runs = together(works, lowerings, devices)
        changed = tuple(map(joined, zip(*(changed for changed, _ in runs), strict=True), state))
        fetched = zip(*(fetches for _, fetches in runs), strict=True)
        fetches = [np.stack(parts) if count > 1 else parts[0] for parts in fetched]
        return changed, self._transfers_first(fetches, self._channels)

    def upload(self) -> None:
        """Copy the host values of all variables to the device. Slots of buffers that no variable fills stay."""
        slots = [None] * len(self._buffers) if self._changing is None else self._changing[len(self._changed) :]
        buffers = zip(self._in_buffers.items(), slots, strict=True)
        self.replicas.meet("Session.weights_from_host")
        with self._precision():
            changing = (
                *(self._put(t) for t in self._changed),
                *(self._filled(buffer, vs, before) for (buffer, vs), before in buffers),
            )
            constant = tuple(self._put(t) for t in self._read)
        self.device.loads(self)
        self._changing, self._constant, self.is_loaded = changing, constant, True  # no signal comes between

    def _filled(self, buffer: RemoteBuffer, variables: Sequence[Variable], before: Array | None) -> Array:
        target = self._target(buffer)
        return remote.filled(buffer, variables, target.replicas, target.slots, before)

    def _put(self, t: Tensor) -> Array:
        # JAX may keep the array that it is given as the device's memory, whatever it is told about aliasing; so it gets
        # one of its own. Host copies change, and donated memory is overwritten.
        v = self._held[t]
        replicas = self._target(t).replicas
        array = to_device(np.array(v.data), v.dtype)
        if t in self._shared:
            return replicas.place(array, replicas.sharding(None))
        if v.replica_grouping.num_groups == 1 and t is v:
            return replicas.put(array)
        parts = parts_of(v).of(array)
        return replicas.place(parts.reshape(replicas.count, *t.shape), replicas.sharding())

    def download(self) -> None:
        """Copy the values of all variables that the program changes from the device to the host."""
        count = len(self._changed)
        if self._changed or self.stored_to:
            self.replicas.meet("Session.weights_to_host")
        taken: list[_Taken] = []
        with self._precision():
            for t, value in zip(self._changed, self._state()[:count], strict=True):
                replicas = self._target(t).replicas
                one_will_do = self._is_one(t) and self._divided is None
                fetched = replicas.fetched_once(value) if one_will_do else replicas.fetched(value)
                taken.append(self._taken_from(self._held[t], fetched))
            for (buffer, vs), slots in zip(self._in_buffers.items(), self._state()[count:], strict=True):
                if vs and buffer in self.stored_to:
                    fetched = self._target(buffer).replicas.fetched(slots)
                    for v, array in remote.parts_in(buffer, vs, fetched).items():
                        taken.append(self._taken_from(v, array))
        uninterrupted(lambda: self._take(taken))  # the host copies of all variables are of one moment

    def _is_one(self, t: Tensor) -> bool:
        """Whether what holds a variable is declared to be the same on all replicas, and its value is asked for once."""
        v = self._held[t]
        return v is t and v.replica_grouping.num_groups == 1 and v.retrieval_mode != "all_replicas"

    def read_here(self, variables: Sequence[Variable]) -> dict[Variable, np.ndarray] | None:
        """Values of variables as the first replica of this process has them. Host copies stay as they are.

        `None`, unless several processes run the program and none but this one is needed for it.
        """
        if self._divided is None:
            return None
        changed = {self._held[t]: (t, array) for t, array in zip(self._changed, self._state(), strict=False)}
        elsewhere = {v for v, (t, _) in changed.items() if not self._is_one(t)}
        elsewhere.update(v for b in self.stored_to for v in self._in_buffers[b])
        if not elsewhere.isdisjoint(variables):
            return None

        def value(v: Variable) -> np.ndarray:
            if v not in changed:
                return v.data
            t, array = changed[v]
            return to_host(self._target(t).replicas.fetched_once(array)[0].reshape(v.shape), v.dtype)

        with self._precision():
            return {v: value(v) for v in variables}

    def _taken_from(self, v: Variable, array: np.ndarray) -> _Taken:
        """What the replicas hold of a variable: its host copy to be, and the values on all replicas if these are
        wanted. Elements that they have no room for are left out."""
        if self.replicas.count == 1 and not v.location_info.isRemote():
            return v, to_host(array, v.dtype).reshape(1, -1), None
        parts, rows = parts_of(v), array.reshape(self.replicas.count, -1)
        values = to_host(parts.values(rows), v.dtype)
        if v.retrieval_mode == "all_replicas" and v.replica_grouping.group_size > 1:
            return v, values, to_host(parts.values(rows, all_replicas=True), v.dtype)
        return v, values, None

    def _take(self, taken: Iterable[_Taken]) -> None:
        """Make what the replicas hold of variables their host copies."""
        for v, values, of_all in taken:
            v.data.reshape(len(values), -1)[:, : values.shape[1]] = values
            if of_all is not None:
                whole = v.data.reshape(len(values), -1)[v.replica_grouping.assignment]
                whole[:, : of_all.shape[1]] = of_all
                self.values_of_all[v] = whole.reshape(-1, *v.shape)

    def release(self) -> None:
        """Free the device memory of the variables."""
        self._changing, self._constant = None, ()
        self.is_loaded = False

    def run(self, feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Run the program once. Returns the arrays of the output streams, still on the device.

        Raises:
            ApplicationRuntimeError: if an op was given numbers that it cannot take. The variables hold what the run
                made of them.
        """
        start = perf_counter()
        state = self._changing if self._changing is not None else self._state()
        if self._divided is not None:
            feeds = tuple(
                self._target(s).replicas.joined(feed, self._shape_of_all(s), self._axis)
                for s, feed in zip(self.inputs, feeds, strict=True)
            )
            self._divided.runs += 1
        results: list[Any] = []
        try:
            if self._quick_for == (*map(type, feeds),):
                # Signals are handled, and may raise, after calls that Python makes, and `state` is given up. So C calls
                # the executable, and no other call comes before what it gives is kept.
                results += starmap(self._quick, ((state, self._constant, feeds),))
                ((self._changing, fetches),) = results
            else:
                fetches = self._call_whole(state, feeds)
        except BaseException:
            if self._changing is state and any(value.is_deleted() for value in state):
                self._changing = None
            raise
        if self._divided is not None:
            checks = [(self._divided.local_count, *FAILURE.shape)] * (len(fetches) - len(self.outputs))
            fetches = tuple(map(self._divided.own, fetches, (*map(self.host_shape, self.outputs), *checks)))
        if self._prints:
            jax.effects_barrier()
        count = len(self.outputs)
        if self._checks:  # in each place, and by each replica
            rows = [row for failure in fetches[count:] for row in np.asarray(failure).reshape(-1, 2).tolist()]
            self._raise_failure(*min((row for row in rows if row[0]), default=(0, 0)))
            fetches = fetches[:count]
        self.runs += 1
        self.run_seconds += perf_counter() - start
        return fetches

    def _call_whole(self, state: tuple[Array, ...], feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Call the executable where that takes steps of Python: JAX has to prepare something, or the host carries out a
        plan. Meanwhile signals wait. Returns what is fetched."""
        if self._by_ops is not None:
            with self._precision():
                self._changing, fetches = self._op_by_op(state, feeds, self._by_ops)
            return fetches
        before = prepared(self._call)
        fetched: list[tuple[Array, ...]] = []

        def call() -> None:
            self._changing, fetches = self._call(state, self._constant, feeds)
            fetched.append(fetches)

        with self._precision():
            uninterrupted(call)
        if before is not None and before == prepared(self._call) and not self._wide:
            (self._quick, _), self._quick_for = before, (*map(type, feeds),)
        return fetched[0]

    def _raise_failure(self, id: int, number: int) -> None:
        """Tell which op was given numbers that it cannot take; nothing, for the id 0."""
        for op in (op for graph in reachable(self._main) for each in graph.ops for op in each.parts if op.id == id):
            required = op.kind.requirements[number]
            text = f"`{op.source.text}` " if op.source.text else ""
            raise ApplicationRuntimeError(
                f"Session.run: in {op!r} of {op.graph.title}, at {text}({op.source}), `{required.operand}` "
                f"{required.message}, and it is not."
            )

    def _state(self) -> tuple[Array, ...]:
        if self._changing is None:
            raise PopxlRuntimeError(
                "Session: the values of the variables on the device were lost when a run failed. Upload the host "
                "copies again with `session.weights_from_host()`."
            )
        return self._changing

    def check_transfers(self) -> None:
        """`PopxlRuntimeError` if one run makes more transfers of a stream than there is room for."""
        if self._excess:
            stream, count = max(self._excess.items(), key=lambda item: item[1])
            raise PopxlRuntimeError(
                f"Session.run: the program makes {count} transfers of {stream} in one run, and `ir.num_host_transfers` "
                f"was {self.transfers} when the session was made. Set it to at least {count} before that."
            )


_Taken = tuple[Variable, np.ndarray, np.ndarray | None]

_taken: WeakSet[Structure] = WeakSet()  # pieces that may have come from a file or cache, whichever program has them

_WIDE = frozenset({dtype.from_name(name) for name in ("int64", "uint64", "float64")})
