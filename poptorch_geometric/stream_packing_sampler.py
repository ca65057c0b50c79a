"""`StreamPackingSampler`: greedy packing of graphs into batches, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from poptorch_geometric.fixed_size_options import FixedSizeOptions
from poptorch_geometric.sizes import sizes_of
from poptorch_geometric.types import OverSizeStrategy

__all__ = ["StreamPackingSampler"]


class StreamPackingSampler(Sampler[list[int]]):
    """Sampler of index lists: graphs packed greedily into batches, in stream order.

    Args:
        data_source: a map-style data set of graphs.
        options: the sizes of a batch. It has one padding graph at least.
        over_size_strategy: treatment of a graph that does not fit even alone. One to be trimmed is a batch of its own.
        shuffle: take the graphs in another order in each epoch.
        base_sampler: sampler of the order, in place of `shuffle`.

    Raises:
        ValueError: by iterating, with `OverSizeStrategy.Error`, if a graph does not fit.
    """

    def __init__(
        self,
        data_source: Any,
        options: FixedSizeOptions,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.Error,
        shuffle: bool = False,
        base_sampler: Iterable[int] | None = None,
    ) -> None:
        self._data, self._options, self._over_size = data_source, options, over_size_strategy
        if base_sampler is None:
            base_sampler = RandomSampler(data_source) if shuffle else SequentialSampler(data_source)
        self._order = base_sampler

    def __iter__(self) -> Iterator[list[int]]:
        pack: list[int] = []
        total = None
        for index in self._order:
            size = sizes_of(self._data[index])
            budget = self._options.budget(size)
            if not size.fits(budget):
                if self._over_size is OverSizeStrategy.Skip:
                    continue
                if self._over_size is OverSizeStrategy.Error:
                    raise ValueError(
                        f"StreamPack: the graph of index {index}, {size}, does not fit into a batch, {budget}, which "
                        "needs a node for padding edges. Choose larger sizes, or another over_size_strategy."
                    )
            is_full = len(pack) == self._options.num_graphs - 1
            if total is not None and (is_full or not (total + size).fits(budget)):
                yield pack
                pack, total = [], None
            pack.append(index)
            total = size if total is None else total + size
        if pack:
            yield pack
