"""Remote buffers: lowering of the ops that use them, and transfers of their slots from and to the host.

A buffer is an array with one row for each slot, which a program takes and returns like the variables that it changes.
Loads and stores are slices of it.

On an accelerator the array is in host memory, and only slots are transferred; see `CompileTarget.on_host`. Slots are
padded to whole blocks there, the tiles of TPU arrays: TPUs do not slice within a block, and fetch a whole buffer if
they choose another layout for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint

from popxl.base.arrays import Array
from popxl.core.aliasing import lowered_ops
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import is_call
from popxl.errors import PopxlError, PopxlInternalError, PopxlRuntimeError
from popxl.fp8_utils import in_transit
from popxl.graph import Graph
from popxl.ops.remote import remote_load_inplace_kind, remote_load_kind, remote_store_kind
from popxl.remote_buffer import RemoteBuffer
from runtime.lowering.channels import decode_transfer, encode_transfer
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment
from runtime.lowering.lower import Lowering
from runtime.lowering.registry import register_lowering
from runtime.targets.compile_target import HOST
from runtime.targets.replicas import Replicas, is_on_host

BLOCK = (8, 128)
"""Rows, and numbers in each. A TPU keeps arrays in blocks of these."""


# Lowering of ops ------------------------------------------------------------------------------------------------------


@register_lowering(remote_load_kind)
@register_lowering(remote_load_inplace_kind)
def _load(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Load a slot to a new tensor, or in place."""
    target = op.inputs[0] if op.modified else op.outputs[0]
    environment.write(target, _slot(lowering, op, environment, context))


