"""Collate lists of graphs into fixed-size batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch_geometric.data import Batch

from poptorch_geometric.fixed_size_options import FixedSizeOptions
from poptorch_geometric.sizes import Sizes, sizes_of
from poptorch_geometric.trimming import without_edges, without_nodes
from poptorch_geometric.types import OverSizeStrategy

__all__ = ["CombinedBatchingCollater", "FixedSizeCollater"]


class FixedSizeCollater:
    """Collater for fixed-size graph batches.

    After the graphs come empty ones, where there are fewer than `num_graphs - 1`, and last the padding graph: it has
    the nodes and edges that are missing.

    Args:
        fixed_size_options: the sizes and the padding values.
        over_size_strategy: treatment of graphs that do not fit.
        add_masks_to_batch: whether to add `graphs_mask`, `nodes_mask` and `edges_mask`, false for padding; for
            heterogeneous graphs, the last two belong to each type: `batch["paper"].nodes_mask`.
        follow_batch: names of attributes that get an assignment vector too.
        exclude_keys: names of attributes that are left out.

    Raises:
        ValueError: by calling, if the graphs do not fit and are not to be trimmed or skipped, or if they contain values
            that cannot be padded.
    """

    def __init__(
        self,
        fixed_size_options: FixedSizeOptions,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.Error,
        add_masks_to_batch: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        self._options, self._over_size = fixed_size_options, over_size_strategy
        self._add_masks = add_masks_to_batch
        self._follow, self._exclude = list(follow_batch or ()), list(exclude_keys or ())

    def __call__(self, graphs: Sequence[Any]) -> Any:
        """Collate up to `num_graphs - 1` graphs (`Data` or `HeteroData`) into one fixed-size batch."""
        if not 0 < len(graphs) < self._options.num_graphs:
            raise ValueError(
                f"FixedSizeCollater: a batch has 1 to {self._options.num_graphs - 1} graphs and a padding graph; "
                f"got {len(graphs)} graphs."
            )
        budget = self._options.budget(sizes_of(graphs[0]))
        like = graphs
        graphs = self._fitting(list(graphs), budget)
        empty = Sizes(dict.fromkeys(budget.nodes, 0), dict.fromkeys(budget.edges, 0))
        size = sum(map(sizes_of, graphs), empty)
        missing = Sizes(
            {kind: budget.nodes[kind] - count for kind, count in size.nodes.items()},
            {kind: budget.edges[kind] - count for kind, count in size.edges.items()},
        )
        empties = self._options.num_graphs - 1 - len(graphs)
        padding = [self._padding(like, empty) for _ in range(empties)] + [self._padding(like, missing)]
        batch = Batch.from_data_list([*graphs, *padding], self._follow, self._exclude)
        if self._add_masks:
            batch.graphs_mask = torch.arange(self._options.num_graphs) < len(graphs)
            for kind, count in budget.nodes.items():
                (batch if kind is None else batch[kind]).nodes_mask = torch.arange(count) < size.nodes[kind]
            for kind, count in budget.edges.items():
                (batch if kind is None else batch[kind]).edges_mask = torch.arange(count) < size.edges[kind]
        return batch

    def _fitting(self, graphs: list[Any], budget: Sizes) -> list[Any]:
        """Trim or drop oversized graphs."""
        if self._over_size is OverSizeStrategy.Skip:
            kept: list[Any] = []
            for graph in graphs:
                if sum(map(sizes_of, kept), sizes_of(graph)).fits(budget):
                    kept.append(graph)
            return kept
        if self._over_size.trims_nodes:
            graphs = without_nodes(graphs, sum(map(sizes_of, graphs[1:]), sizes_of(graphs[0])).excess_nodes(budget))
        if self._over_size.trims_edges:
            graphs = without_edges(graphs, sum(map(sizes_of, graphs[1:]), sizes_of(graphs[0])).excess_edges(budget))
        size = sum(map(sizes_of, graphs[1:]), sizes_of(graphs[0]))
        if self._over_size.trims_nodes:  # a graph without edges may now need a node for padding edges
            graphs = without_nodes(graphs, size.excess_nodes(budget))
            size = sum(map(sizes_of, graphs[1:]), sizes_of(graphs[0]))
        if not size.fits(budget):
            raise ValueError(
                f"FixedSizeCollater: {len(graphs)} graphs with {size} do not fit into a batch, {budget}, which needs "
                "a node for padding edges. Choose larger sizes in FixedSizeOptions (`from_dataset` finds them), or "
                f"another over_size_strategy than {self._over_size.name}."
            )
        return graphs

    def _padding(self, like: Sequence[Any], sizes: Sizes) -> Any:
        """Padding graph with given sizes and the attributes of `like`."""
        padding = like[0].__class__()
        for index, store in enumerate(like[0].stores):
            kind = store._key
            into = padding if kind is None else padding[kind]
            is_nodes, is_edges = kind in sizes.nodes, kind in sizes.edges
            nodes, edges = sizes.nodes.get(kind, 0), sizes.edges.get(kind, 0)
            for name in store.keys():
                if name in self._exclude or name == "num_nodes":
                    continue
                value = like[0].stores[index][name]
                if not isinstance(value, torch.Tensor):
                    into[name] = self._default(name, value)
                    continue
                dim = like[0].__cat_dim__(name, value, store)
                of_nodes = is_nodes and _has_size_in_all(like, index, name, dim, "num_nodes")
                of_edges = is_edges and _has_size_in_all(like, index, name, dim, "num_edges")
                if of_nodes and of_edges:  # as many nodes as edges, in all of them
                    of_edges = "edge" in name or "adj" in name
                    of_nodes = not of_edges
                shape = list(value.shape)
                if name == "edge_index":
                    into[name] = value.new_zeros(2, edges)  # from and to its first node
                elif of_nodes or of_edges:
                    shape[dim] = nodes if of_nodes else edges
                    fill = self._options.node_pad_value if of_nodes else self._options.edge_pad_value
                    into[name] = value.new_full(shape, fill)
                else:
                    into[name] = value.new_full(shape, self._options.graph_pad_value)
            if is_nodes:
                into.num_nodes = nodes
        return padding

    def _default(self, name: str, value: Any) -> Any:
        """Padding graph's value for a non-tensor attribute."""
        defaults = self._options.pad_graph_defaults or {}
        if name in defaults:
            return defaults[name]
        if isinstance(value, (bool, int, float)):
            return type(value)(self._options.graph_pad_value)
        if isinstance(value, str):
            return ""
        raise ValueError(
            f"FixedSizeCollater: {name!r} is a {type(value).__name__}, and nothing says what the padding graph has "
            f"there. Give FixedSizeOptions(pad_graph_defaults={{{name!r}: …}}), or leave it out by `exclude_keys`."
        )


