"""Batching options for fixed-size graph batches, and strategies for oversized graphs."""

from __future__ import annotations

import enum

__all__ = ["FixedSizeStrategy", "OverSizeStrategy"]


class FixedSizeStrategy(enum.Enum):
    """Selection of graphs for a batch."""

    PadToMax = "PadToMax"
    """Always the same number of graphs, one less than `batch_size`."""
    StreamPack = "StreamPack"
    """As many as fit, in the order of the data set: a batch ends before the graph that does not fit any more."""


class OverSizeStrategy(enum.Enum):
    """Strategy for graphs that do not fit into a batch."""

    Error = "Error"
    """Raise an error."""
    Skip = "Skip"
    """Leave out graphs that do not fit."""
    TrimNodes = "TrimNodes"
    """Remove nodes, with their edges. It is an error if there still are too many edges."""
    TrimEdges = "TrimEdges"
    """Remove edges. It is an error if there are too many nodes."""
    TrimNodesAndEdges = "TrimNodesAndEdges"
    """Remove nodes, with their edges, and then edges."""

    @property
    def trims_nodes(self) -> bool:
        """Whether nodes are removed."""
        return self in (OverSizeStrategy.TrimNodes, OverSizeStrategy.TrimNodesAndEdges)

    @property
    def trims_edges(self) -> bool:
        """Whether edges are removed."""
        return self in (OverSizeStrategy.TrimEdges, OverSizeStrategy.TrimNodesAndEdges)
