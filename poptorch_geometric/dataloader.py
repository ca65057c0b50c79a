"""Graph data loaders for wrapped models: `poptorch.DataLoader` with PyTorch Geometric batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset
from torch_geometric.loader.dataloader import Collater

import poptorch
from poptorch_geometric.collate import CombinedBatchingCollater, FixedSizeCollater
from poptorch_geometric.fixed_size_options import FixedSizeOptions
from poptorch_geometric.stream_packing_sampler import StreamPackingSampler
from poptorch_geometric.types import FixedSizeStrategy, OverSizeStrategy

__all__ = ["DataLoader", "FixedSizeDataLoader"]


class DataLoader(poptorch.DataLoader):
    """Data loader for `Data` or `HeteroData` batches, like `torch_geometric.loader.DataLoader`.

    Their sizes are those of the graphs: a model is compiled once more for each other size. If a call takes several
    batches, these must be of the same size, such as those of graphs that `torch_geometric.transforms.Pad` has padded.

    Args:
        dataset: the graphs.
        batch_size: number of graphs that the model sees at a time.
        shuffle: whether to change the order in each epoch.
        follow_batch: names of attributes that get an assignment vector too.
        exclude_keys: names of attributes that are left out.
        options: options of the model; by default `poptorch.Options()`.
        kwargs: further arguments of `poptorch.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        options: poptorch.Options | None = None,
        **kwargs: Any,
    ) -> None:
        collater = CombinedBatchingCollater(batch_size, Collater(dataset, follow_batch, exclude_keys))
        super().__init__(
            options or poptorch.Options(), dataset, batch_size, shuffle=shuffle, collate_fn=collater, **kwargs
        )


class FixedSizeDataLoader(poptorch.DataLoader):
    """Data loader for fixed-size `Data` or `HeteroData` batches: equal numbers of nodes, edges and graphs.

    A model is compiled once for them. `batch.num_graphs` is a number of Python's.

    Args:
        dataset: the graphs.
        batch_size: number of graphs of a batch, the padding graph included; at least 2.
        shuffle: whether to change the order in each epoch.
        fixed_size_options: sizes; by default those of `FixedSizeOptions.from_dataset(dataset, batch_size)`. Its
            `num_graphs` is `batch_size`, or its default.
        fixed_size_strategy: selection of the graphs of a batch. With several processes, `StreamPack` needs a data set
            that is the share of this process, and `auto_distributed_partitioning=False`.
        over_size_strategy: treatment of graphs that do not fit.
        add_pad_masks: whether to add `graphs_mask`, `nodes_mask` and `edges_mask`, false for padding.
        follow_batch: names of attributes that get an assignment vector too.
        exclude_keys: names of attributes that are left out.
        options: options of the model; by default `poptorch.Options()`.
        kwargs: further arguments of `poptorch.DataLoader`.

    Raises:
        ValueError: if `batch_size` is less than 2, or is not the `num_graphs` of the options; while loading, if graphs
            do not fit, and `over_size_strategy` does not handle them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 2,
        shuffle: bool = False,
        fixed_size_options: FixedSizeOptions | None = None,
        fixed_size_strategy: FixedSizeStrategy = FixedSizeStrategy.PadToMax,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.Error,
        add_pad_masks: bool = True,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        options: poptorch.Options | None = None,
        **kwargs: Any,
    ) -> None:
        if batch_size < 2:
            raise ValueError(
                "FixedSizeDataLoader: `batch_size` counts the padding graph, and should be at least 2; "
                f"got {batch_size}."
            )
        sizes = fixed_size_options or FixedSizeOptions.from_dataset(dataset, batch_size)
        if sizes.num_graphs not in (2, batch_size):
            raise ValueError(
                f"FixedSizeDataLoader: `batch_size` is {batch_size}, and num_graphs of `fixed_size_options` is "
                f"{sizes.num_graphs}; both count the graphs of a batch, the padding graph included."
            )
        sizes = dataclasses.replace(sizes, num_graphs=batch_size)
        collater = FixedSizeCollater(sizes, over_size_strategy, add_pad_masks, follow_batch, exclude_keys)
        options = options or poptorch.Options()
        if fixed_size_strategy is FixedSizeStrategy.StreamPack:
            packs = StreamPackingSampler(dataset, sizes, over_size_strategy, shuffle, kwargs.pop("sampler", None))
            combined = CombinedBatchingCollater(None, collater)
            super().__init__(options, _Packs(dataset), 1, sampler=packs, collate_fn=combined, **kwargs)
        else:
            graphs = batch_size - 1
            combined = CombinedBatchingCollater(graphs, collater)
            super().__init__(options, dataset, graphs, shuffle=shuffle, collate_fn=combined, **kwargs)


class _Packs(Dataset[list[Any]]):
    """Data set of graph lists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: Sequence[int]) -> list[Any]:
        return [self._dataset[index] for index in indices]
