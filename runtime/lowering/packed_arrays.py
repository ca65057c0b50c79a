"""Packed arrays: values of one shape and dtype in one array, so that a loop can index them by iteration.

During lowering, the value of a storage is an array or a packed slot. A slot is sliced when it is read, and updated in
place when it is written.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import lax

from popxl.base.arrays import Array


class PackedArray:
    """An array of values with equal shape and dtype, during tracing.

    Args:
        shape: as the attribute; by default that of the array without its first dimension.

    Attributes:
        array: the current contents; the first dimension is the slot number.
        is_input: whether it is an input of the program. Other packed arrays are computed, in the precision that their
            users need.
        shape: shape of a value. In the array, values may have further leading dimensions of size one.
    """

    __slots__ = ("array", "is_input", "shape")

    def __init__(self, array: Array, *, is_input: bool = False, shape: tuple[int, ...] | None = None) -> None:
        self.array, self.is_input, self.shape = array, is_input, array.shape[1:] if shape is None else shape

    def with_array(self, array: Array) -> PackedArray:
        """A packed array with other contents, inside a loop iteration."""
        return PackedArray(array, is_input=self.is_input, shape=self.shape)

    def as_row(self, value: Array) -> Array:
        """Value reshaped to a row of the array."""
        return value.reshape(self.array.shape[1:])


class PackedSlot(NamedTuple):
    """Slot of a packed array: one of its values."""

    packed: PackedArray
    number: int

    def slice_value(self) -> Array:
        """Slice the current value."""
        return lax.index_in_dim(self.packed.array, self.number, keepdims=False).reshape(self.packed.shape)

    def write(self, value: Array) -> None:
        """Update the value."""
        packed = self.packed
        packed.array = lax.dynamic_update_index_in_dim(packed.array, packed.as_row(value), self.number, 0)


def load(value: Array | PackedSlot) -> Array:
    """Load a value from a packed slot; pass other values through."""
    return value.slice_value() if isinstance(value, PackedSlot) else value


def write_back(value: Array | PackedSlot, slot: PackedSlot) -> None:
    """Write a value into a slot, unless it already lives there."""
    if not isinstance(value, PackedSlot) or value != slot:
        slot.write(load(value))
