"""Remote buffers as matrices: the values that a serialised graph loads and stores, by row and micro-batch.

Slot ``row * steps + i`` of a buffer is micro-batch `i` of row `row`, and a row is a layer, for example. A
`RemoteHandle` maps the row that a graph is called with to the row of its buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import popxl
from popxl import ops
from popxl.extend.arguments import integer
from popxl.replica_grouping import Groups, grouping_of, means_groups
from popxl_addons import _io_tiles
from popxl_addons.remote import create_remote_buffer
from popxl_addons.rts import gather_replica_sharded_tensor

RowOffset = int | Callable[[popxl.Tensor], popxl.Tensor] | None
RemoteBufferWithOffset = tuple[popxl.RemoteBuffer, RowOffset] | tuple[popxl.RemoteBuffer, RowOffset, Groups | None]
"""Tuples accepted in place of a `RemoteHandle`."""


@dataclass(frozen=True, eq=False)
class RemoteHandle:
    """Remote location of tensor values, one per row and micro-batch.

    Attributes:
        buffer: the buffer.
        row_offset: offset of the buffer's row: for a graph that is called with row `n`, row ``n + row_offset``; always
            row 0 for None; for a function the row that it computes from `n`, an int32 tensor.
        shard_group: replicas that keep a shard of the values each; None for whole values on every replica. Values are
            sharded before they are stored, and gathered after they are loaded; they must be equal on these replicas.

    Raises:
        TypeError: if one of these has another type.

    Example:
        The weights of two successive layers.

        >>> with popxl.Ir().main_graph:
        ...     buffer = popxl.remote_buffer((2, 3), popxl.float32, entries=4)
        ...     here, after, first = RemoteHandle(buffer), RemoteHandle(buffer, 1), RemoteHandle(buffer, None)
    """

    buffer: popxl.RemoteBuffer
    row_offset: RowOffset = 0
    shard_group: Groups | None = None

    def __post_init__(self) -> None:
        offset, group = self.row_offset, self.shard_group
        if not (
            isinstance(self.buffer, popxl.RemoteBuffer)
            and (offset is None or callable(offset) or isinstance(offset, Integral))
            and (group is None or means_groups(group))
        ):
            raise TypeError(
                "RemoteHandle: expected a remote buffer, a row offset (an integer, None or a function of the row), and "
                f"a replica grouping, names of axes or None; got {self.buffer!r}, {offset!r} and {group!r}."
            )

    @classmethod
    def from_argument(cls, argument: str, handle: Any) -> RemoteHandle:
        """The handle itself, or one made of a tuple ``(buffer, row_offset)`` or ``(buffer, row_offset, shard_group)``.

        Raises:
            TypeError: for any other part of an argument.
        """
        if isinstance(handle, tuple) and len(handle) in (2, 3):
            return cls(*handle)
        if not isinstance(handle, cls):
            raise TypeError(
                f"`{argument}` holds {handle!r} ({type(handle).__name__}); expected a RemoteHandle, or a tuple of a "
                "remote buffer, a row offset and perhaps a replica grouping."
            )
        return handle

    def entry(self, row: popxl.Tensor, steps: int, i: popxl.Tensor | int) -> popxl.Tensor | int:
        """The slot of micro-batch `i` where a graph is called with `row`, an int32 scalar."""
        if self.row_offset is None:
            return i
        own_row = ops.cast(self.row_offset(row), row.dtype) if callable(self.row_offset) else row + self.row_offset
        return own_row * steps + i

    def entries(self, steps: int, rows: int) -> int:
        """Number of buffer slots for rows 0 to ``rows - 1``; a function as offset is taken to stay there."""
        if self.row_offset is None:
            return steps
        return steps * (rows if callable(self.row_offset) else self.row_offset + rows)

    def load(self, entry: popxl.Tensor | int, t: popxl.Tensor, use_io_tiles: bool) -> popxl.Tensor:
        """Load a value of `t`, in the current graph."""
        loaded = _io_tiles.loaded(use_io_tiles, ops.remote_load, self.buffer, entry, t.name)
        group = self._sharding_group(t)
        return loaded if group is None else gather_replica_sharded_tensor(loaded, replica_group=group)

    def store(self, entry: popxl.Tensor | int, t: popxl.Tensor, use_io_tiles: bool) -> None:
        """Store a value, in the current graph."""
        if (group := self._sharding_group(t)) is not None:
            t = ops.collectives.replica_sharded_slice(t, group)
        _io_tiles.stored(use_io_tiles, ops.remote_store, self.buffer, entry, t)

    def check_fits(self, t: popxl.Tensor) -> None:
        """`ValueError` unless the buffer takes values of `t`."""
        shape, meta_shape = t.shape, self.buffer.meta_shape
        if (group := self._sharding_group(t)) is not None:
            shape, meta_shape = (-(-t.nelms // group.group_size),), t.shape
        wanted = popxl.TensorSpec(shape, t.dtype, meta_shape)
        if self.buffer.spec.to_tuple() != wanted.to_tuple():
            raise ValueError(
                f"{self.buffer!r} does not fit `{t.name}`, whose values are stored as {wanted!r}: its slots are "
                f"{self.buffer.spec!r}. `batch_serial_buffer` makes a buffer that fits."
            )

    def _sharding_group(self, t: popxl.Tensor) -> popxl.ReplicaGrouping | None:
        """Replicas that share `t` as shards; None for unsharded storage."""
        if self.shard_group is None or t.meta_shape:
            return None
        group = grouping_of(t.ir, self.shard_group, "RemoteHandle: `shard_group`").const_rg
        return None if group.group_size == 1 else group


def batch_serial_buffer(
    t: popxl.Tensor | popxl.TensorSpec,
    steps: int = 1,
    rows: int = 1,
    shard_group: Groups | None = None,
) -> popxl.RemoteBuffer:
    """Remote buffer for `rows` rows of `steps` values of `t`.

    Args:
        t: a tensor or spec.
        steps: number of micro-batches.
        rows: number of rows.
        shard_group: replicas that keep a shard of each value; without it every replica keeps whole values.

    Raises:
        ValueError: if the elements of `t` cannot be divided evenly among the group.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     batch_serial_buffer(popxl.TensorSpec((2, 3), popxl.float32), steps=4, rows=2)
        RemoteBuffer[1: 8 x f32[2, 3]]
    """
    steps, rows = integer(steps, "batch_serial_buffer: `steps`"), integer(rows, "batch_serial_buffer: `rows`")
    return create_remote_buffer(t, steps * rows, shard_group, 1 if shard_group is None else None)
