"""`VariableBlock`: a program argument array, holding one variable or several packed variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from runtime.lowering.environment import Environment
from runtime.lowering.packed_arrays import PackedArray, PackedSlot, load


@dataclass(frozen=True)
class VariableBlock:
    """Array of one variable, or packed array with one row per variable used by a rerolled loop.

    Attributes:
        tensors: storages of the variables: of one shape and dtype.
    """

    tensors: tuple[Tensor, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the array is packed, with one row per tensor."""
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one replica's array."""
        return (len(self.tensors), *self.tensors[0].shape) if self.is_packed else self.tensors[0].shape

    @property
    def dtype(self) -> Any:
        """JAX dtype of the array."""
        return self.tensors[0].dtype.as_jax()

    def unpack(self, array: Array) -> Mapping[Tensor, Array | PackedSlot]:
        """Array or packed slot of each tensor, for lowering a graph."""
        if not self.is_packed:
            return {self.tensors[0]: array}
        packed = PackedArray(array, is_input=True)
        return {t: PackedSlot(packed, n) for n, t in enumerate(self.tensors)}

    def repack(self, environment: Environment) -> Array:
        """Array of the values after a graph's execution."""
        if not self.is_packed:
            return environment.value_of(self.tensors[0])
        values = [environment.slot_or_value(t) for t in self.tensors]
        packed = values[0].packed if isinstance(values[0], PackedSlot) else None
        numbers = [v.number if isinstance(v, PackedSlot) and v.packed is packed else None for v in values]
        if packed is not None and numbers == [*range(len(packed.array))]:
            return packed.array
        return jnp.stack(list(map(load, values)))


def blocks_of(tensors: Iterable[Tensor], packed: Sequence[Collection[Tensor]]) -> tuple[VariableBlock, ...]:
    """Group tensors into blocks: one block per packed group, and one per remaining tensor."""
    groups = {t: tuple(group) for group in packed for t in group}
    return tuple(dict.fromkeys(VariableBlock(groups.get(t, (t,))) for t in tensors))
