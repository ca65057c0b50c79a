"""Linear layers whose weights are divided among replicas: tensor parallelism.

The columns of the first layer and the rows of the second are divided. In between each replica has a part of the
channels, without communication: one all-reduce ends the pair in the forward pass, and one begins it in the backward
pass.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import popxl
from popxl import initial, ops
from popxl.replica_grouping import Groups
from popxl_addons.layers.linear import Linear
from popxl_addons.named_replica_grouping import resolved
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)


class _RowParallelLinear(Linear):
    """`Linear`, the rows of whose weight are divided among replicas. The results are summed, and then get the bias."""

    def __init__(self, out_features: int, bias: bool, group: popxl.ReplicaGrouping):
        super().__init__(out_features, bias, replica_grouping=group.transpose(), group_axis=0)
        self.group = group

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Map the own shard of `x`, shape (..., in), to (..., out_features), equal on all group members."""
        y = replicated_all_reduce_identical_grad_inputs(x @ self._weight(x), group=self.group)
        if not self.bias:
            return y
        return y + self.add_variable_input("bias", partial(initial.zeros, self.out_features), y.dtype)


@dataclass(frozen=True)
class TensorParallel:
    """Division of linear layer pairs over a replica group; trivial without group.

    Attributes:
        layer: name of the layer, for errors.
        group: the replicas.
    """

    layer: str
    group: popxl.ReplicaGrouping | None

    @classmethod
    def along(cls, group: Groups | None, layer: str) -> TensorParallel:
        """The division along axes of the current Ir, or among the replicas of a grouping."""
        return cls(layer, None if group is None else resolved(group, f"{layer}: `tensor`"))

    @property
    def size(self) -> int:
        """Number of shards."""
        return 1 if self.group is None else self.group.group_size

    def share(self, count: int, what: str) -> int:
        """Shard size of `count`. Raises `ValueError` for unequal shards."""
        if count % self.size:
            raise ValueError(
                f"{self.layer}: {what} is {count}; expected a multiple of {self.size}, the number of replicas along "
                "`tensor` that divide it."
            )
        return count // self.size

    def columns(self, out_features: int, bias: bool) -> Linear:
        """First layer, `out_features` wide per replica. Its input must be `entered`."""
        if self.group is None:
            return Linear(out_features, bias=bias)
        return Linear(out_features, bias=bias, replica_grouping=self.group.transpose(), group_axis=1)

    def rows(self, out_features: int, bias: bool) -> Linear:
        """Second layer, with equal results on all replicas."""
        return (
            Linear(out_features, bias=bias)
            if self.group is None
            else _RowParallelLinear(out_features, bias, self.group)
        )

    def entered(self, t: popxl.Tensor) -> popxl.Tensor:
        """Mark `t`, equal on all replicas, as input of sharded layers: gradients are summed."""
        return t if self.group is None else replicated_all_reduce_identical_inputs(t, group=self.group)

    def own_seed(self, seed: popxl.Tensor) -> popxl.Tensor:
        """Derive a replica-specific seed from a common seed, for independent dropout per shard."""
        if self.group is None:
            return seed
        seeds = ops.split_random_seed(seed, self.size)
        parts = ops.concat([each.reshape((1, *seed.shape)) for each in seeds], 0)
        return ops.collectives.replicated_slice(parts, group=self.group).reshape(seed.shape)
