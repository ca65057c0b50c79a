"""Node and edge counts of graphs by type, and fit into fixed-size batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Sizes", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """Node and edge counts by type; homogeneous graphs use the type `None`.

    Args:
        nodes: numbers of nodes, by type.
        edges: numbers of edges, by type, which names the types of both ends.
    """

    nodes: dict[Any, int]
    edges: dict[Any, int]

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(_sums(self.nodes, other.nodes), _sums(self.edges, other.edges))

    def excess_nodes(self, budget: Sizes) -> dict[Any, int]:
        """Excess node counts by type, omitting types without excess. Padding edges require one node."""
        excess = {}
        for kind, count in self.nodes.items():
            needs = any(
                self.edges.get(edge, 0) < limit and (edge is None or kind in (edge[0], edge[2]))
                for edge, limit in budget.edges.items()
            )
            if (more := count + needs - budget.nodes.get(kind, 0)) > 0:
                excess[kind] = more
        return excess

    def excess_edges(self, budget: Sizes) -> dict[Any, int]:
        """Excess edge counts by type, omitting types without excess."""
        return {kind: more for kind, n in self.edges.items() if (more := n - budget.edges.get(kind, 0)) > 0}

    def fits(self, budget: Sizes) -> bool:
        """Whether padding can fill a batch of this size up to the budget."""
        return not self.excess_nodes(budget) and not self.excess_edges(budget)


def _sums(a: dict[Any, int], b: dict[Any, int]) -> dict[Any, int]:
    return {kind: a.get(kind, 0) + b.get(kind, 0) for kind in {**a, **b}}


def sizes_of(graph: Any) -> Sizes:
    """Size of a `Data` or `HeteroData`."""
    if hasattr(graph, "node_types"):
        return Sizes(
            {kind: int(graph[kind].num_nodes) for kind in graph.node_types},
            {kind: graph[kind].num_edges for kind in graph.edge_types},
        )
    return Sizes({None: int(graph.num_nodes)}, {None: graph.num_edges})


def largest(sizes: Iterable[Sizes]) -> Sizes:
    """Maximum count of each type."""
    nodes: dict[Any, int] = {}
    edges: dict[Any, int] = {}
    for each in sizes:
        for found, counts in ((nodes, each.nodes), (edges, each.edges)):
            for kind, count in counts.items():
                found[kind] = max(found.get(kind, 0), count)
    return Sizes(nodes, edges)
