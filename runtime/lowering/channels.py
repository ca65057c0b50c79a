"""Channels: streams, remote buffers, the failure flag and the token of collectives, as values.

A stream is an array with all transfers of one run, and the index of the next one; a graph that uses it takes both as
inputs and returns both. The index is static during tracing, unless a loop or a noinline call comes between; loads and
stores are plain slices then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.base.arrays import Array
from popxl.core.aliasing import lowered_ops
from popxl.core.recording import Op
from popxl.core.rounding import rounds
from popxl.dtypes import dtype as dtype_
from popxl.fp8_utils import in_transit
from popxl.graph import Graph
from popxl.ops.host import print_tensor_kind
from popxl.ops.kernels.words import fold_in
from popxl.ops.remote import remote_store_kind
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import HostToDeviceStream, Stream
from runtime.fake_dependency import computed_after
from runtime.lowering.collective_order import after_token, next_token
from runtime.lowering.environment import Environment
from runtime.targets.replicas import is_on_host

Position = int | Array


class Failure:
    """The channel of runtime checks: its array holds op id and check number of the first failure."""

    tensor_id = ""
    shape = (2,)
    start = np.zeros(shape, np.int32)  # ids of ops start above 0


class CollectiveOrder:
    """The channel of the token that orders collectives; `Lowering.channels_of` adds it where needed."""


FAILURE = Failure()
TRANSFERS = 1  # in place of an op's id, which is 100 or more; the number after it is that of a stream
COLLECTIVES = CollectiveOrder()
Channel = Stream | Failure | RemoteBuffer
AnyChannel = Channel | CollectiveOrder
State = tuple[Array, Position]


class Channels:
    """Channels of a computation: per stream, an array of transfers, and an index of the next one.

    A remote buffer has the array of its slots, which are indexed by number. The order of collectives has the token of
    collectives before this computation, if any.

    Attributes:
        running: the mask of the current branch; `None` outside of vmapped branches. Replicas on one device run both
            branches, and select results by the mask.
        before_last_call: the last result before the call that preceded the current one, of those that prefetch;
            prefetches wait for it. `None` if there is none.
    """

    def __init__(self, channels: Mapping[Any, State], running: Array | None = None) -> None:
        self._channels: dict[AnyChannel, State] = dict(channels)
        self.running = running
        self._exchanged: list[Array] = []  # by the collectives that the token does not know yet
        self._computed: Array | None = None  # last
        self._fetched: dict[RemoteBuffer, list[tuple[Array, Array | None]]] = {}  # since the last store
        self._slots_before = self._slots()  # when one was last fetched, or all began
        self._computed_before = self._computed
        self._later_slots: dict[RemoteBuffer, Array] = {}  # for fetches after the next result
        self.before_last_call: Array | None = None
        self._before_call: Array | None = None  # computed last before the current call

    # Streams, and the failure flag ----------------------------------------------------------------------------------

    def load(self, stream: Stream) -> Array:
        """Load the next element of a stream."""
        transfers, position = self._channels[stream]
        self._channels[stream] = (transfers, position + 1)
        if isinstance(position, int):
            return decode_transfer(transfers[min(position, transfers.shape[0] - 1)], stream.dtype)
        return decode_transfer(lax.dynamic_index_in_dim(transfers, position, keepdims=False), stream.dtype)

    def rounding_seed(self, op: Op) -> Array | None:
        """Seed for one execution of a stochastically rounding op; `None` for other ops."""
        key = op.graph.ir.rounding_key
        if key not in self._channels or not rounds(op):
            return None
        transfers, position = self._channels[key]
        self._channels[key] = (transfers, position + 1)
        return fold_in(transfers[0], position)

    def store(self, stream: Stream, value: Array) -> None:
        """Store a value as the next element of a stream."""
        transfers, position = self._channels[stream]
        value = encode_transfer(value, stream.dtype)
        if isinstance(position, int) and transfers.shape[0] == 1:
            transfers = value[None]
        else:
            transfers = lax.dynamic_update_index_in_dim(transfers, value, position, 0)
        self._channels[stream] = (transfers, position + 1)

    def transfers(self, stream: Channel) -> Array:
        """Transfers of a stream: all of its elements."""
        return self._channels[stream][0]

    def results(self) -> list[Array]:
        """Fetched arrays: output streams, and the failure flag."""
        kept = HostToDeviceStream | RemoteBuffer | CollectiveOrder
        return [transfers for c, (transfers, _) in self._channels.items() if not isinstance(c, kept)]

    def count(self, stream: Channel) -> Position:
        """Number of transfers of a stream so far."""
        return self._channels[stream][1]

    def check_count(self, number: int, count: Position, capacity: int) -> None:
        """Record at the end of a run whether the transfers of the stream with this number exceeded its capacity."""
        self.record_failure(TRANSFERS, number, count <= capacity)

    def record_failure(self, id: int, number: int, holds: Any) -> None:
        """Record a failed check of the op with this id, unless another check failed before."""
        first, position = self._channels[FAILURE]
        this = jnp.asarray([id, number], jnp.int32)
        self._channels[FAILURE] = (jnp.where(jnp.all(holds) | (first[0] > 0), first, this), position)

    # Slots of remote buffers, and the order of their copies ---------------------------------------------------------

    def slots(self, buffer: RemoteBuffer) -> Array:
        """The slots of a remote buffer."""
        return self._channels[buffer][0]

    def set_slots(self, buffer: RemoteBuffer, slots: Array) -> None:
        """Replace the slots of a remote buffer."""
        self._channels[buffer] = (slots, 0)

    def order_fetch(self, environment: Environment) -> None:
        """Order the next fetch from remote buffers after all stores; without stores, after the results before the last
        fetch, so that transfer and computation overlap.

        XLA orders only computations that depend on each other. It would fetch slots at the start of a run, keep them on
        the device until they are needed, and merge two loads of a slot. So the buffers pass a barrier together.

        Fetches after the next result wait for the last one. Both pass a barrier now, while ops are still to read that
        result: XLA drops results of a barrier that nothing reads, and the order with them.

        Args:
            environment: the environment of the fetch, where later ops read the last result as the barrier returns it.
        """
        if self._has_stored():
            self._pass_barrier()
        elif self._computed is not None and self._computed is not self._computed_before:
            self._replace_slots(self._later_slots)
            slots = self._slots()
            *later, computed = lax.optimization_barrier((*slots.values(), self._computed))
            self._later_slots = dict(zip(slots, later, strict=True))
            environment.replace_value(self._computed, computed)
            self._computed = computed
        self._computed_before = self._computed

    def order_store(self) -> None:
        """Order the next store to remote buffers after earlier stores, if other results were computed since.

        XLA would let all of it be under way until it is needed, and keep it on the device meanwhile. Slots that passed
        a barrier for later fetches are stored to: XLA copies a whole buffer that is changed beside them.
        """
        if not self._has_stored():
            self._replace_slots(self._later_slots)
        elif self._computed is not self._computed_before:
            self._pass_barrier()
        self._computed_before = self._computed

    def record_fetched(self, buffer: RemoteBuffer, slot: Array) -> None:
        """Record a slot of a remote buffer that was fetched to the device."""
        self._fetched.setdefault(buffer, []).append((slot, self._computed))

    def after_fetches(self, buffer: RemoteBuffer, value: Array, those_read: bool) -> Array:
        """Make a value for a remote buffer depend on the slots that were fetched from there since the last store.

        XLA for GPUs may postpone a fetch beyond the store, and then copies the whole buffer for it.

        Args:
            buffer, value: what is stored, and where.
            those_read: whether to include slots that ops have read since; the value would hold a whole model otherwise.
        """
        fetched = self._fetched.pop(buffer, ())
        return computed_after(value, [slot for slot, before in fetched if those_read or before is self._computed])

    def _has_stored(self) -> bool:
        """Whether any slot was stored since the last barrier."""
        return any(array is not self._slots_before[buffer] for buffer, array in self._slots().items())

    def _pass_barrier(self) -> None:
        """Order slots of all buffers after previous stores to any buffer.

        XLA drops no stores from the barrier: the slots of a buffer that has stores are a result of the program.
        """
        slots = self._slots()
        self._replace_slots(dict(zip(slots, lax.optimization_barrier([*slots.values()]), strict=True)))

    def _replace_slots(self, slots: Mapping[RemoteBuffer, Array]) -> None:
        """Continue with equal slots, which become available later."""
        for buffer, array in slots.items():
            self.set_slots(buffer, array)
        self._slots_before, self._later_slots = self._slots(), {}

    def _slots(self) -> dict[RemoteBuffer, Array]:
        """The slots of all remote buffers."""
        return {c: slots for c, (slots, _) in self._channels.items() if isinstance(c, RemoteBuffer)}

    # Results that copies wait for -----------------------------------------------------------------------------------

    def record_computed(self, computed: Any) -> None:
        """Record the last result: real numbers, because integers may be slot numbers."""
        arrays = jax.tree.leaves(computed)
        self._computed = next((a for a in arrays if jnp.issubdtype(jnp.result_type(a), jnp.floating)), self._computed)

    def enter_call(self) -> None:
        """Record that a call begins that prefetches."""
        self.before_last_call = self._before_call
        if self._computed is not None and not is_on_host(self._computed):
            self._before_call = self._computed

    # Order of collectives -------------------------------------------------------------------------------------------

    def ordered(self, operand: Array) -> Array:
        """Make a collective's operand depend on all collectives before this computation."""
        token, _ = self._channels.get(COLLECTIVES, (None, None))
        return operand if token is None else after_token(operand, token)

    def record_exchanged(self, results: Any) -> None:
        """Record the results of a collective, for the token of later computations."""
        self._exchanged += jax.tree.leaves(results)

    def _advance_token(self) -> None:
        """Advance the token: make it depend on all collectives so far."""
        token, _ = self._channels.get(COLLECTIVES, (None, None))
        token = next_token(token, self._exchanged)
        self._channels[COLLECTIVES], self._exchanged = (token, None), []

    # Into and out of called graphs, loops and branches --------------------------------------------------------------

    def states(self, used: Sequence[AnyChannel]) -> tuple[State, ...]:
        """Channel states as graph inputs."""
        if COLLECTIVES in used:
            self._advance_token()
        return tuple(self._channels[channel] for channel in used)

    def set_states(self, used: Sequence[AnyChannel], states: Sequence[State]) -> None:
        """Set the states of some channels, given by a graph's results."""
        self._channels.update(zip(used, states, strict=True))

    def loop_channels(self, used: Sequence[AnyChannel]) -> LoopChannels:
        """Split some channels into loop-invariant and loop-carried state."""
        return LoopChannels(self, used)

    def carried(self, used: Sequence[AnyChannel]) -> dict[int, Any]:
        """The loop-carried state of some channels, by their positions in `used`.

        It is the index of the next transfer; of an output stream or the failure flag, also the array; the slots of a
        remote buffer; the token of collectives.
        """
        states = zip(used, self.states(used), strict=True)
        return {i: _carried_state(channel, *state) for i, (channel, state) in enumerate(states)}

    def set_carried(self, used: Sequence[AnyChannel], carried: dict[int, Any]) -> None:
        """Set the loop-carried state of some channels."""
        for i, channel in enumerate(used):
            if isinstance(channel, HostToDeviceStream):
                self._channels[channel] = (self._channels[channel][0], carried[i])
            elif isinstance(channel, RemoteBuffer):
                self.set_slots(channel, carried[i])
            elif isinstance(channel, CollectiveOrder):
                self._channels[channel] = (carried[i], None)
            else:
                self._channels[channel] = carried[i]
        self._slots_before, self._later_slots = self._slots(), {}

    def resume(self, loop_channels: LoopChannels, carried: dict[int, Any], computed: Any) -> None:
        """Continue after a loop or branch: take over its channel states, and record its results."""
        self._channels.update(loop_channels.in_iteration(carried)._channels)
        self.record_computed(computed)


