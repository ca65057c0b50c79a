"""Linear layers whose weights are divided among replicas: tensor parallelism.

The columns of the first layer and the rows of the second are divided. In between each replica has a part of the
channels, and nothing is sent: one all-reduce ends the pair in the forward pass, and one begins it in the backward pass.

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

__all__ = ["TensorParallel"]


class _RowParallelLinear(Linear):
    """`Linear`, the rows of whose weight are divided among replicas. The results are summed, and then get the bias."""

    def __init__(self, out_features: int, bias: bool, group: popxl.ReplicaGrouping):
        super().__init__(out_features, bias, replica_grouping=group.transpose(), group_axis=0)
        self.group = group

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """The own part of `x`, of shape (..., in), to (..., out_features), the same on all replicas of the group."""
        y = replicated_all_reduce_identical_grad_inputs(x @ self._weight(x), group=self.group)
        if not self.bias:
            return y
        return y + self.add_variable_input("bias", partial(initial.zeros, self.out_features), y.dtype)


@dataclass(frozen=True)
class TensorParallel:
    """How a pair of linear layers is divided among the replicas of a group; not at all without a group.

    Attributes:
        layer: the name of what is divided, for errors.
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
        """The number of replicas that have a part each."""
        return 1 if self.group is None else self.group.group_size

    def share(self, count: int, what: str) -> int:
        """The part of `count` that each replica has. `ValueError` if the parts are not equal."""
        if count % self.size:
            raise ValueError(
                f"{self.layer}: {what} is {count}; expected a multiple of {self.size}, the number of replicas along "
                "`tensor` that divide it."
            )
        return count // self.size

    def columns(self, out_features: int, bias: bool) -> Linear:
        """The first layer, `out_features` wide on each replica. Its input has to be `entered`."""
        if self.group is None:
            return Linear(out_features, bias=bias)
        return Linear(out_features, bias=bias, replica_grouping=self.group.transpose(), group_axis=1)

    def rows(self, out_features: int, bias: bool) -> Linear:
        """The second layer, whose result is the same on all replicas."""
        return (
            Linear(out_features, bias=bias)
            if self.group is None
            else _RowParallelLinear(out_features, bias, self.group)
        )

    def entered(self, t: popxl.Tensor) -> popxl.Tensor:
        """`t`, the same on all replicas, of which each uses it for its part: the gradients of the parts are summed."""
        return t if self.group is None else replicated_all_reduce_identical_inputs(t, group=self.group)

    def own_seed(self, seed: popxl.Tensor) -> popxl.Tensor:
        """A seed for the part of this replica, from one that is the same on all: parts drop different elements."""
        if self.group is None:
            return seed
        seeds = ops.split_random_seed(seed, self.size)
        parts = ops.concat([each.reshape((1, *seed.shape)) for each in seeds], 0)
        return ops.collectives.replicated_slice(parts, group=self.group).reshape(seed.shape)
