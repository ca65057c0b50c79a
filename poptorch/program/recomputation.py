"""Recomputation options: regions added to a model's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from popart import RecomputationType
from poptorch.base.logging_ import logger
from poptorch.capture.recomputation import as_calls, between_checkpoints, keeping_all_but_norms, layers
from poptorch.capture.trace import Node, Value
from poptorch.options import Options

_OF_LAYERS = (RecomputationType.Standard, RecomputationType.NormOnly)


class Recomputation:
    """Recomputed regions of a model in training."""

    def __init__(self, options: Options, nodes: Sequence[Node]) -> None:
        pipelines = options.execution_strategy.overlaps_stages
        self._by_stage = pipelines and any(a.placement.unit != b.placement.unit for a, b in pairwise(nodes))
        self._kind = options._Popart.recomputation
        if self._kind is RecomputationType.Pipeline and not self._by_stage:
            logger.warning(
                "autoRecomputation: 'Pipeline' has no effect here, where the model is not a pipeline of several IPUs: "
                "only its checkpoints are recomputed."
            )
        if self._kind is RecomputationType.RecomputeAll and not any(node.is_saved or node.regions for node in nodes):
            logger.warning(
                "autoRecomputation: 'RecomputeAll' has no effect here, where the model has no recomputationCheckpoint: "
                "it recomputes the ops between two of them."
            )

    def before_outlining(self, nodes: Sequence[Node]) -> list[Node]:
        """Ops with added regions that require no module information."""
        if self._kind in (None, RecomputationType.Pipeline):
            return between_checkpoints(nodes, self._by_stage)
        if self._kind is RecomputationType.RecomputeAll:
            return between_checkpoints(nodes, by_stage=False, to_the_end=True)
        if self._kind is RecomputationType.NormOnly:
            return keeping_all_but_norms(nodes)
        return list(nodes)

    def leave_out(self, nodes: Sequence[Node], names: Sequence[str]) -> None:
        """Warn about disabled recomputation, if any was configured, because tensors inside the model are requested."""
        if self._kind in _OF_LAYERS or any(node.regions for node in self.before_outlining(nodes)):
            logger.warning(
                "anchorTensor asks for %s, within the model, so that no activations are recomputed in the backward "
                "pass: checkpoints need as much memory as without them.",
                ", ".join(names),
            )

    def after_outlining(self, nodes: Sequence[Node], wanted: Iterable[Value]) -> list[Node]:
        """Ops with recomputed regions replaced by calls."""
        if self._kind in _OF_LAYERS:
            nodes = layers(nodes)
        return as_calls(nodes, wanted)
