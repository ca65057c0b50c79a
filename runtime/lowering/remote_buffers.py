"""Remote buffers at work: what the ops that use them do, and how their slots are filled and read by the host.

A buffer is an array with one row for each slot, a value that a program takes and returns like the variables that it
changes. Loads and stores are slices of it.

On an accelerator the array is in the host's memory, and only slots cross; see `runtime.targets.target`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

from popxl.core.aliasing import reachable
from popxl.core.tensor import Constant, Variable
from popxl.errors import PopxlError
from popxl.fp8_utils import in_transit, to_device
from popxl.graph import Graph
from popxl.op import Op
from popxl.ops.remote import remote_load_inplace_kind, remote_load_kind, remote_store_kind
from popxl.remote_buffer import RemoteBuffer
from popxl.values.sharding import parts_of
from runtime.lowering.effects import Channels, arrived, sent
from runtime.lowering.lower import Environment, Lowering, meaning
from runtime.targets.replicas import Replicas

Array = Any


# What the ops do -----------------------------------------------------------------------------------------------------


@meaning(remote_load_kind)
def _load(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> None:
    """Copy a slot to the device."""
    environment.write(op.outputs[0], _slot(op, environment, channels))


@meaning(remote_load_inplace_kind)
def _load_inplace(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> None:
    """Overwrite the tensor with a slot."""
    environment.write(op.inputs[0], _slot(op, environment, channels))


@meaning(remote_store_kind)
def _store(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> None:
    """Overwrite a slot with the tensor."""
    buffer, offset = op.attributes["buffer"], _offset(op, environment)
    slots, value = channels.slots(buffer), sent(environment.read(op.inputs[0]), buffer.tensor_dtype)
    if jax.typeof(slots).memory_space is not jax.memory.Space.Device:
        value = jax.device_put(value, jax.typeof(slots).memory_space)
    channels.set_slots(buffer, lax.dynamic_update_index_in_dim(slots, value, offset, 0))


def _slot(op: Op, environment: Environment, channels: Channels) -> Array:
    buffer = op.attributes["buffer"]
    slots = channels.slots(buffer)
    slot = lax.dynamic_index_in_dim(slots, _offset(op, environment), keepdims=False)
    if jax.typeof(slots).memory_space is not jax.memory.Space.Device:
        slot = jax.device_put(slot, jax.memory.Space.Device)
    return arrived(slot, buffer.tensor_dtype)


def _offset(op: Op, environment: Environment) -> Array:
    """The number of the slot, after what can be checked without running."""
    t, offset = op.inputs
    buffer = op.attributes["buffer"]
    if (t.shape, t.dtype) != (buffer.tensor_shape, buffer.tensor_dtype):
        raise PopxlError(
            f"Session: {op!r} ({op.source}) moves {t!r}, and {buffer!r} has been defined anew since. Make the op after "
            "`set_remote_buffer_info`."
        )
    known = offset.origin
    if isinstance(known, Constant) and not 0 <= int(known.data.item()) < buffer.entries:
        raise PopxlError(
            f"Session: {op!r} ({op.source}) uses slot {known.data.item()} of {buffer!r}, whose last slot is "
            f"{buffer.entries - 1}. Make `entries` larger."
        )
    return environment.read(offset).reshape(())


# Their arrays --------------------------------------------------------------------------------------------------------


def spec(buffer: RemoteBuffer, replicas: Replicas, where: Any) -> Any:
    """The array of a buffer, for lowering: the slots of all replicas. `where` is where it lies."""
    shape, dtype = (buffer.entries, *buffer.tensor_shape), in_transit(buffer.tensor_dtype)
    return jax.ShapeDtypeStruct(replicas.shape(shape), dtype, sharding=where)


# From and to the host ------------------------------------------------------------------------------------------------


def stored_to(main: Graph) -> frozenset[RemoteBuffer]:
    """The buffers that a program changes."""
    parts = (part for graph in reachable(main) for op in graph.ops for part in op.parts)
    return frozenset(part.attributes["buffer"] for part in parts if part.kind is remote_store_kind)


def variables_in(buffer: RemoteBuffer, variables: Iterable[Variable]) -> tuple[Variable, ...]:
    """The variables that fill slots of a buffer. One whose slot is beyond the last is in none."""
    places = ((v, v.location_info) for v in variables)
    return tuple(v for v, place in places if place.buffer is buffer and place.entry < buffer.entries)


def filled(
    buffer: RemoteBuffer, variables: Iterable[Variable], replicas: Replicas, where: Any, before: Array | None
) -> Array:
    """The array of a buffer with the host values of variables in their slots.

    Args:
        buffer: the buffer.
        variables: those that fill slots of it.
        replicas: those that run the program.
        where: where the array is to be.
        before: the array as it is; the slots that no variable fills keep what they have. `None` for zeros.
    """
    variables = tuple(variables)
    if len({v.location_info.entry for v in variables}) == buffer.entries:
        before = None  # nothing of it stays, and fetching it costs
    shape, dtype = (replicas.count, buffer.entries, *buffer.tensor_shape), in_transit(buffer.tensor_dtype)
    slots = np.zeros(shape, dtype) if before is None else np.array(replicas.fetched(before)).reshape(shape)
    for v in variables:
        parts = parts_of(v).of(to_device(np.ascontiguousarray(v.data), v.dtype))
        parts = parts.astype(buffer.tensor_dtype.as_jax()).view(dtype)
        slots[:, v.location_info.entry] = parts.reshape(replicas.count, *buffer.tensor_shape)
    return replicas.place(slots.reshape(replicas.shape(shape[1:])), where)


def parts_in(buffer: RemoteBuffer, variables: Iterable[Variable], slots: np.ndarray) -> dict[Variable, np.ndarray]:
    """For each variable in a buffer, the parts of its values that replicas have in its slot, as rows."""
    fetched = slots.view(buffer.tensor_dtype.as_jax()).reshape(-1, buffer.entries, buffer.slot_nelms)
    return {v: fetched[:, v.location_info.entry].astype(v.dtype.as_jax()) for v in variables}
