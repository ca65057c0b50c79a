"""Fully sharded data parallelism: layers that gather their weights themselves.

A model whose weights are whole is called with what was gathered for all layers at once. Where called graphs take
shards instead, and gather each weight right before they read it, one layer is whole at a time. The gradient graph of
such a layer gathers again, and shares out its gradients: see `popxl_addons.ops.weight_gather`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial

import popxl
from popxl.extend.arguments import check_type
from popxl.extend.collectives import shard_count
from popxl.extend.graphs import is_call
from popxl.extend.ops import Op
from popxl.tensor import Variable
from popxl_addons.grad_info import merge_called_graphs
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.weight_gather import gather_weight
from popxl_addons.transforms.graph_copies import Transfers, copy_graph

__all__ = ["gather_in_calls"]


@dataclass(frozen=True)
class _Shards:
    """How replicas hold a weight: what one of them has, and which have the rest."""

    spec: popxl.TensorSpec
    group: popxl.ReplicaGrouping = field(hash=False)


_ByInput = dict[int, _Shards]


def gather_in_calls(graph: GraphWithNamedArgs, variables: NamedTensors) -> GraphWithNamedArgs:
    """A copy of a graph that takes shards of what only graphs read that it calls: those gather, in copies, too.

    The gradient of such a shard is that of the mean over the replicas. Weights that the graph reads itself stay whole;
    so do those of graphs whose gradients are given, as these are of whole weights.

    Args:
        graph: the model, with whole weights as `args`.
        variables: by the same names, what is to be bound. Those that are sharded variables count. Their shards are
            inputs of the copy: as float32, if they are halves.

    Returns:
        The copy; the graph itself if it has no such weights.

    Example:
        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     spec = popxl.TensorSpec((2, 2), popxl.float32)
        ...     layer = ir.create_graph(lambda x, w: x @ w, spec, spec)
        ...     model = ir.create_graph(lambda x, w: popxl.ops.call(layer, x, w), spec, spec)
        ...     named = GraphWithNamedArgs(model, NamedTensors(w=model.inputs[1]))
        ...     w, _ = popxl.replica_sharded_variable(np.ones((2, 2)), popxl.float32, "w")
        ...     copy = gather_in_calls(named, NamedTensors(w=w))
        >>> named.args.w.shape, copy.args.w.shape
        ((2, 2), (2,))
    """
    check_type(graph, GraphWithNamedArgs, "gather_in_calls: `graph`", "a GraphWithNamedArgs")
    inputs, known = graph.graph.inputs, variables.to_dict()
    held = {inputs.index(t): _shards_of(known.get(name)) for name, t in graph.args.to_dict().items()}
    shards = {i: each for i, each in held.items() if each is not None}
    copies = _Copies(merge_called_graphs(graph.called_graphs_grad_info))
    passed = {i: each for i, each in shards.items() if copies.is_only_passed(graph.graph, inputs[i])}
    if not passed:
        return graph
    copy = copies.copy(graph.graph, passed)
    copies.remove_originals()
    args = graph.args.remap(dict(zip(inputs, copy.inputs, strict=True)))
    return GraphWithNamedArgs(copy, args, called_graphs_grad_info=graph.called_graphs_grad_info)


def _shards_of(variable: popxl.Tensor | None) -> _Shards | None:
    """The shards of a variable, if each replica of its group has one. Halves come as float32, for their gradients."""
    if not isinstance(variable, Variable) or variable.piece is None:
        return None
    group, piece = variable.replica_grouping, variable.piece
    if not group.is_const or shard_count(variable.nelms, piece.nelms, group.group_size) < group.group_size:
        return None
    dtype = popxl.float32 if piece.dtype.is_half else piece.dtype
    return _Shards(popxl.TensorSpec(piece.shape, dtype, piece.meta_shape), group)


@dataclass
class _Copies:
    """Copies of graphs that take shards, one for each combination of inputs.

    Attributes:
        given: graphs whose gradients are given.
    """

    given: Container[popxl.Graph]
    made: dict[tuple[popxl.Graph, frozenset[tuple[int, _Shards]]], popxl.Graph] = field(default_factory=dict)

    def is_only_passed(self, graph: popxl.Graph, t: popxl.Tensor) -> bool:
        """Whether nothing reads an input of a graph but calls of graphs that may be copied."""
        readers = [op for op in graph.ops if t in op.inputs]
        return bool(readers) and t not in graph.outputs and all(self._takes(op, t) for op in readers)

    def _takes(self, op: Op, t: popxl.Tensor) -> bool:
        if not is_call(op):
            return False
        (run,) = op.runs
        callee = run.graph
        is_differentiated = callee not in self.given and callee.differentiable and callee.derivative is None
        own = [inner for inner, outer in zip(run.inputs, run.given, strict=False) if outer is t]
        return is_differentiated and run.is_bound and not any(inner.by_ref for inner in own)

    def copy(self, graph: popxl.Graph, shards: _ByInput) -> popxl.Graph:
        """Copy a graph, with shards for some inputs, by position. What it reads itself, it gathers first."""
        key = graph, frozenset(shards.items())
        if key not in self.made:
            self.made[key] = self._copy(graph, shards)
        return self.made[key]

    def remove_originals(self) -> None:
        """Remove the graphs that were copied, callers first, unless something else calls them."""
        for graph, _ in reversed(self.made):
            if not graph.call_sites and graph in graph.ir.graphs:
                graph.ir.remove_graph(graph)

    def _copy(self, graph: popxl.Graph, shards: _ByInput) -> popxl.Graph:
        passed = {t: shards[i] for i, t in enumerate(graph.inputs) if i in shards and self.is_only_passed(graph, t)}
        callees = {}
        for op in graph.ops:
            if not passed.keys().isdisjoint(op.inputs):
                (run,) = op.runs
                callees[op] = self.copy(run.graph, {j: passed[t] for j, t in enumerate(run.given) if t in passed})
        copy = graph.ir.create_empty_graph(graph.name.partition("_subgraph")[0])
        own = [
            copy.add_input(shards[i].spec if i in shards else t.spec, t.name, t.by_ref, t.path)
            for i, t in enumerate(graph.inputs)
        ]
        gathers = {
            t: partial(_gathered, own[i], t, shards[i].group)
            for i, t in enumerate(graph.inputs)
            if i in shards and t not in passed
        }
        given = {t: twin for t, twin in zip(graph.inputs, own, strict=True) if t not in gathers}
        _, of = copy_graph(graph, Transfers(fetched=gathers), copy, given, callees)
        copy.show_as({of[t]: f"{t.path}_all_gathered" for t in gathers if t in of})
        return copy


def _gathered(
    shard: popxl.Tensor, weight: popxl.Tensor, group: popxl.ReplicaGrouping, latest: popxl.Tensor | None
) -> popxl.Tensor:
    return gather_weight(shard, weight.dtype, group)