def encode_transfer(value: Array, dtype: dtype_) -> Array:
    """Encode a tensor for streams and remote buffers."""
    return lax.bitcast_convert_type(value, in_transit(dtype)) if dtype.is_float8 else value


def decode_transfer(value: Array, dtype: dtype_) -> Array:
    """Decode a tensor from streams and remote buffers; inverse of `encode_transfer`."""
    return lax.bitcast_convert_type(value, dtype.as_jax()) if dtype.is_float8 else value


def _carried_state(channel: AnyChannel, array: Array, position: Position) -> Any:
    if isinstance(channel, HostToDeviceStream):
        return position
    return array if isinstance(channel, RemoteBuffer | CollectiveOrder) else (array, position)


class LoopChannels:
    """Channels of a loop: input streams stay outside; other state is loop-carried."""

    def __init__(self, channels: Channels, used: Sequence[AnyChannel]) -> None:
        self._used = used
        self._running = channels.running
        self._arrays = [transfers for transfers, _ in channels.states(used)]
        self.start = jax.tree.map(jnp.asarray, channels.carried(used))

    def in_iteration(self, carried: dict[int, Any]) -> Channels:
        """The channels of one iteration, given the loop-carried state."""
        states = {channel: (array, 0) for channel, array in zip(self._used, self._arrays, strict=True)}
        channels = Channels(states, self._running)
        channels.set_carried(self._used, carried)
        return channels


