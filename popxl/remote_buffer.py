"""Remote buffers: memory outside of the device's own, in equal slots that a program loads from and stores to by number.

A buffer is declared here and used by the ops of `popxl.ops.remote`. Variables of `popxl.core.remote_variables` define
the initial content of its slots. It holds no numbers itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from popxl.base.copies import CopyIsSelf
from popxl.context import get_current_context
from popxl.dtypes import check_dtype
from popxl.dtypes import dtype as dtype_
from popxl.values.shapes import integer, sizes
from popxl.values.spec import TensorSpec, brief

if TYPE_CHECKING:
    from popxl.core.tensor import Tensor
    from popxl.ir import Ir

__all__ = ["RemoteBuffer", "remote_buffer"]


class RemoteBuffer(CopyIsSelf):
    """A table of slots with common shape and dtype, one table per replica.

    The slots keep their contents from run to run, for as long as a session is attached. A slot that no variable fills
    starts with zeros.

    Two buffers are equal if they are the same object. A buffer does not keep its Ir alive, and can be read and changed
    without it.

    Args:
        tensor_shape: shape of a slot.
        tensor_dtype: element type.
        entries: number of slots.

    Raises:
        RuntimeError: if there is no current graph.
        ValueError: if `entries` is below 1.

    Example:
        >>> with ir.main_graph, popxl.in_sequence():
        ...     buffer = popxl.RemoteBuffer((3,), popxl.float32, entries=2)
        ...     t = ops.remote_load(buffer, 0)
        ...     ops.remote_store(buffer, 1, t + 1)

    Attributes:
        meta_shape: shape before sharding, where the slots hold replica-sharded values; else `()`.
        shard_over: number of shards of each value, if `replica_sharded_buffer` has set it; else `None`.
    """

    __slots__ = ("__weakref__", "_dtype", "_edits", "_entries", "_id", "_ir_id", "_shape", "meta_shape", "shard_over")

    meta_shape: tuple[int, ...]
    shard_over: int | None

    def __init__(self, tensor_shape: Iterable[int], tensor_dtype: dtype_, entries: int) -> None:
        self._register(get_current_context().ir, tensor_shape, tensor_dtype, entries)

    @classmethod
    def _make(cls, ir: Ir, tensor_shape: Iterable[int], tensor_dtype: dtype_, entries: int) -> RemoteBuffer:
        """Create a buffer in an Ir outside its context."""
        buffer = object.__new__(cls)
        buffer._register(ir, tensor_shape, tensor_dtype, entries)
        return buffer

    def _register(self, ir: Ir, tensor_shape: Iterable[int], tensor_dtype: dtype_, entries: int) -> None:
        self._shape = sizes(tensor_shape, "remote_buffer: `tensor_shape`")
        self._dtype = check_dtype(tensor_dtype, "remote_buffer: `tensor_dtype`")
        self._edits = ir.edits
        self.entries = entries
        self.meta_shape = ()
        self.shard_over = None
        self._ir_id = ir.id
        ir.remote_buffers.append(self)
        self._id = len(ir.remote_buffers)

    @property
    def remote_buffer_id(self) -> int:
        """Buffer number in its Ir, starting at 1."""
        return self._id

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of a slot."""
        return self._shape

    @tensor_shape.setter
    def tensor_shape(self, value: object) -> None:
        raise AttributeError("can't set attribute 'tensor_shape'")

    @property
    def tensor_dtype(self) -> dtype_:
        """Element type of the slots."""
        return self._dtype

    @tensor_dtype.setter
    def tensor_dtype(self, value: object) -> None:
        raise AttributeError("can't set attribute 'tensor_dtype'")

    @property
    def entries(self) -> int:
        """Number of slots. Settable until session creation."""
        return self._entries

    @entries.setter
    def entries(self, value: int) -> None:
        entries = integer(value, "RemoteBuffer: `entries`")
        if entries < 1:
            raise ValueError(f"Entries must be a non-zero, positive integer; got {entries}.")
        self._entries = entries
        self._edits.record_edit()

    @property
    def spec(self) -> TensorSpec:
        """Spec of tensors loaded from the buffer."""
        return TensorSpec(self._shape, self._dtype, self.meta_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, of one replica."""
        return self.entries * self.slot_nelms * self.tensor_dtype.itemsize

    @property
    def slot_nelms(self) -> int:
        """Number of elements of a slot."""
        return math.prod(self._shape)

    def set_remote_buffer_info(self, tensor_dtype: dtype_, tensor_shape: tuple[int, ...], entries: int) -> None:
        """Define the slots anew. Nothing is checked; ops that use the buffer already are not changed with it."""
        self._dtype, self._shape, self._entries = tensor_dtype, tuple(tensor_shape), entries
        self._edits.record_edit()

    def validate_tensor_matches_buffer(self, t: Tensor, num_shards: int = 1) -> None:
        """Raise `ValueError` unless `t` matches slot shape and dtype.

        Args:
            t: any tensor, of any Ir.
            num_shards: if not 1, the shape is compared with `meta_shape` instead.
        """
        shape = self._shape if num_shards == 1 else self.meta_shape
        if t.dtype != self._dtype or t.shape != shape:
            raise ValueError(
                f"Tensor {t.id} does not match buffer. The tensor is {brief(t)}, and {self!r} takes "
                f"{brief(TensorSpec(shape, self._dtype))}; nothing is converted on the way. Use `ops.cast` or "
                "`ops.reshape`, or make the buffer like this."
            )

    def check_belongs_to(self, ir: Ir, what: str) -> None:
        """Raise `ValueError` for a buffer of another Ir."""
        if self._ir_id != ir.id:
            raise ValueError(f"{what}: {self!r} is of another Ir than the current graph; a program is made of one.")

    def __hash__(self) -> int:
        return hash((self._ir_id, self._id))

    def __repr__(self) -> str:
        return f"RemoteBuffer[{self._id}: {self._entries} x {brief(self.spec)}]"


def remote_buffer(tensor_shape: Iterable[int], tensor_dtype: dtype_, entries: int = 1) -> RemoteBuffer:
    """A new remote buffer of the current Ir.

    Args:
        tensor_shape: shape of a slot, on each replica.
        tensor_dtype: element type.
        entries: number of slots; `buffer.entries` may be set later.

    Raises:
        RuntimeError: if there is no current graph.
        ValueError: if `entries` is below 1.

    Example:
        >>> with ir.main_graph:
        ...     buffer = popxl.remote_buffer((3,), popxl.float32, entries=2)
    """
    return RemoteBuffer(tensor_shape, tensor_dtype, entries)
