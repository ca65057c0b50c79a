"""Order of in-place updates after reads of the same storage, which XLA for CPUs does not ensure."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from runtime.cpu.platform_dependent import if_platform_cpu
from runtime.fake_dependency import supports_fake_dependency, with_fake_dependency

LARGE_IN_LOOP = 2**14
"""Number of elements above which the copy of an array in each iteration is slow."""

LARGE = 2**22
"""Number of elements above which one copy of an array per run is slow. Copies of smaller arrays overlap with other
computations, and an order would cost more than they do: XLA computes independent values in parallel."""


class CpuUpdateOrder:
    """Order of in-place updates: an update of a storage comes after results that read it.

    Args:
        in_loop: whether the graph runs within a loop.
    """

    def __init__(self, in_loop: bool) -> None:
        self._large = LARGE_IN_LOOP if in_loop else LARGE
        self._computed: dict[Tensor, Array] = {}
        self._sources: dict[Tensor, Tensor] = {}

    def record_read(self, storage: Tensor, result: Tensor, value: Array) -> None:
        """Record a result computed from a storage.

        A result of equal size may be the storage in another layout or dtype: its own readers count, too. If its
        dimensions are equal as well, only its readers count: updates take many elementwise steps.
        """
        source = self._source(storage)
        if result.nelms == source.nelms:
            self._sources[result] = source
        if sorted(result.shape) != sorted(source.shape):
            self._computed[source] = value

    def record_nested_read(self, storage: Tensor, value: Array) -> None:
        """Record a result that a called graph computed from a storage."""
        self._computed[self._source(storage)] = value

    def last_computed(self, storages: Sequence[Tensor]) -> dict[int, Array]:
        """Last results computed from storages, by position."""
        return {i: self._computed[t] for i, t in enumerate(storages) if t in self._computed}

    def order_write(self, storage: Tensor, value: Array, rows: int) -> Array:
        """Order an updated value after recorded reads of its storage.

        Args:
            storage: one of `rows` rows of an array, which XLA would otherwise copy as a whole.
        """
        earlier = self._computed.pop(storage, None)
        return value if earlier is None or value.size * rows < self._large else order_on_cpu(value, earlier)

    def _source(self, storage: Tensor) -> Tensor:
        return self._sources.get(storage, storage)


def order_on_cpu(value: Array, earlier: Array) -> Array:
    """Add a fake dependency on an earlier result to a value.

    XLA overwrites an array in place if all its readers run earlier. On CPUs only data dependencies order computations,
    so that updated weights are copied for the gradients that also read them. A fake dependency of the new value on such
    a gradient avoids the copy.
    """
    if not isinstance(value, jax.core.Tracer) or not earlier.size or not supports_fake_dependency(value):
        return value

    def on_cpu(value: Array, earlier: Array) -> Array:
        return with_fake_dependency(value, earlier[(0,) * earlier.ndim] != 0)

    return if_platform_cpu(on_cpu, lambda value, earlier: value)(value, earlier)
