"""Type aliases for graphs, and for gradient information, as arguments."""

from __future__ import annotations

from collections.abc import Mapping

import popxl
from popxl.transforms import GradGraphInfo
from popxl_addons.graph import BoundGraph, GraphWithNamedArgs

GraphLike = popxl.Graph | GraphWithNamedArgs | BoundGraph
GradGraphInfoLike = GradGraphInfo | GraphWithNamedArgs
# The second form is for type checkers only: a mapping with keys of one kind is not a mapping of all kinds.
CalledGraphsGradInfoLike = Mapping[GraphLike, GradGraphInfoLike] | Mapping[popxl.Graph, GradGraphInfoLike]
CalledGraphsGradInfo = Mapping[popxl.Graph, GradGraphInfo]
