"""`PackedVariables`: a program argument array, holding one variable or several packed variables."""

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
class PackedVariables:
    """Array of one variable, or packed array with one row per variable used by a rerolled loop.

    Attributes:
        tensors: storages of the variables: of one shape and dtype.
    """

    tensors: tuple[Tensor, ...]

    @property
    def is_stack(self) -> bool:
        """Whether the array is packed, with one row per tensor."""
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one replica's array."""
        return (len(self.tensors), *self.tensors[0].shape) if self.is_stack else self.tensors[0].shape

    @property
    def dtype(self) -> Any:
        """JAX dtype of the array."""
        return self.tensors[0].dtype.as_jax()

    def unpack(self, array: Array) -> Mapping[Tensor, Array | PackedSlot]:
        """Array or packed slot of each tensor, for lowering a graph."""
        if not self.is_stack:
            return {self.tensors[0]: array}
        stack = PackedArray(array, is_given=True)
        return {t: PackedSlot(stack, n) for n, t in enumerate(self.tensors)}

    def repack(self, environment: Environment) -> Array:
        """Array of the values after a graph's execution."""
        if not self.is_stack:
            return environment.value_of(self.tensors[0])
        places = [environment.slot_or_value(t) for t in self.tensors]
        stack = places[0].stack if isinstance(places[0], PackedSlot) else None
        numbers = [place.number if isinstance(place, PackedSlot) and place.stack is stack else None for place in places]
        if stack is not None and numbers == [*range(len(stack.array))]:
            return stack.array
        return jnp.stack(list(map(load, places)))


def blocks_of(tensors: Iterable[Tensor], together: Sequence[Collection[Tensor]]) -> tuple[PackedVariables, ...]:
    """Group tensors into blocks: one block per packed group in `together`, and one per remaining tensor."""
    whole = {t: tuple(each) for each in together for t in each}
    return tuple(dict.fromkeys(PackedVariables(whole.get(t, (t,))) for t in tensors))
