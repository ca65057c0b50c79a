"""Layer norm with weights, over an axis that is divided among replicas."""

from __future__ import annotations

from functools import partial

import popxl
from popxl import initial
from popxl.replica_grouping import Groups
from popxl_addons.module import Module
from popxl_addons.named_replica_grouping import resolved
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed


class LayerNormDistributed(Module):
    """`layer_norm_distributed` with equally sharded weights: ``weight`` of ones, ``bias`` of zeros.

    Args:
        replica_grouping: the replicas among which the channels are divided: a grouping, or names of axes. Replicas with
            the same channels share their part of the weights.

    Example:
        The channels are divided between neighbours, and two pairs of replicas do the same.

        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph:
        ...     x = popxl.variable(np.ones((3, 8)), popxl.float32, "x")
        ...     facts, graph = LayerNormDistributed(ir.replica_grouping(stride=1, group_size=2)).create_graph(x)
        ...     (y,) = graph.bind(facts.init()).call(x)
        >>> facts.keys(), facts.weight.shape, y.shape
        (['weight', 'bias'], (8,), (3, 8))
    """

    def __init__(self, replica_grouping: Groups | None = None):
        super().__init__()
        self.replica_grouping = replica_grouping

    def build(self, x: popxl.Tensor, eps: float = 1e-5) -> popxl.Tensor:
        """Normalise the rows of `x`, of shape ``(rows, channels)``. `ValueError` if no grouping was given."""
        if self.replica_grouping is None:
            raise ValueError(
                "LayerNormDistributed: `replica_grouping` is None; expected the replicas among which the channels are "
                "divided, such as `ir.replica_grouping()` for all of them."
            )
        divided = resolved(self.replica_grouping, "LayerNormDistributed: `replica_grouping`")
        shared_by = divided.transpose()
        weight = self.add_variable_input(
            "weight", partial(initial.ones, x.shape[-1]), x.dtype, replica_grouping=shared_by, group_axis=0
        )
        bias = self.add_variable_input(
            "bias", partial(initial.zeros, x.shape[-1]), x.dtype, replica_grouping=shared_by, group_axis=0
        )
        return layer_norm_distributed(x, weight, bias, epsilon=eps, group=divided)
