"""Fully sharded data parallelism: layers that gather their weights themselves.

A model whose weights are whole is called with what was gathered for all layers at once. Where graphs take shards
instead, and gather each weight right before they read it, one layer is whole at a time. The gradient graph of such a
layer gathers again, and shares out its gradients: see `popxl_addons.ops.weight_gather`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import popxl
from popxl.extend.arguments import check_type
from popxl.extend.collectives import shard_count
from popxl.extend.graphs import final_ipu, is_call, written_inputs
from popxl.extend.ops import Op, available_after_all, picks_rows
from popxl.tensor import Variable
from popxl_addons.grad_info import merge_called_graphs
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.weight_gather import (
    gather_weight,
    gathers_weights,
    is_gather,
    is_looked_up_cheaper,
    look_up_rows,
    shares_out_gradients,
)
from popxl_addons.transforms.graph_copies import Transfers, copy_graph


@dataclass(frozen=True)
class _Shards:
    """Sharding of a weight: spec of a shard, and the group that holds all shards."""

    spec: popxl.TensorSpec
    group: popxl.ReplicaGrouping = field(hash=False)


_ByInput = dict[int, _Shards]


def gather_where_read(graph: GraphWithNamedArgs, variables: NamedTensors) -> GraphWithNamedArgs:
    """Copy a graph to take shards, and gather each weight where it is read, in copies of the called graphs.

    The gradient of such a shard is that of the mean over the replicas. A graph whose gradient is given is called with
    whole weights. A weight that the graph reads itself is released before it calls a graph that gathers: it gathers the
    weight again if it reads it after that. Weights that the graph overwrites or returns stay whole.

    Args:
        graph: the model, with whole weights as `args`.
        variables: bindings by the same names. Sharded variables among them are inputs of the copy, as shards; halves as
            float32.

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
        ...     copy = gather_where_read(named, NamedTensors(w=w))
        >>> named.args.w.shape, copy.args.w.shape
        ((2, 2), (2,))
    """
    check_type(graph, GraphWithNamedArgs, "gather_where_read: `graph`", "a GraphWithNamedArgs")
    inputs, tensors = graph.graph.inputs, variables.to_dict()
    by_input = {inputs.index(t): _shards_of(tensors.get(shards_)) for shards_, t in graph.args.to_dict().items()}
    copies = _Copies(merge_called_graphs(graph.called_graphs_grad_info))
    only_read = copies.read_only_inputs(graph.graph)
    shards = {i: s for i, s in by_input.items() if s is not None and inputs[i] in only_read}
    if not shards:
        return graph
    copy = copies.copy(graph.graph, shards)
    copies.remove_originals()
    args = graph.args.remap(dict(zip(inputs, copy.inputs, strict=True)))
    return GraphWithNamedArgs(copy, args, called_graphs_grad_info=graph.called_graphs_grad_info)


def share_out_before_calls(graph: popxl.Graph) -> None:
    """Order calls in a gradient graph after earlier reduce-scatters of gradients on their IPU.

    XLA puts off what nothing waits for, and keeps what it is computed from until then.

    Example:
        >>> ir = popxl.Ir()
        >>> share_out_before_calls(ir.create_graph(lambda x: x * 2.0, popxl.TensorSpec((), popxl.float32)))
    """
    gradients = defaultdict[int | None, list[popxl.Tensor]](list)  # by IPU
    for op in graph.ops:
        if shares_out_gradients(op):
            gradients[final_ipu(op.outputs[0])] += op.outputs
        elif (computed := _computed_inputs(op)) and (earlier := gradients.pop(final_ipu(computed[0]), [])):
            _replace_inputs(op, computed[:1], partial(available_after_all, others=tuple(earlier)))


def _release_before_calls(graph: popxl.Graph) -> None:
    """Order gathering calls after the computation of their inputs, once the graph has gathered weights itself.

    XLA would compute embeddings again where they are read, and keep the table until then.
    """
    is_any_gathered = False
    for op in graph.ops:
        if is_any_gathered and gathers_weights(op):
            _replace_inputs(op, _computed_inputs(op), lambda t: popxl.ops.available_after(t, t))
            is_any_gathered = False
        is_any_gathered |= is_gather(op)


def _computed_inputs(op: Op) -> list[popxl.Tensor]:
    """Computed inputs of a call, without those by reference; empty for other ops."""
    if not is_call(op):
        return []
    (run,) = op.runs
    referred = {outer for inner, outer in zip(run.inputs, run.operands, strict=False) if inner.by_ref}
    return [t for t in dict.fromkeys(run.operands) if t.producer is not None and t not in referred]


def _replace_inputs(call: Op, inputs: Sequence[popxl.Tensor], replace: Callable[[popxl.Tensor], popxl.Tensor]) -> None:
    """Replace inputs of a call by a function of them."""

    def again(*operands: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        replaced = {t: replace(t) for t in inputs}
        return call.clone([replaced.get(t, t) for t in operands]).outputs

    if inputs:
        call.graph.replace([call], again)


def _shards_of(variable: popxl.Tensor | None) -> _Shards | None:
    """Sharding of a variable with one shard per replica of its group; else `None`. Halves come as float32, for their
    gradients."""
    if not isinstance(variable, Variable) or variable.piece is None:
        return None
    group, shard = variable.replica_grouping, variable.piece
    if not group.is_const or shard_count(variable.nelms, shard.nelms, group.group_size) < group.group_size:
        return None
    dtype = popxl.float32 if shard.dtype.is_half else shard.dtype
    return _Shards(popxl.TensorSpec(shard.shape, dtype, shard.meta_shape), group)


@dataclass
class _Copies:
    """Copies of graphs that take shards, one for each combination of inputs."""

    differentiated: Container[popxl.Graph]
    copies: dict[tuple[popxl.Graph, frozenset[tuple[int, _Shards]]], popxl.Graph] = field(default_factory=dict)
    _read_only: dict[popxl.Graph, set[popxl.Tensor]] = field(default_factory=dict)

    def read_only_inputs(self, graph: popxl.Graph) -> set[popxl.Tensor]:
        """Inputs of a graph that it reads, and neither overwrites nor returns."""
        if graph not in self._read_only:
            operands, overwritten = {t for op in graph.ops for t in op.inputs}, written_inputs(graph)
            self._read_only[graph] = {
                t
                for i, t in enumerate(graph.inputs)
                if t in operands and i not in overwritten and not t.by_ref and t not in graph.outputs
            }
        return self._read_only[graph]

    def is_only_passed(self, graph: popxl.Graph, t: popxl.Tensor) -> bool:
        """Whether nothing reads an input of a graph but calls of graphs that may be copied."""
        readers = [op for op in graph.ops if t in op.inputs]
        return bool(readers) and t not in graph.outputs and all(self._takes(op, t) for op in readers)

    def _takes(self, op: Op, t: popxl.Tensor) -> bool:
        if not is_call(op):
            return False
        (run,) = op.runs
        callee = run.graph
        is_differentiated = callee not in self.differentiated and callee.differentiable and callee.derivative is None
        inner_inputs = {inner for inner, outer in zip(run.inputs, run.operands, strict=False) if outer is t}
        return is_differentiated and run.is_bound and inner_inputs <= self.read_only_inputs(callee)

    def copy(self, graph: popxl.Graph, shards: _ByInput) -> popxl.Graph:
        """Copy a graph, with shards for some inputs, by position. What it reads itself, it gathers first."""
        key = graph, frozenset(shards.items())
        if key not in self.copies:
            self.copies[key] = self._copy(graph, shards)
        return self.copies[key]

    def remove_originals(self) -> None:
        """Remove the graphs that were copied, callers first, unless something else calls them."""
        for graph, _ in reversed(self.copies):
            if not graph.call_sites and graph in graph.ir.graphs:
                graph.ir.remove_graph(graph)

    def _copy(self, graph: popxl.Graph, shards: _ByInput) -> popxl.Graph:
        """Copy a graph: it gathers what it reads, looks rows up where that is cheaper, and hands on shards to calls."""
        relayed = {t: shards[i] for i, t in enumerate(graph.inputs) if i in shards and self.is_only_passed(graph, t)}
        callees = {}
        for op in graph.ops:
            if not relayed.keys().isdisjoint(op.inputs):
                (run,) = op.runs
                callees[op] = self.copy(run.graph, {j: relayed[t] for j, t in enumerate(run.operands) if t in relayed})
        copy = graph.ir.create_empty_graph(graph.name.partition("_subgraph")[0])
        inputs = [
            copy.add_input(shards[i].spec if i in shards else t.spec, t.name, t.by_ref, t.path)
            for i, t in enumerate(graph.inputs)
        ]
        gathers = {
            t: partial(_gathered, inputs[i], t, shards[i].group)
            for i, t in enumerate(graph.inputs)
            if i in shards and t not in relayed
        }
        bindings = {t: twin for t, twin in zip(graph.inputs, inputs, strict=True) if t not in gathers}
        lookups = {}
        for op in (op for op in graph.ops if picks_rows(op) and op.inputs[0] in gathers):
            table, indices = op.inputs
            i = graph.inputs.index(table)
            if indices not in gathers and is_looked_up_cheaper(table.shape, indices, shards[i].group):
                lookups[op] = partial(_looked_up, inputs[i], table, indices, shards[i].group)
        calls_before = dict(zip(graph.ops, accumulate((op in callees for op in graph.ops), initial=0), strict=False))
        transfers = Transfers(fetched=gathers, period=calls_before.get)
        _, copied = copy_graph(graph, transfers, copy, bindings, callees, lookups)
        _release_before_calls(copy)
        copy.show_as({copied[t]: f"{t.path}_all_gathered" for t in gathers if t in copied})
        return copy


def _gathered(
    shard: popxl.Tensor, weight: popxl.Tensor, group: popxl.ReplicaGrouping, latest: popxl.Tensor | None
) -> popxl.Tensor:
    return gather_weight(shard, weight.dtype, group)


def _looked_up(
    shard: popxl.Tensor,
    table: popxl.Tensor,
    indices: popxl.Tensor,
    group: popxl.ReplicaGrouping,
    copied: Mapping[popxl.Tensor, popxl.Tensor],
) -> popxl.Tensor:
    return look_up_rows(shard, copied[indices], table.dtype, group)
