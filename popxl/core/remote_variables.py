"""Variables in remote buffer slots, and variables that are sharded across replicas.

For a session they are variables like any other: it reads and writes their values. A program does not use the variable
itself: it loads from the slot and stores to it, or works with the shard. Division of values into shards is in
`popxl.values.sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from popxl.base.arguments import check_type
from popxl.context import get_current_context
from popxl.core.create import variable
from popxl.core.tensor import HostScalarTensor, Tensor, Variable
from popxl.dtypes import dtype as dtype_
from popxl.initial import Initial
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import Groups, sharing_of
from popxl.tensorlocation import LocationInfo
from popxl.values.shapes import integer, integers
from popxl.values.sharding import shard_length

RetrievalMode = Literal["one_per_group", "all_replicas"]


def remote_variable(
    data: HostScalarTensor | Initial,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtype_ | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: Groups | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """Create a main-graph variable stored in a remote buffer slot.

    Copying host values to the device fills the slot; copying back reads it. Programs load from the slot and store to
    it, with `ops.remote_load` and `ops.remote_store`, and do not use the variable itself.

    The variable and the slot are not checked against each other. If their shapes differ, elements are copied in order,
    up to the smaller size; an `offset` outside of the buffer is ignored. A session warns of different sizes, of such an
    `offset`, and of variables that share a slot: see `popxl.errors.RemoteSlotWarning`.

    Args:
        data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow: as for
            `popxl.variable`.
        remote_buffer: buffer that has the slot.
        offset: number of the slot.

    Raises:
        RuntimeError, ValueError, PopxlError: as for `popxl.variable`; `ValueError` for a buffer of another Ir, or a
            negative `offset`.

    Example:
        >>> with ir.main_graph, popxl.in_sequence():
        ...     buffer = popxl.remote_buffer((3,), popxl.float32)
        ...     w = popxl.remote_variable([1.0, 2.0, 3.0], buffer)
        ...     t = ops.remote_load(buffer, 0)
        ...     ops.remote_store(buffer, 0, t + 1)
    """
    place = _buffer_slot("remote_variable", remote_buffer, offset, sharded=False)
    v = variable(data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow)
    v.location_info = place
    return v


def is_on_host(v: Variable) -> bool:
    """Whether a variable is only in a remote buffer. Programs have shards of others, which sessions load and store."""
    return v.location_info.buffer is not None and v.piece is None


def replica_sharded_buffer(
    shape: Iterable[int],
    dtype: dtype_,
    replica_grouping: Groups | None = None,
    shard_over: int | None = None,
    entries: int = 1,
) -> RemoteBuffer:
    """Create a remote buffer for sharded values, one shard per replica.

    Args:
        shape: shape on the host: with one leading row for each replica group, if there are several.
        dtype: element type.
        replica_grouping: groups of replicas that share a value: a grouping, or names of axes; by default one group of
            all. A grouping that is not constant is replaced by its `const_rg`.
        shard_over: number of shards, a divisor of the group size; by default the group size.
        entries: number of slots.

    Returns:
        A buffer with slots of shape `(ceil(n / shard_over),)` for values of `n` elements. Its `meta_shape` is the shape
        of a value.

    Raises:
        RuntimeError: if there is no current graph.
        ValueError: if `shard_over` is not a divisor of the group size, or a value is a scalar.

    Example:
        Each of 8 replicas keeps 2 of 15 elements.

        >>> with popxl.Ir(replication=8).main_graph:
        ...     popxl.replica_sharded_buffer((3, 5), popxl.float32).tensor_shape
        (2,)
    """
    ir = get_current_context().ir
    grouping = sharing_of(ir, replica_grouping, "replica_sharded_buffer: `replica_grouping`")
    whole = integers(shape, "replica_sharded_buffer: `shape`")
    if grouping.num_groups > 1:
        whole = whole[1:]
    members = grouping.const_rg.group_size
    count = members if shard_over is None else integer(shard_over, "replica_sharded_buffer: `shard_over`")
    if not 0 < count <= members or members % count:
        raise ValueError(
            f"replica_sharded_buffer: `shard_over` is {count}; expected a divisor of {members}, the number of replicas "
            f"in a group of {grouping.const_rg!r}."
        )
    if not whole:
        raise ValueError(
            f"replica_sharded_buffer: `shape` is {tuple(shape)}, which leaves a scalar for each group of "
            f"{grouping!r}; a scalar cannot be cut. Use `popxl.remote_buffer`."
        )
    buffer = RemoteBuffer((shard_length(whole, count),), dtype, entries)
    buffer.meta_shape, buffer.shard_over = whole, count
    return buffer


def remote_replica_sharded_variable(
    data: HostScalarTensor | Initial,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtype_ | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: Groups | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """Create a main-graph variable stored in remote buffer slots, one shard per replica.

    As `remote_variable`, but the slot of a replica holds one shard of the value. The host sees the whole value, and
    `ops.collectives.replicated_all_gather` assembles it on the device. A buffer from `replica_sharded_buffer` defines
    the number of shards; for any other buffer it follows from the length of the slots, rounded up to a divisor of the
    group size.

    Args:
        data, remote_buffer, offset, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale,
            nan_on_overflow: as for `remote_variable`. The `meta_shape` of the buffer is set, if it is `()`.

    Raises:
        RuntimeError, ValueError, PopxlError: as for `remote_variable`; `ValueError` without several replicas, and if
            the buffer has shards of another shape.

    Example:
        >>> with popxl.Ir(replication=2).main_graph, popxl.in_sequence():
        ...     buffer = popxl.replica_sharded_buffer((5,), popxl.float32)
        ...     w = popxl.remote_replica_sharded_variable([1.0, 2.0, 3.0, 4.0, 5.0], buffer)
        ...     piece = ops.remote_load(buffer, 0)  # shape (3,), meta_shape (5,)
    """
    what = "remote_replica_sharded_variable"
    _check_several_replicas(what)
    place = _buffer_slot(what, remote_buffer, offset, sharded=True)
    v = variable(data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow)
    if remote_buffer.meta_shape not in ((), v.shape):
        v.graph.forget(v)
        raise ValueError(
            f"{what}: the value has the shape {v.shape}, and {remote_buffer!r} holds pieces of the shape "
            f"{remote_buffer.meta_shape}. Use another buffer for values of another shape."
        )
    remote_buffer.meta_shape = v.shape
    v.location_info = place
    return v


def replica_sharded_variable(
    data: HostScalarTensor | Initial,
    dtype: dtype_ | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: Groups | None = None,
    shard_over: int | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> tuple[Variable, Tensor]:
    """Create a main-graph variable with one shard per replica in device memory.

    Copying host values to the device fills the shard, which keeps its value from run to run; copying back updates the
    host copy from the shards. Update the shard in place to change the variable.

    Args:
        data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow: as for
            `popxl.variable`.
        shard_over: number of shards, as for `replica_sharded_buffer`.

    Returns:
        The variable, for sessions to read and write; and the shard, of shape `(ceil(n / shard_over),)` for values of
        `n` elements, whose `meta_shape` is the shape of a value.

    Raises:
        RuntimeError, ValueError, PopxlError: as for `popxl.variable`; `ValueError` without several replicas, for a
            scalar, and if `shard_over` is not a divisor of the group size.

    Example:
        >>> with popxl.Ir(replication=2).main_graph, popxl.in_sequence():
        ...     w, piece = popxl.replica_sharded_variable([1.0, 2.0, 3.0, 4.0, 5.0], name="w")
        ...     piece += 1
    """
    what = "replica_sharded_variable"
    _check_several_replicas(what)
    v = variable(data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow)
    try:
        buffer = replica_sharded_buffer(v.shape_on_host, v.dtype, v.replica_grouping, shard_over)
    except (TypeError, ValueError):
        v.graph.forget(v)
        raise
    v.location_info = LocationInfo(buffer, 0, sharded=True)
    v.piece = v.graph.new_tensor(f"{v.name}_rts_remote_loaded", buffer.spec, scoped=False)
    here = get_current_context()
    v.set_location(here.ipu_id, here.io_tile_set)
    v.piece.bound_to(v)  # the shard has the location of the variable
    return v, v.piece


def _buffer_slot(what: str, buffer: Any, offset: int, sharded: bool) -> LocationInfo:
    check_type(buffer, RemoteBuffer, f"{what}: `remote_buffer`", "a RemoteBuffer")
    buffer.check_belongs_to(get_current_context().ir, what)
    number = integer(offset, f"{what}: `offset`")
    if number < 0:
        raise ValueError(f"{what}: `offset` is {number}; slots are numbered from 0.")
    return LocationInfo(buffer, number, sharded)


def _check_several_replicas(what: str) -> None:
    ir = get_current_context().ir
    if ir.replication_factor <= 1:
        raise ValueError(
            f"{what}: {ir!r} has one replica, and a value is cut into pieces for several. Set `ir.replication_factor` "
            "first, or use `popxl.variable` or `popxl.remote_variable`."
        )
