"""A mixture of experts: networks divided among replicas, of which each token passes through a few."""

from __future__ import annotations

import math
from typing import get_args

import jax.numpy as jnp
import numpy as np

import popxl
from popxl import OpKind, ops
from popxl.extend.arguments import integer, number, word
from popxl.extend.ops import like_first
from popxl.op import ShardingRule
from popxl.replica_grouping import Groups
from popxl_addons.layers._values import drawn_weights
from popxl_addons.layers.transformer import Activation, activated
from popxl_addons.module import Module
from popxl_addons.named_replica_grouping import resolved

_of_mean = OpKind(
    "GradientOfMean",
    lambda w, *, size: w,
    shape=like_first,
    gradient={"w": lambda g, size: g * (1 / size)},
    traits=[ShardingRule(linear=("w",))],
    key="popxl_addons.GradientOfMean",
)
"""Identity whose gradient, a sum over `size` losses, is divided by `size` to that of their mean."""


def _reverse_dispatch(g: popxl.Tensor, index: popxl.Tensor, inverse: popxl.Tensor, times: int) -> popxl.Tensor:
    rows = _picked(g, inverse, index, times=1)
    return ops.sum(rows.reshape((times, -1, *rows.shape[1:])), axis=0) if times > 1 else rows


_picked = OpKind(
    "PickRows",
    lambda t, index, inverse, *, times: jnp.take(
        t, jnp.where(index < times * len(t), index % len(t), len(t)), axis=0, mode="fill", fill_value=0
    ),
    shape=lambda t, index, inverse, *, times: popxl.TensorSpec((*index.shape, *t.shape[1:]), t.dtype),
    gradient={"t": _reverse_dispatch},
    key="popxl_addons.PickRows",
)
"""Selected rows of `t` repeated `times`; zeros for indices beyond it.

Each of these rows is picked once at most, and `inverse` says where to: so gradients are picked, too, where those of
`ops.gather` are added up, which takes accelerators longer.
"""


