"""`FixedSizeOptions`: sizes shared by all batches, and padding values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from poptorch_geometric.sizes import Sizes, largest, sizes_of

__all__ = ["FixedSizeOptions"]


@dataclass
class FixedSizeOptions:
    """Number of nodes, edges and graphs per batch, including padding, and padding values.

    Args:
        num_nodes: number of nodes; for heterogeneous graphs a dictionary by type of node, or one number for all types.
        num_edges: number of edges; likewise by type of edge. By default `num_nodes * (num_nodes - 1)`.
        num_graphs: number of graphs, of which the last is the padding graph.
        node_pad_value: padding of tensors with a row for each node.
        edge_pad_value: padding of tensors with a row for each edge. Padding edges connect padding nodes.
        graph_pad_value: padding of other tensors, and of numbers.
        pad_graph_defaults: values of the padding graph that are not tensors, by name.

    Raises:
        ValueError: if `num_graphs` is less than 2, or another size is less than 1.
    """

    num_nodes: int | dict[str, int]
    num_edges: int | dict[tuple[str, str, str], int] | None = None
    num_graphs: int = 2
    node_pad_value: float = 0.0
    edge_pad_value: float = 0.0
    graph_pad_value: float = 0.0
    pad_graph_defaults: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_graphs < 2:
            raise ValueError(
                f"FixedSizeOptions: `num_graphs` should be at least 2, one of them for padding; got {self.num_graphs}."
            )
        if self.num_edges is None:
            if isinstance(self.num_nodes, dict):
                raise ValueError("FixedSizeOptions: `num_edges` is needed where `num_nodes` is a dictionary.")
            self.num_edges = self.num_nodes * (self.num_nodes - 1)
        self.pad_graph_defaults = self.pad_graph_defaults or {}
        for name, value, least in (("num_nodes", self.num_nodes, 1), ("num_edges", self.num_edges, 0)):
            if min(value.values() if isinstance(value, dict) else [value], default=least) < least:
                raise ValueError(f"FixedSizeOptions: `{name}` should be at least {least}; got {value}.")

    def is_hetero(self) -> bool:
        """Whether sizes are given per type."""
        return isinstance(self.num_nodes, dict) or isinstance(self.num_edges, dict)

    @property
    def total_num_nodes(self) -> int:
        """Number of nodes, over all types."""
        return sum(self.num_nodes.values()) if isinstance(self.num_nodes, dict) else self.num_nodes

    @property
    def total_num_edges(self) -> int:
        """Number of edges, over all types."""
        return sum(self.num_edges.values()) if isinstance(self.num_edges, dict) else self.num_edges or 0

    def budget(self, like: Sizes) -> Sizes:
        """Batch sizes by type, for types present in a graph.

        Raises:
            ValueError: if there is no size for some type.
        """
        given: list[dict[Any, int]] = []
        for name, value, kinds in (
            ("num_nodes", self.num_nodes, like.nodes),
            ("num_edges", self.num_edges, like.edges),
        ):
            if isinstance(value, dict) and (missing := [kind for kind in kinds if kind not in value]):
                raise ValueError(f"FixedSizeOptions: `{name}` has no number for {missing[0]!r}; it has {list(value)}.")
            given.append({kind: value[kind] if isinstance(value, dict) else value or 0 for kind in kinds})
        return Sizes(*given)

    @classmethod
    def from_dataset(
        cls, dataset: Iterable[Any], batch_size: int, sample_limit: int | None = None, **values: Any
    ) -> FixedSizeOptions:
        """Sizes sufficient for any `batch_size - 1` graphs of a data set.

        Args:
            dataset: `Data` or `HeteroData`.
            batch_size: number of graphs of a batch, padding graph included.
            sample_limit: number of graphs to inspect; others may then be too large.
            values: padding values.
        """
        graphs = max(batch_size - 1, 1)
        most = largest(sizes_of(graph) for graph in islice(iter(_elements(dataset)), sample_limit))
        return cls._from_sizes(
            Sizes({k: n * graphs for k, n in most.nodes.items()}, {k: n * graphs for k, n in most.edges.items()}),
            batch_size,
            values,
        )

    @classmethod
    def from_loader(cls, loader: Iterable[Any], sample_limit: int | None = None, **values: Any) -> FixedSizeOptions:
        """Sizes that fit all batches of a loader, assuming future batches resemble one epoch's.

        Args:
            loader: loader of `Batch`es, such as a `torch_geometric.loader.DataLoader`, or of single graphs.
            sample_limit: number of batches to inspect; others may then be too large.
            values: padding values.
        """
        batches = list(islice(iter(loader), sample_limit))
        graphs = max((getattr(batch, "num_graphs", 1) for batch in batches), default=1)
        return cls._from_sizes(largest(map(sizes_of, batches)), graphs + 1, values)

    @classmethod
    def _from_sizes(cls, most: Sizes, num_graphs: int, values: dict[str, Any]) -> FixedSizeOptions:
        """Options with one extra node per type, as an endpoint of padding edges."""
        if not most.nodes:
            raise ValueError("FixedSizeOptions: there is no graph to take sizes from.")
        nodes = {kind: count + 1 for kind, count in most.nodes.items()}
        if None in nodes:
            return cls(nodes[None], most.edges[None], num_graphs, **values)
        return cls(nodes, most.edges, num_graphs, **values)


def _elements(dataset: Any) -> Iterable[Any]:
    """Iterate over a data set, even one with only `__getitem__` and `__len__`."""
    return dataset if hasattr(dataset, "__iter__") else (dataset[i] for i in range(len(dataset)))