@register_lowering(remote_store_kind)
def _store(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Store a tensor to a slot."""
    channels = context.channels
    buffer, offset = op.attributes["buffer"], _offset(op, environment)
    if is_on_host(channels.slots(buffer)):
        channels.order_store()
    slots, value = channels.slots(buffer), encode_transfer(environment.value_of(op.inputs[0]), buffer.tensor_dtype)
    slot_shape = slots.shape[1:]
    if slot_shape != value.shape:  # padded to whole blocks
        value = jnp.pad(value.reshape(-1), (0, math.prod(slot_shape) - value.size)).reshape(slot_shape)
    if not is_on_host(slots):
        channels.set_slots(buffer, _replace_slot(slots, value, offset))
        return
    if channels.running is not None:  # a branch that is not taken stores the old content
        value = jnp.where(channels.running, value, _from_host(lowering, slots, offset))
    value = channels.after_fetches(buffer, value, those_read=context.iterations > 1)
    channels.set_slots(buffer, _to_host(lowering, slots, value, offset))


def _slot(lowering: Lowering, op: Op, environment: Environment, context: Context) -> Array:
    buffer, channels = op.attributes["buffer"], context.channels
    offset = _offset(op, environment)
    if is_on_host(channels.slots(buffer)):
        channels.order_fetch(environment)
        slot = _from_host(lowering, channels.slots(buffer), offset)
        channels.record_fetched(buffer, slot)
    else:
        slot = lax.dynamic_index_in_dim(channels.slots(buffer), offset, keepdims=False)
    if slot.shape != buffer.tensor_shape:  # padded to whole blocks
        slot = slot.reshape(-1)[: buffer.slot_nelms].reshape(buffer.tensor_shape)
    return decode_transfer(slot, buffer.tensor_dtype)


def _offset(op: Op, environment: Environment) -> Array:
    """The slot number; checks shape, dtype and constant slot numbers."""
    t, offset = op.inputs
    buffer = op.attributes["buffer"]
    if (t.shape, t.dtype) != (buffer.tensor_shape, buffer.tensor_dtype):
        raise PopxlError(
            f"Session: {op!r} ({op.source}) moves {t!r}, and {buffer!r} has been defined anew since. Make the op after "
            "`set_remote_buffer_info`."
        )
    for number, caller in _known_numbers(offset, op):
        if not 0 <= number < buffer.entries:
            raise PopxlError(f"Session: {_beyond(op, caller, number, buffer)} Make `entries` larger.")
    array = environment.value_of(offset).reshape(())
    if not isinstance(array, jax.core.Tracer) and not 0 <= int(array) < buffer.entries:  # in the debugger
        raise PopxlRuntimeError(f"Session.run: {_beyond(op, op, int(array), buffer)} It would get the last one.")
    return array


def _beyond(op: Op, caller: Op, number: int, buffer: RemoteBuffer) -> str:
    return f"{op!r} ({caller.source}) uses slot {number} of {buffer!r}, whose last slot is {buffer.entries - 1}."


def _known_numbers(t: Tensor, user: Op) -> Iterator[tuple[int, Op]]:
    """Constant values of a slot number, followed through call sites, with the op that passes each."""
    visited, todo = set(), [(t.origin, user)]
    while todo:
        t, caller = todo.pop()
        if isinstance(t, Constant):
            yield int(t.data.item()), caller
        elif t not in visited and t in t.graph.inputs:
            visited.add(t)
            from_the_end = t.graph.inputs.index(t) - len(t.graph.inputs)
            todo += [(site.inputs[from_the_end].origin, site) for site in t.graph.call_sites if is_call(site)]


_replace_slot = partial(lax.dynamic_update_index_in_dim, axis=0)
"""Array of slots with one slot replaced."""


# For several replicas on one device, with buffers in host memory: each replica's slot is a separate slice. JAX would
# gather and scatter them together, which XLA supports in device memory only.


def _from_host(lowering: Lowering, slots: Array, offset: Array) -> Array:
    """Fetch a slot from host memory."""
    if not _splits_slots(lowering, slots):
        return _fetch_slot(slots, offset)
    halves = slots.reshape(2, -1, *BLOCK)
    return jnp.concatenate([_fetch_slot(halves, jnp.int32(i)) for i in range(2)])


def _to_host(lowering: Lowering, slots: Array, value: Array, offset: Array) -> Array:
    """Store a device value to a slot in host memory."""
    if not _splits_slots(lowering, slots):
        return _store_slot(slots, value, offset)
    halves = slots.reshape(2, -1, *BLOCK)
    for i, half in enumerate(jnp.split(value, 2)):
        halves = _store_slot(halves, half, jnp.int32(i))
    return halves.reshape(slots.shape)


def _splits_slots(lowering: Lowering, slots: Array) -> bool:
    """Whether slots are moved in halves: single-slot buffers on TPUs.

    XLA (libtpu 0.0.52) identifies such a slot with the buffer: it considers a buffer behind a barrier to be off the
    host, and also keeps stored values on the device until they are loaded.
    """
    return lowering.replicas.platform == "tpu" and len(slots) == 1


@custom_vmap
def _fetch_slot(slots: Array, offset: Array) -> Array:
    """Fetch one of several slots to device memory.

    Another shape is given to it there: XLA makes one reshape of two, and takes the first and only slot for the buffer.
    """
    slot = jax.device_put(lax.dynamic_index_in_dim(slots, offset), jax.memory.Space.Device)
    return _row_major(slot).reshape(slots.shape[1:])


@_fetch_slot.def_vmap
def _(count: int, given: Sequence[bool], slots: Array, *rest: Array) -> tuple[Array, bool]:
    rows, (offsets,) = _flatten_replicas(count, given, slots, *rest)
    return jnp.stack([_fetch_slot(rows, offset) for offset in offsets]), True


@custom_vmap
def _store_slot(slots: Array, value: Array, offset: Array) -> Array:
    """Store a device value to one of several slots in host memory."""
    return _replace_slot(slots, jax.device_put(_row_major(value), jax.memory.Space.Host), offset)


def _row_major(value: Array) -> Array:
    """Constrain a device value to row-major layout, as in host memory.

    If a product prefers another layout, its operand is transposed after the transfer. Without this constraint, XLA lays
    out the whole buffer that way; if another loop needs row-major order, the buffer is fetched, transposed and sent
    back.
    """
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


@_store_slot.def_vmap
def _(count: int, given: Sequence[bool], slots: Array, *rest: Array) -> tuple[Array, bool]:
    rows, (values, offsets) = _flatten_replicas(count, given, slots, *rest)
    for value, offset in zip(values, offsets, strict=True):
        rows = _store_slot(rows, value, offset)
    return rows.reshape(slots.shape), True


def _flatten_replicas(count: int, is_batched: Sequence[bool], slots: Array, *rest: Array) -> tuple[Array, list[Array]]:
    """Flatten slots of all replicas to one dimension, because TPUs slice one dimension only. Returns them with the
    other operands; slot numbers, last, count all replicas' slots."""
    slots_are_batched, *others = is_batched
    assert slots_are_batched, "each replica has slots of its own"
    *values, offsets = (
        x if each else jnp.broadcast_to(x, (count, *x.shape)) for x, each in zip(rest, others, strict=True)
    )
    first = jnp.arange(count, dtype=offsets.dtype) * slots.shape[1]
    last = jnp.asarray(slots.shape[1] - 1, offsets.dtype)
    return slots.reshape(-1, *slots.shape[2:]), [*values, first + jnp.clip(offsets, 0, last)]


# Where they are ------------------------------------------------------------------------------------------------------


def buffer_text(buffer: RemoteBuffer, main: Graph) -> str:
    """Describe a buffer for errors: its variables, and its first user's source line."""
    users = (op for op in lowered_ops(main.ops) if op.attributes.get("buffer") is buffer)
    used = next((f" ({op!r}, {op.source})" for op in users), "")
    variables = ", ".join(repr(v.name) for v in variables_in(buffer, main.variables))
    return f"{f'the remote variables {variables} in ' if variables else ''}{buffer!r}{used}"


def check_width(buffers: Iterable[RemoteBuffer], main: Graph) -> None:
    """Raise `PopxlError` for 64-bit buffers: the TPU compiler (libtpu 0.0.42) crashes on their transfers."""
    for buffer in buffers:
        if buffer.tensor_dtype.is_wide:
            raise PopxlError(
                f"Session: {buffer_text(buffer, main)} has numbers of 64 bits, which a TPU cannot move to and from the "
                "host's memory. Use 32 bits, or keep buffers in the device's memory: "
                "`ir.options.remoteBuffers = 'device'`."
            )


def check_places(text: str, results: Sequence[RemoteBuffer | None], main: Graph) -> None:
    """Check the memory space of buffers in a compiled executable with host-resident buffers.

    Args:
        text: the HLO of the executable.
        results: buffer of each result; `None` if the result is not a buffer.
        main: the graph that the program runs.

    Raises:
        PopxlError: if a buffer is in the memory of the device, or anything else in that of the host.
    """
    match = _PLACES.search(text)
    if match is None:
        raise PopxlInternalError("remote buffers: the HLO of an executable does not say where its arguments are.")
    read, stored = (["S(5)" in each for each in _TYPE.findall(memory_types)] for memory_types in match.group(1, 2))
    stored = stored[len(stored) - len(results) :]  # tokens come first
    lost = [b for b, on_host in zip(results, stored, strict=True) if b is not None and not on_host]
    count = sum(b is not None for b in results)
    if not lost and sum(stored) == sum(read) == count:
        return
    wanted = lost or [b for b in results if b is not None]
    raise PopxlError(
        f"Session: XLA has not put what is to be remote into the host's memory, and nothing else: "
        f"{'; '.join(buffer_text(b, main) for b in wanted)}. Of {count} buffers, {sum(read)} are read from there and "
        f"{sum(stored)} written. `ir.options.remoteBuffers = 'device'` keeps them in the device's memory."
    )


_PLACES = re.compile(r"entry_computation_layout=\{\((.*?)\)->(.*?)\}(?:, \w+=|\n|$)")
_TYPE = re.compile(r"\w+\[[^\]]*\](?:\{[^}]*\})?")


# Their arrays --------------------------------------------------------------------------------------------------------


def spec(buffer: RemoteBuffer, replicas: Replicas, sharding: Any) -> Any:
    """The array type of a buffer with all replicas' slots; `sharding` is its sharding."""
    return jax.ShapeDtypeStruct(_shape(buffer, replicas, sharding), in_transit(buffer.tensor_dtype), sharding=sharding)


def _shape(buffer: RemoteBuffer, replicas: Replicas, sharding: Any) -> tuple[int, ...]:
    """The array shape of a buffer; see `runtime.targets.replicas`."""
    if sharding.memory_kind != HOST:
        return replicas.shape((buffer.entries, *buffer.tensor_shape))
    pieces_per_slot = 2 if buffer.entries == 1 else 1  # see `_splits_slots`
    blocks = pieces_per_slot * max(1, -(-buffer.slot_nelms // (pieces_per_slot * math.prod(BLOCK))))
    return (replicas.count * buffer.entries, blocks, *BLOCK)


# From and to the host ------------------------------------------------------------------------------------------------


def stored_to(main: Graph) -> frozenset[RemoteBuffer]:
    """Buffers that a program modifies."""
    return frozenset(op.attributes["buffer"] for op in lowered_ops(main.ops) if op.kind is remote_store_kind)


def variables_in(buffer: RemoteBuffer, variables: Iterable[Variable]) -> tuple[Variable, ...]:
    """Variables stored in a buffer, without those beyond its last slot."""
    locations = ((v, v.location_info) for v in variables)
    return tuple(v for v, location in locations if location.buffer is buffer and location.entry < buffer.entries)


def fill_buffer(
    buffer: RemoteBuffer,
    rows: Mapping[Variable, Callable[[int], np.ndarray]],
    replicas: Replicas,
    sharding: Any,
    before: Array | None,
) -> Array:
    """Build a buffer's array with variables in their slots.

    Args:
        rows: variables in slots of the buffer, each with a function that returns a replica's elements.
        before: current array, for slots without a variable. `None` for zeros.
    """
    if len({v.location_info.entry for v in rows}) == buffer.entries:
        before = None  # nothing of it stays, and fetching it costs
    shape, dtype = _shape(buffer, replicas, sharding), in_transit(buffer.tensor_dtype)

    def fill(slots: np.ndarray, replica: int) -> np.ndarray:
        for v, row in rows.items():
            content = row(replica).astype(buffer.tensor_dtype.as_jax()).view(dtype)
            slots[v.location_info.entry, : buffer.slot_nelms] = content
        return slots

    count, size = replicas.count, math.prod(shape)
    if before is None and replicas.mesh is not None:  # parts of other processes are not computed
        empty = (buffer.entries, size // count // buffer.entries)
        return replicas.build_array(shape, lambda replica: fill(np.zeros(empty, dtype), replica), sharding)
    array = np.zeros(shape, dtype) if before is None else np.array(replicas.fetched(before))
    slots = array.reshape(count, buffer.entries, -1)  # a view of the same numbers
    for replica in range(count):
        fill(slots[replica], replica)
    return replicas.transfer(array, sharding)


def rows_of_slots(
    buffer: RemoteBuffer, variables: Iterable[Variable], slots: np.ndarray, count: int
) -> dict[Variable, np.ndarray]:
    """Per variable, rows of host slots of `count` replicas."""
    rows = slots.view(buffer.tensor_dtype.as_jax()).reshape(count, buffer.entries, -1)[:, :, : buffer.slot_nelms]
    return {v: rows[:, v.location_info.entry].astype(v.dtype.as_jax()) for v in variables}