def _has_size_in_all(graphs: Sequence[Any], index: int, name: str, dim: Any, count: str) -> bool:
    """Whether a tensor has one row per node or edge in all graphs."""
    return all(
        (value := graph.stores[index][name]).dim() and value.size(dim) == getattr(graph.stores[index], count)
        for graph in graphs
        if isinstance(dim, int)
    )


class CombinedBatchingCollater:
    """Collater for a whole call: collates several batches separately, then concatenates their tensors.

    A call takes one batch for each device iteration, replica and gradient accumulation step; the model sees one at a
    time.

    Args:
        mini_batch_size: number of elements that one batch is made of; None if each element is a list of graphs already.
        collater: collater of one batch, from a list of graphs.
    """

    def __init__(self, mini_batch_size: int | None, collater: Callable[[Sequence[Any]], Any]) -> None:
        self._size, self._collater = mini_batch_size, collater

    def __call__(self, elements: Sequence[Any]) -> Any:
        """Collate all elements into one batch."""
        size = self._size
        parts = elements if size is None else [elements[i : i + size] for i in range(0, len(elements), size)]
        batches = [self._collater(part) for part in parts]
        first = batches[0]
        if len(batches) == 1:
            return first
        if not hasattr(first, "stores"):
            return _concatenate(batches)
        for index, store in enumerate(first.stores):
            for name in list(store.keys()):
                store[name] = _concatenate([batch.stores[index][name] for batch in batches])
        for name in ("_slice_dict", "_inc_dict"):  # PyTorch Geometric's data for splitting a batch
            setattr(first, name, _concatenate([getattr(batch, name) for batch in batches]))
        return first


def _concatenate(values: list[Any]) -> Any:
    """Concatenate tensors of several batches, within dictionaries and lists; other values come from the first batch."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values)
    if isinstance(first, dict):
        return {name: _concatenate([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        return [each for value in values for each in value]
    return first