def channels_of(*graphs: Graph) -> tuple[Channel, ...]:
    """The channels that graphs use, including called graphs, in a fixed order; with the failure flag, if any op has
    checks."""
    return channels_of_ops(op for graph in graphs for op in graph.ops)


def channels_of_ops(ops: Iterable[Op]) -> tuple[Channel, ...]:
    """The channels that ops use; see `channels_of`."""
    ops = tuple(lowered_ops([*ops]))
    things = (op.attributes.get(op.kind.exchange) for op in ops)
    used: set[Channel] = {thing for thing in things if isinstance(thing, Stream | RemoteBuffer)}
    if any(op.kind.requirements for op in ops):
        used.add(FAILURE)
    used.update(op.graph.ir.rounding_key for op in ops if rounds(op))
    return tuple(sorted(used, key=_order))


def _order(channel: Channel) -> tuple[bool, Any]:
    """Sort key: streams by id, then buffers by number."""
    if isinstance(channel, RemoteBuffer):
        return (True, channel.remote_buffer_id)
    return (False, channel.tensor_id)


def prints(graph: Graph) -> bool:
    """Whether a graph prints, including called graphs."""
    return any(op.kind is print_tensor_kind for op in lowered_ops(graph.ops))


def has_side_effects(graph: Graph) -> bool:
    """Whether a graph prints or stores to remote buffers, including called graphs."""
    return any(op.kind in (print_tensor_kind, remote_store_kind) for op in lowered_ops(graph.ops))
