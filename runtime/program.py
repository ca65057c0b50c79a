"""A compiled Ir for one device, with the state that it keeps there: as one XLA program, or as a plan of several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl.aliasing import reachable, storages, written_tensors
from popxl.dtypes import dtype
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.fp8_utils import to_device, to_host
from popxl.ir import Ir
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensor import Tensor, Variable
from runtime.devices import Device
from runtime.effects import FAILURE, Channel, Channels, Failure, channels_of, prints, transfers_of
from runtime.lower import Lowering
from runtime.plan import Choice, Plan, Target
from runtime.replicas import Replicas

Array = Any


class Program:
    """An Ir, compiled for a device: `(variables, feeds) -> (variables, fetches)`.

    Variables that the program changes are donated at each run and replaced by their new values; the others are only
    read. Nothing is fetched before somebody looks at it.

    Args:
        ir: the program.
        device: where it runs.

    Attributes:
        replicas: those that run it. On the device, arrays have a leading dimension for them, if there are several.
        inputs, outputs: the streams that are loaded from, and stored to, in the order of their ids.
        variables: those that the program uses.
        counts: how many transfers of each stream one run makes.
        calls: how called graphs are compiled: see the option `calledGraphs`.
        executable: what runs the program: a JAX executable, or a `runtime.plan.Plan`.
        values_of_all: the values of variables on all replicas, as they were when they were last copied to the host.
    """

    def __init__(self, ir: Ir, device: Device) -> None:
        main = ir.main_graph
        self.device = device
        self.replicas = Replicas(ir.instance_replication_factor, device.jax_devices)
        self.transfers = ir.num_host_transfers
        self._channels = channels_of(main)
        self.inputs = tuple(s for s in self._channels if isinstance(s, HostToDeviceStream))
        self.outputs = tuple(s for s in self._channels if isinstance(s, DeviceToHostStream))
        self._checks = FAILURE in self._channels
        used = {s for made_of in storages(main).values() for s in made_of}
        written = written_tensors(main)
        self.variables = tuple(v for v in main.variables if v in used)
        self._changed = tuple(v for v in self.variables if v in written)
        self._read = tuple(v for v in self.variables if v not in written)
        self._prints = prints(main)
        self.counts = transfers_of(main)
        self._excess = {stream: count for stream, count in self.counts.items() if count > self.transfers}
        tensors = [t for graph in reachable(main) for op in graph.ops for t in (*op.inputs, *op.outputs)]
        self._wide = any(t.dtype in _WIDE for t in tensors)
        self._main = main
        self._options = ir.options
        self._changing: tuple[Array, ...] | None = None
        self._constant: tuple[Array, ...] = ()
        self.values_of_all: dict[Variable, np.ndarray] = {}
        for t in tensors:
            if t.dtype.is_complex:
                raise PopxlError(f"Session: {t!r} is complex, and complex numbers cannot be run; use floats.")
        self.calls = ir.options.calledGraphs
        choice = Choice(main) if self.calls == "auto" else Choice(main, smallest=1)
        if self.calls == "auto":
            self.calls = "dispatched" if choice.is_worth_it() else "kept"
        # A variable that no replica changes, and that all share, is there once; a plan knows only one kind of arrays.
        alone = [v for v in self._read if v.replica_grouping.num_groups == 1 and self.calls != "dispatched"]
        self._shared = frozenset(alone if self.replicas.count > 1 else ())
        with self._precision():
            self.executable = self._plan(choice) if self.calls == "dispatched" else self._one_program()

    # The function ---------------------------------------------------------------------------------------------------

    def _one_program(self) -> Any:
        """The whole program as one executable."""
        lowering = Lowering(self._main.ops, self._options, self.calls == "kept", self.replicas)
        own = tuple(v for v in self._read if v not in self._shared)
        shared = tuple(v for v in self._read if v in self._shared)

        def of_one(changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array], others: Any) -> Any:
            """One run of the main graph by one replica."""
            values: dict[Tensor, Array] = dict(
                zip((*self._changed, *own, *shared), (*changing, *constant, *others), strict=True)
            )
            channels = Channels(dict(zip(self._channels, self._begin(feeds), strict=True)))
            environment = lowering.run(self._main.ops, values, channels)
            return tuple(environment.values[v] for v in self._changed), self._end(channels.take(self._channels))

        spread = self.replicas.spread(of_one, shared=True)

        def step(changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array]) -> Any:
            """One run of the main graph by all replicas."""
            known = dict(zip(self._read, constant, strict=True))
            read, others = (tuple(known[v] for v in variables) for variables in (own, shared))
            changed, fetches = spread(changing, read, self._replicas_first(feeds), others)
            return changed, self._transfers_first(fetches)

        changing, constant = (tuple(map(self._of_variable, vs)) for vs in (self._changed, self._read))
        lowered = jax.jit(step, donate_argnums=0).lower(changing, constant, self._feeds())
        self.text: Callable[[], str] = lowered.as_text
        return lowered.compile()

    def _plan(self, choice: Choice) -> Plan:
        """The program as pieces that the host runs one after the other."""

        def of_one(feeds: Sequence[Array]) -> Any:
            return jax.tree.map(jnp.asarray, self._begin(feeds))

        def begin(feeds: Sequence[Array]) -> Any:
            return self.replicas.spread(of_one)(self._replicas_first(feeds))

        def end(states: Sequence[Any]) -> Any:
            return self._transfers_first(self.replicas.spread(self._end)(states))

        started = jax.jit(begin).lower(self._feeds())
        states = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=self.replicas.sharding()), started.out_info
        )
        plan = Plan(
            self._main,
            choice,
            self._changed,
            self._read,
            self._channels,
            Target(self.replicas, self._options, self.transfers, self._wide),
            started.compile(),
            jax.jit(end).lower(states).compile(),
        )
        self.text = plan.text
        return plan

    def _begin(self, feeds: Sequence[Array]) -> tuple[tuple[Array, Any], ...]:
        """The first state of each channel: the array of its transfers, and the number of the next one."""
        given = dict(zip(self.inputs, feeds, strict=True))

        def transfers(channel: Channel) -> Array:
            if isinstance(channel, Failure):
                return jnp.asarray(channel.start)
            shape = (self.transfers, *channel.shape)
            return given[channel].reshape(shape) if channel in given else jnp.zeros(shape, channel.dtype.as_jax())

        return tuple((transfers(channel), 0) for channel in self._channels)

    def _end(self, states: Sequence[tuple[Array, Any]]) -> tuple[Array, ...]:
        """What is fetched: the transfers of the output streams; last, if anything is checked, which check failed."""
        known = {channel: transfers for channel, (transfers, _) in zip(self._channels, states, strict=True)}
        fetches = tuple(known[s] for s in self.outputs)
        return (*fetches, known[FAILURE]) if self._checks else fetches

    def _replicas_first(self, feeds: Sequence[Array]) -> tuple[Array, ...]:
        """Host arrays, whose first dimension is that of the transfers, for the replicas."""
        if self.replicas.count == 1 or self.transfers == 1:
            return tuple(feeds)
        return tuple(jnp.moveaxis(feed, 1, 0) for feed in feeds)

    def _transfers_first(self, fetches: Sequence[Array]) -> tuple[Array, ...]:
        """What the replicas fetched, as host arrays."""
        stored, checks = fetches[: len(self.outputs)], fetches[len(self.outputs) :]
        if self.replicas.count > 1:
            stored = [jnp.moveaxis(fetch, 0, 1) for fetch in stored]
        return (*(fetch.reshape(self.host_shape(s)) for s, fetch in zip(self.outputs, stored, strict=True)), *checks)

    def _feeds(self) -> tuple[Any, ...]:
        sharding = self.replicas.sharding(1 if self.transfers > 1 else 0)
        return tuple(jax.ShapeDtypeStruct(self.host_shape(s), s.dtype.as_jax(), sharding=sharding) for s in self.inputs)

    def _of_variable(self, v: Variable) -> Any:
        if v in self._shared:
            return jax.ShapeDtypeStruct(v.shape, v.dtype.as_jax(), sharding=self.replicas.sharding(None))
        return self.replicas.spec(v.shape, v.dtype.as_jax())

    def temporaries(self) -> int:
        """Bytes of device memory that one run needs, besides the variables and the streams."""
        if isinstance(self.executable, Plan):
            return self.executable.temporaries()
        return self.executable.memory_analysis().temp_size_in_bytes

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """JAX drops 64-bit numbers unless it is told to keep them; only programs that have some pay for that."""
        return jax.enable_x64(True) if self._wide else contextlib.nullcontext()

    def host_shape(self, stream: Stream) -> tuple[int, ...]:
        """Shape of the host array of a stream: all transfers of all replicas; dimensions for what there are several."""
        return self.leading_dimensions + stream.shape

    @property
    def leading_dimensions(self) -> tuple[int, ...]:
        """The dimensions that host arrays have before those of the stream."""
        return tuple(count for count in (self.transfers, self.replicas.count) if count > 1)

    # Running --------------------------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Copy the host values of all variables to the device."""
        with self._precision():
            self._changing = tuple(self._put(v) for v in self._changed)
            self._constant = tuple(self._put(v) for v in self._read)

    def _put(self, v: Variable) -> Array:
        # JAX may keep the array that it is given as the device's memory, whatever it is told about aliasing; so it gets
        # one of its own. Host copies change, and donated memory is overwritten.
        array = to_device(np.array(v.data), v.dtype)
        if v in self._shared:
            return jax.device_put(array, self.replicas.sharding(None))
        if v.replica_grouping.num_groups == 1:
            return self.replicas.put(array)
        return jax.device_put(array[np.asarray(v.replica_grouping.assignment)], self.replicas.sharding())

    def download(self) -> None:
        """Copy the values of all variables that the program changes from the device to the host."""
        for v, value in zip(self._changed, self._state(), strict=True):
            array = to_host(np.asarray(value), v.dtype)
            if self.replicas.count > 1:
                self.values_of_all[v] = array
                firsts = [v.replica_grouping.assignment.index(k) for k in range(v.replica_grouping.num_groups)]
                array = array[firsts if len(firsts) > 1 else 0]
            np.copyto(v.data, array)

    def release(self) -> None:
        """Free the device memory of the variables."""
        self._changing, self._constant = None, ()

    def run(self, feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Run the program once. Returns the arrays of the output streams, still on the device.

        Raises:
            ApplicationRuntimeError: if an op was given numbers that it cannot take. The variables hold what the run
                made of them.
        """
        state = self._state()
        try:
            if self._wide:
                with self._precision():
                    self._changing, fetches = self.executable(state, self._constant, feeds)
            else:
                self._changing, fetches = self.executable(state, self._constant, feeds)
        except BaseException:
            if any(value.is_deleted() for value in state):
                self._changing = None
            raise
        if self._prints:
            jax.effects_barrier()
        if self._checks:
            *fetches, failure = fetches
            for id, number in np.asarray(failure).reshape(-1, 2).tolist():
                self._raise_failure(id, number)
        return fetches

    def _raise_failure(self, id: int, number: int) -> None:
        """Tell which op was given numbers that it cannot take; nothing, for the id 0."""
        for op in (op for graph in reachable(self._main) for each in graph.ops for op in each.parts if op.id == id):
            name, required = list(op.kind.requires.items())[number]
            text = f"`{op.source.text}` " if op.source.text else ""
            raise ApplicationRuntimeError(
                f"Session.run: in {op!r} of {op.graph.title}, at {text}({op.source}), `{name}` {required.message}, and "
                "it is not."
            )

    def _state(self) -> tuple[Array, ...]:
        if self._changing is None:
            raise PopxlError(
                "Session: the values of the variables on the device were lost when a run failed. Upload the host "
                "copies again with `session.weights_from_host()`."
            )
        return self._changing

    def check_transfers(self) -> None:
        """`PopxlError` if one run makes more transfers of a stream than there is room for."""
        if self._excess:
            stream, count = max(self._excess.items(), key=lambda item: item[1])
            raise PopxlError(
                f"Session.run: the program makes {count} transfers of {stream} in one run, and `ir.num_host_transfers` "
                f"was {self.transfers} when the session was made. Set it to at least {count} before that."
            )


_WIDE = frozenset({dtype.from_name(name) for name in ("int64", "uint64", "float64")})
