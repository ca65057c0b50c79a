"""`Block`: an array that a program takes, and the variables that lie in it: one, or several beside each other."""

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
class Block:
    """What holds one variable, or several that loops go through; these are the rows of its array.

    Attributes:
        tensors: what holds the variables: of one shape and dtype.
    """

    tensors: tuple[Tensor, ...]

    @property
    def is_stack(self) -> bool:
        """Whether it has several rows, one for each of its tensors."""
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, of one replica."""
        return (len(self.tensors), *self.tensors[0].shape) if self.is_stack else self.tensors[0].shape

    @property
    def dtype(self) -> Any:
        """Its dtype, as JAX has it."""
        return self.tensors[0].dtype.as_jax()

    def places(self, array: Array) -> Mapping[Tensor, Array | PackedSlot]:
        """Where the values are, for a graph that is lowered."""
        if not self.is_stack:
            return {self.tensors[0]: array}
        stack = PackedArray(array, is_given=True)
        return {t: PackedSlot(stack, n) for n, t in enumerate(self.tensors)}

    def after(self, environment: Environment) -> Array:
        """The array with the values that a graph has left."""
        if not self.is_stack:
            return environment.read(self.tensors[0])
        places = [environment.slot_or_value(t) for t in self.tensors]
        stack = places[0].stack if isinstance(places[0], PackedSlot) else None
        numbers = [place.number if isinstance(place, PackedSlot) and place.stack is stack else None for place in places]
        if stack is not None and numbers == [*range(len(stack.array))]:
            return stack.array
        return jnp.stack(list(map(load, places)))


def blocks_of(tensors: Iterable[Tensor], together: Sequence[Collection[Tensor]]) -> tuple[Block, ...]:
    """Tensors in blocks: those that are together in one, and each other in one of its own."""
    whole = {t: tuple(each) for each in together for t in each}
    return tuple(dict.fromkeys(Block(whole.get(t, (t,))) for t in tensors))
