"""Node and edge trimming: largest graphs first, from the end of each graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from poptorch_geometric.sizes import sizes_of

__all__ = ["without_edges", "without_nodes"]


def without_nodes(graphs: Sequence[Any], excess: dict[Any, int]) -> list[Any]:
    """Remove excess nodes by type, along with their edges."""
    result = list(graphs)
    for kind, count in excess.items():
        kept = _counts_within([sizes_of(graph).nodes.get(kind, 0) for graph in result], count)
        for i, number in enumerate(kept):
            if number < sizes_of(result[i]).nodes.get(kind, 0):
                subset = torch.arange(number)
                result[i] = result[i].subgraph(subset if kind is None else {kind: subset})
    return result


def without_edges(graphs: Sequence[Any], excess: dict[Any, int]) -> list[Any]:
    """Remove excess edges by type."""
    result = list(graphs)
    for kind, count in excess.items():
        kept = _counts_within([sizes_of(graph).edges.get(kind, 0) for graph in result], count)
        for i, number in enumerate(kept):
            if number == sizes_of(result[i]).edges.get(kind, 0):
                continue
            old, result[i] = result[i], result[i].clone()
            before, after = (g._store if kind is None else g[kind] for g in (old, result[i]))
            for name, value in before.items():
                if isinstance(value, torch.Tensor) and before.is_edge_attr(name):
                    after[name] = value.narrow(old.__cat_dim__(name, value, before), 0, number)
    return result


def _counts_within(counts: list[int], excess: int) -> list[int]:
    """Remaining counts after removing `excess` elements from the largest."""
    kept = list(counts)
    for _ in range(min(excess, sum(counts))):
        kept[kept.index(max(kept))] -= 1
    return kept
