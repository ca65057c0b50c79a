"""What counts as a graph, and as gradient information, wherever either is asked for. Type aliases only."""

from __future__ import annotations

from collections.abc import Mapping

import popxl
from popxl.transforms import GradGraphInfo
from popxl_addons.graph import BoundGraph, GraphWithNamedArgs

GraphLike = popxl.Graph | GraphWithNamedArgs | BoundGraph
GradGraphInfoLike = GradGraphInfo | GraphWithNamedArgs
# The second form says nothing new, except to type checkers: a mapping with keys of one kind is no mapping of all kinds.
CalledGraphsGradInfoLike = Mapping[GraphLike, GradGraphInfoLike] | Mapping[popxl.Graph, GradGraphInfoLike]
CalledGraphsGradInfo = Mapping[popxl.Graph, GradGraphInfo]
