"""A lowering that JAX can differentiate: gradients are those that ops and graphs declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from popxl.base.arrays import Array
from popxl.core.derivative import Derivative
from popxl.core.recording import Op
from popxl.core.rounding import RoundingKey
from popxl.core.traits import REFUSED, VJP
from popxl.graph import Graph
from runtime.lowering.channels import AnyChannel, Channels
from runtime.lowering.context import Context
from runtime.lowering.environment import Results
from runtime.lowering.lower import Lowering
from runtime.lowering.op_derivatives import not_differentiable, with_rules
from runtime.lowering.packed_arrays import PackedSlot, load
from runtime.lowering.sharing import Sharing


class DifferentiableLowering(Lowering):
    """A lowering whose ops have their declared gradients, in forward and reverse mode."""

    def channels_of(self, ops: Iterable[Op]) -> tuple[AnyChannel, ...]:
        """The channels that ops use, but for the key of stochastic rounding, which only sessions have."""
        return tuple(c for c in super().channels_of(ops) if not isinstance(c, RoundingKey))

    def lower_call(
        self,
        graph: Graph,
        inputs: Sequence[Array | PackedSlot],
        context: Context,
        packed: bool = False,
        sharing: Sharing = Sharing(),  # noqa: B008  # it has no state
    ) -> Results:
        """Lower a call. Graphs with custom rules use these for differentiation; graphs with few saved values recompute
        the others.
        """
        plain = graph.derivative is None and graph.keeps is None
        if plain or sharing or self.channels_of(graph.ops):  # these are values beside inputs and results
            return super().lower_call(graph, inputs, context, packed, sharing)

        def of_arrays(*arrays: Array) -> tuple[Array, ...]:
            channels = Channels({})
            inside = Context(channels).in_loop_body(channels)
            return tuple(super(DifferentiableLowering, self).lower_call(graph, arrays, inside).outputs)

        of_arrays.__name__ = of_arrays.__qualname__ = graph.id.rpartition("_subgraph")[0] or "graph"
        changed = _recomputing(graph, of_arrays) if graph.derivative is None else _by_rule(graph.derivative, of_arrays)
        return Results(changed(*map(load, inputs)), {})

    def apply(self, op: Op, operands: Sequence[Array], channels: Channels) -> Any:
        """Compute a differentiable op's results, under names where its graph keeps them."""
        results = self._apply(op, operands, channels)
        if op.graph.keeps is None or op.graph.keeps.isdisjoint(op.outputs):
            return results
        return jax.tree.map(lambda value: checkpoint_name(value, op.name), results)

    def _apply(self, op: Op, operands: Sequence[Array], channels: Channels) -> Any:
        rule = op.kind.gradient
        if op.modified or op.kind.between_replicas or not any(t.dtype.is_inexact for t in op.outputs):
            return super().apply(op, operands, channels)  # refused by autodiff, or of one replica: JAX's gradient
        if rule is None:
            return op.apply([jax.lax.stop_gradient(operand) for operand in operands])
        if rule is REFUSED:
            return not_differentiable(op)(*operands)
        if rule is VJP:
            return op.apply(operands)
        return with_rules(op)(*operands)


def _by_rule(derivative: Derivative, of_arrays: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """Function of a graph with a custom derivative; outputs added by autodiff use JAX's."""
    function = jax.custom_jvp(of_arrays)

    @function.defjvp
    def moved(arrays: Sequence[Array], tangents: Sequence[Array]) -> Any:
        _, own = jax.jvp(derivative.on_arrays, arrays, tangents)
        _, others = jax.jvp(of_arrays, arrays, tangents)
        return function(*arrays), (*own, *others[derivative.results :])

    return function


def _recomputing(graph: Graph, of_arrays: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """Function of a graph with recomputation for its gradient, except for saved and offloaded values."""
    saved, offloaded = (
        sorted({t.producer.name for t in tensors if t.producer is not None})
        for tensors in ((graph.keeps or frozenset()) - graph.offloads, graph.offloads)
    )
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(of_arrays, policy=policy)
