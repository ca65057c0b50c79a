"""A compiled Ir: one XLA program for one device, with the state that it keeps there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from popxl.aliasing import reachable, storages, written_tensors
from popxl.dtypes import dtype
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.fp8_utils import to_device, to_host
from popxl.ir import Ir
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensor import Tensor, Variable
from runtime.devices import Device
from runtime.effects import FAILURE, Channels, channels_of, prints, transfers_of
from runtime.lower import Lowering

Array = Any


class Program:
    """An Ir, lowered for a device, and once compiled ready to run: `(variables, feeds) -> (variables, fetches)`.

    Variables that the program changes are donated at each run and replaced by their new values; the others are only
    read. Nothing is fetched before somebody looks at it.

    Args:
        ir: the program.
        device: where it runs.
        keep_calls: compile each graph that is called from several places once; see `runtime.lower`.

    Attributes:
        inputs, outputs: the streams that are loaded from, and stored to, in the order of their ids.
        variables: those that the program uses.
        counts: how many transfers of each stream one run makes.
    """

    def __init__(self, ir: Ir, device: Device, keep_calls: bool = True) -> None:
        main = ir.main_graph
        self.device = device
        self.transfers = ir.num_host_transfers
        channels = channels_of(main)
        self.inputs = tuple(s for s in channels if isinstance(s, HostToDeviceStream))
        self.outputs = tuple(s for s in channels if isinstance(s, DeviceToHostStream))
        self._checks = FAILURE in channels
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
        self._lowering = Lowering(main, ir.options, keep_calls)
        self._main = main
        self._changing: tuple[Array, ...] | None = None
        self._constant: tuple[Array, ...] = ()
        for t in tensors:
            if t.dtype.is_complex:
                raise PopxlError(f"Session: {t!r} is complex, and complex numbers cannot be run; use floats.")
        with self._precision():
            self.lowered = jax.jit(self._step, donate_argnums=0).lower(*self._arguments())

    def compile(self) -> Program:
        """Have XLA compile the program. Returns the program."""
        with self._precision():
            self.executable = self.lowered.compile()
        return self

    # The function ---------------------------------------------------------------------------------------------------

    def _step(self, changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array]) -> Any:
        """One run of the main graph."""
        values: dict[Tensor, Array] = dict(zip((*self._changed, *self._read), (*changing, *constant), strict=True))
        channels = Channels(
            {
                FAILURE: (jnp.asarray(FAILURE.start), 0),
                **{s: (feed.reshape(self.transfers, *s.shape), 0) for s, feed in zip(self.inputs, feeds, strict=True)},
                **{s: (jnp.zeros((self.transfers, *s.shape), s.dtype.as_jax()), 0) for s in self.outputs},
            }
        )
        environment = self._lowering.run(self._main, values, channels)
        fetches = tuple(channels.transfers(s).reshape(self.host_shape(s)) for s in self.outputs)
        if self._checks:
            fetches += (channels.transfers(FAILURE),)
        return tuple(environment.values[v] for v in self._changed), fetches

    def _arguments(self) -> tuple[tuple[Any, ...], ...]:
        sharding = SingleDeviceSharding(self.device.jax_device)

        def spec(shape: tuple[int, ...], dtype: dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype.as_jax(), sharding=sharding)

        return (
            tuple(spec(v.shape, v.dtype) for v in self._changed),
            tuple(spec(v.shape, v.dtype) for v in self._read),
            tuple(spec(self.host_shape(s), s.dtype) for s in self.inputs),
        )

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """JAX drops 64-bit numbers unless it is told to keep them; only programs that have some pay for that."""
        return jax.enable_x64(True) if self._wide else contextlib.nullcontext()

    def host_shape(self, stream: Stream) -> tuple[int, ...]:
        """Shape of the host array of a stream: all transfers of one run, a leading dimension if there are several."""
        return self.leading_dimensions + stream.shape

    @property
    def leading_dimensions(self) -> tuple[int, ...]:
        """The dimensions that host arrays have before those of the stream."""
        return (self.transfers,) if self.transfers > 1 else ()

    # Running --------------------------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Copy the host values of all variables to the device."""
        with self._precision():
            self._changing = tuple(self._put(v) for v in self._changed)
            self._constant = tuple(self._put(v) for v in self._read)

    def _put(self, v: Variable) -> Array:
        # JAX may keep the array that it is given as the device's memory, whatever it is told about aliasing; so it gets
        # one of its own. Host copies change, and donated memory is overwritten.
        return jax.device_put(to_device(np.array(v.data), v.dtype), self.device.jax_device)

    def download(self) -> None:
        """Copy the values of all variables that the program changes from the device to the host."""
        for v, value in zip(self._changed, self._state(), strict=True):
            np.copyto(v.data, to_host(np.asarray(value), v.dtype))

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
            self._raise_failure(*np.asarray(failure).tolist())
        return fetches

    def _raise_failure(self, id: int, number: int) -> None:
        """Tell which op was given numbers that it cannot take; nothing, for the id 0."""
        for op in (op for graph in reachable(self._main) for op in graph.ops if op.id == id):
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