class Experts(Module):
    """Mixture of experts: a router selects networks per token, giving ``sum of gate * expert(token)`` over top experts.

    Replicas of a `group` divide the experts, and each has its own tokens. Tokens are sent to the replicas of their
    experts, and back: two all-to-alls, and two for the gradients. An expert takes the first tokens of each replica up
    to its capacity; a token beyond it adds nothing, so keep ``x +`` around the layer.

    Variables, without biases: `router` of shape (width, count), in float32; and, of the dtype of `x` and of the experts
    that a replica has, `up` of shape (experts, width, hidden) and `down` of shape (experts, hidden, width); with
    `activation="swiglu"` also `gate`, like `up`. Their initial values are as for the weight of `Linear`.

    Tokens come from all replicas of the group, and each has a loss of its own. The gradient of an expert is that of the
    mean of these losses. So the mean of gradients over the replicas that share a variable, as `train_step` takes it, is
    right for all variables.

    Args:
        count: number of experts, a multiple of the size of the group.
        hidden: width of an expert; by default four times the width of `x`.
        chosen: number of experts of a token. The gate of a single expert is its probability; those of several are
            divided by their sum.
        capacity_factor: capacity of an expert, in multiples of its tokens under an even distribution.
        activation: activation, as for `MLP`.
        group: the replicas that experts are divided among: a grouping, or names of axes; by default each replica has
            all experts.

    Raises:
        ValueError: if `count` is not a multiple of the size of the group, `chosen` is not within 1 and `count`, or
            `capacity_factor` is not above 0.

    See also: Fedus et al., "Switch Transformers" (2021), and Lepikhin et al., "GShard" (2020).

    Example:
        >>> with popxl.Ir(axes={"data": 2, "expert": 4}).main_graph:
        ...     text = popxl.TensorSpec((2, 16, 6), popxl.float32)
        ...     facts, graph = Experts(8, group="expert").create_graph(text)
        >>> facts.up.shape, [t.shape for t in graph.graph.outputs]
        ((2, 6, 24), [(2, 16, 6), ()])
    """

    def __init__(
        self,
        count: int,
        hidden: int | None = None,
        *,
        chosen: int = 1,
        capacity_factor: float = 1.25,
        activation: Activation = "gelu",
        group: Groups | None = None,
    ):
        super().__init__()
        self.count, self.chosen = integer(count, "Experts: `count`"), integer(chosen, "Experts: `chosen`")
        if not 1 <= self.chosen <= self.count:
            raise ValueError(f"Experts: `chosen` is {chosen}; expected 1 to {count}, as many as there are experts.")
        self.capacity_factor = number(capacity_factor, "Experts: `capacity_factor`")
        if not self.capacity_factor > 0:
            raise ValueError(f"Experts: `capacity_factor` is {capacity_factor}; expected a number above 0.")
        self.hidden = None if hidden is None else integer(hidden, "Experts: `hidden`")
        self.activation = word(activation, "Experts: `activation`", get_args(Activation))
        self.group = group

    def build(self, x: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        """Map `x` of shape (..., width) to equal shape, plus a float32 auxiliary loss to scale by about 0.01.

        That is 1 where the tokens of this replica are divided evenly among experts, and more where they are not: the
        number of experts times the sum, over them, of the share of tokens that choose one and its mean probability
        (Fedus et al., equation 4).
        """
        size = 1 if self.group is None else resolved(self.group, "Experts: `group`").group_size
        if self.count % size:
            raise ValueError(
                f"Experts: `count` is {self.count}; expected a multiple of {size}, the size of the group that experts "
                "are divided among."
            )
        rows = x.reshape((-1, x.shape[-1]))
        tokens = rows.shape[0]
        routes = drawn_weights("Experts", popxl.float32, rows.shape[1], self.count)
        router = self.add_variable_input("router", routes, popxl.float32)
        probabilities = ops.softmax(rows.astype(popxl.float32) @ router, axis=-1)
        gates, chosen = ops.topk(probabilities, self.chosen, axis=1, largest=True, sorted=True)
        if self.chosen > 1:
            gates = gates / ops.sum(gates, axis=1, keepdims=True)

        choices = ops.flatten(chosen.T)  # the first of all tokens, then the second: these are the first without a place
        is_chosen = ops.onehot(choices, popxl.constant(self.count), popxl.constant([0, 1]), axis=-1)
        rank = ops.sum(ops.cumsum(is_chosen) * is_chosen, axis=1) - 1
        capacity = math.ceil(tokens * self.chosen / self.count * self.capacity_factor)
        slots = self.count * capacity
        slot = ops.where(rank < capacity, choices * capacity + rank, slots)  # which is beyond the last
        unassigned = popxl.constant(np.full(slots, choices.nelms, np.int32))
        choice = ops.scatter(unassigned, slot, ops.arange(choices.nelms))

        dispatched = _picked(rows, choice, slot, times=self.chosen).reshape((self.count, capacity, rows.shape[1]))
        combined = self._experts(dispatched).reshape((slots, rows.shape[1]))
        weighted = _picked(combined, slot, choice, times=1).reshape((self.chosen, *rows.shape))
        y = ops.sum(weighted * gates.T.reshape((self.chosen, tokens, 1)).astype(x.dtype), axis=0)

        shares = ops.mean(is_chosen.astype(popxl.float32), axis=0)
        balance = ops.sum(shares * ops.mean(probabilities, axis=0)) * self.count
        return y.reshape(x.shape), balance

    def _experts(self, tokens: popxl.Tensor) -> popxl.Tensor:
        """Outputs of the experts, maybe on other replicas, for local `tokens` of shape (count, capacity, width)."""
        if self.group is None:
            return self._own_experts(tokens)
        tokens = ops.collectives.replicated_all_to_all(tokens, 0, 1, self.group)
        return ops.collectives.replicated_all_to_all(self._own_experts(tokens), 1, 0, self.group)

    def _own_experts(self, tokens: popxl.Tensor) -> popxl.Tensor:
        """Apply the replica's experts to their tokens: (experts, tokens, width) to equal shape."""
        experts, _, width = tokens.shape
        hidden = 4 * width if self.hidden is None else self.hidden
        group = None if self.group is None else resolved(self.group, "Experts: `group`")

        def layer(name: str, t: popxl.Tensor, size: int) -> popxl.Tensor:
            initial_weights = drawn_weights("Experts", t.dtype, experts, t.shape[-1], size)
            if group is None:
                return t @ self.add_variable_input(name, initial_weights, t.dtype)
            expert_group = group.transpose()
            w = self.add_variable_input(name, initial_weights, t.dtype, replica_grouping=expert_group, group_axis=0)
            return t @ _of_mean(w, size=group.group_size)

        inner = activated(self.activation, lambda name: layer(name, tokens, hidden))
        return layer("down", inner, width)
