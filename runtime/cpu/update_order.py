"""The order in which XLA computes what does not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from runtime.cpu.platform_dependent import if_platform_cpu
from runtime.fake_dependency import supports_fake_dependency, with_fake_dependency

LARGE_IN_LOOP = 2**14
"""An array of so many elements takes long to copy in each turn of a loop."""

LARGE = 2**22
"""An array of so many elements takes long to copy once in a run. Smaller ones are copied while something else is
computed, and an order would cost more than the copies: XLA computes side by side what does not depend on each other."""


class CpuUpdateOrder:
    """Order of in-place updates: an update of a storage comes after results that read it.

    Args:
        in_loop: whether the graph runs in the turns of a loop.
    """

    def __init__(self, in_loop: bool) -> None:
        self._large = LARGE_IN_LOOP if in_loop else LARGE
        self._computed: dict[Tensor, Array] = {}
        self._made_of: dict[Tensor, Tensor] = {}

    def record_read(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Record a result computed from a storage.

        If it is of the same size it may be the same in another order, or dtype: then what is computed from it counts,
        too. If it also has the same dimensions, only that: an update takes many steps over numbers of one shape.
        """
        source = self._source(storage)
        if result.nelms == source.nelms:
            self._made_of[result] = source
        if sorted(result.shape) != sorted(source.shape):
            self._computed[source] = value

    def record_nested_read(self, storage: Tensor, value: Array) -> None:
        """Record a result that a called graph computed from a storage."""
        self._computed[self._source(storage)] = value

    def last_computed(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """The last results computed from storages, by position."""
        return {i: self._computed[t] for i, t in enumerate(storages) if t in self._computed}

    def order_write(self, storage: Tensor, value: Array, rows: int) -> Array:
        """Order an updated value after recorded reads of its storage.

        Args:
            storage: one of so many `rows` of an array, all of which XLA would copy.
            value: what it is overwritten with.
        """
        earlier = self._computed.pop(storage, None)
        return value if earlier is None or value.size * rows < self._large else computed_after(value, earlier)

    def _source(self, storage: Tensor) -> Tensor:
        return self._made_of.get(storage, storage)


def computed_after(value: Array, earlier: Array) -> Array:
    """The same value, with a fake dependency on an earlier result.

    XLA overwrites an array in place where all that reads it comes before. On CPUs it knows no order but that of what
    depends on each other, and copies weights that are updated, for the gradient that they are multiplied with as well.
    So the new value seems to depend on that gradient.

    Args:
        value: what an array is overwritten with.
        earlier: what was last computed from the array.
    """
    if not isinstance(value, jax.core.Tracer) or not earlier.size or not supports_fake_dependency(value):
        return value

    def on_cpu(value: Array, earlier: Array) -> Array:
        return with_fake_dependency(value, earlier[(0,) * earlier.ndim] != 0)

    return if_platform_cpu(on_cpu, lambda value, earlier: value)(value, earlier)
