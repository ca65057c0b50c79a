"""Replicated tensor sharding: each replica of a group keeps a shard of a tensor, which is gathered for use.

A *sharded* tensor has rank 1. On the member of rank `k` of a group of `n` replicas it holds the elements from ``k * L``
to ``(k + 1) * L`` of the flattened whole, ``L = nelms / n``, and its `meta_shape` is the shape of the whole. Tensors
whose elements cannot be divided evenly stay whole. A grouping that is not constant stands for its `const_rg`, by which
variables of such a grouping are sharded. See also: ZeRO, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import popxl
from popxl import ops
from popxl.extend.arguments import check_type, word
from popxl.replica_grouping import Groups
from popxl_addons import _io_tiles
from popxl_addons.dot_tree import check_leaves
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_replica_grouping import NamedReplicaGrouping, resolved
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

__all__ = [
    "all_gather_replica_sharded_graph",
    "gather_replica_sharded_tensor",
    "reduce_replica_sharded_graph",
    "reduce_replica_sharded_tensor",
    "replica_sharded_spec",
]

ReduceOp = Literal["add", "mean"]


def replica_sharded_spec(t: popxl.Tensor | popxl.TensorSpec | VariableFactory, shard_over: Groups) -> popxl.TensorSpec:
    """Spec of one replica's shard of `t`.

    Args:
        t: a tensor, a spec, or the factory of a variable.
        shard_over: the replicas that share it out: a grouping, or names of axes.

    Returns:
        The spec of a shard; the spec of `t` itself if it is one already, or cannot be divided evenly.

    Example:
        >>> everyone = popxl.Ir(replication=4).replica_grouping()
        >>> replica_sharded_spec(popxl.TensorSpec((8, 2), popxl.float32), everyone)
        TensorSpec(shape=(4,), dtype=popxl.dtypes.float32, meta_shape=(8, 2))
    """
    kinds = popxl.Tensor | popxl.TensorSpec | VariableFactory
    check_type(t, kinds, "replica_sharded_spec: `t`", "a tensor, a spec or a VariableFactory")
    nelms, pieces = math.prod(t.shape), resolved(shard_over, "replica_sharded_spec: `shard_over`").const_rg.group_size
    if t.meta_shape or pieces == 1 or nelms % pieces:
        return popxl.TensorSpec(t.shape, t.dtype, t.meta_shape or ())
    return popxl.TensorSpec((nelms // pieces,), t.dtype, t.shape)


def gather_replica_sharded_tensor(
    t: popxl.Tensor, use_io_tiles: bool = False, replica_group: Groups | None = None
) -> popxl.Tensor:
    """Gather the shards of a tensor to its `meta_shape`; other tensors are unchanged.

    Args:
        t: one replica's shard, or the sharded variable.
        use_io_tiles: whether the gather runs on I/O tiles; the numbers do not depend on it.
        replica_group: replicas that hold the shards: a grouping, or names of axes; all of them by default.

    Example:
        >>> with popxl.Ir(replication=2).main_graph:
        ...     _, piece = popxl.replica_sharded_variable(np.ones((2, 3)), popxl.float32, "w")
        ...     gather_replica_sharded_tensor(piece).shape
        (2, 3)
    """
    check_type(t, popxl.Tensor, "gather_replica_sharded_tensor: `t`", "a tensor")
    t = t.on_replica
    if not t.meta_shape:
        return t
    group = resolved(replica_group, "gather_replica_sharded_tensor: `replica_group`").const_rg
    return _io_tiles.loaded(use_io_tiles, ops.collectives.replicated_all_gather, t, 0, group, "meta_shape")


def reduce_replica_sharded_tensor(
    t: popxl.Tensor,
    op: ReduceOp = "add",
    replica_group: Groups | None = None,
    shard_group: Groups | None = None,
) -> popxl.Tensor:
    """Reduce `t` over one replica group, then shard the result over another.

    Args:
        t: an unsharded tensor, with a value of each replica.
        op: ``"add"`` or ``"mean"``.
        replica_group: the replicas whose values are combined; all of them by default.
        shard_group: replicas that keep a shard each; by default `replica_group`.

    Returns:
        A sharded tensor; a whole one if `shard_group` has one member only or `t` cannot be divided evenly.

    Raises:
        ValueError: for an unknown `op`.

    Example:
        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     dw = popxl.variable(np.ones((2, 3)), popxl.float32, "dw")
        ...     piece = reduce_replica_sharded_tensor(dw, "mean")
        >>> piece.shape, piece.meta_shape
        ((3,), (2, 3))
    """
    name = "reduce_replica_sharded_tensor"
    word(op, f"{name}: `op`", get_args(ReduceOp))
    check_type(t, popxl.Tensor, f"{name}: `t`", "a tensor")
    reduced_over = resolved(replica_group, f"{name}: `replica_group`")
    shared_by = (reduced_over if shard_group is None else resolved(shard_group, f"{name}: `shard_group`")).const_rg
    sharded = shared_by.group_size > 1 and t.nelms % shared_by.group_size == 0
    if sharded and reduced_over == shared_by:
        return ops.collectives.replicated_reduce_scatter(t, op, reduced_over, True)
    if reduced_over.group_size > 1:
        t = ops.collectives.replicated_all_reduce(t, op, reduced_over)
    return ops.collectives.replica_sharded_slice(t, shared_by) if sharded else t


def all_gather_replica_sharded_graph(
    tensors: NamedTensors | NamedVariableFactories,
    use_io_tiles: bool = False,
    replica_groups: NamedReplicaGrouping | None = None,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph that applies `gather_replica_sharded_tensor` to tensors like these.

    Args:
        tensors: templates of the graph's inputs, tensors or factories of variables; only their names and specs are
            used.
        use_io_tiles: whether the gather runs on I/O tiles.
        replica_groups: replicas that hold the shards, by flat name; all of them by default.

    Returns:
        The graph, and the flat names of its outputs, which are sorted. Its inputs have the same names.

    Raises:
        KeyError: if `replica_groups` lacks a name.

    Example:
        >>> with popxl.Ir(replication=2).main_graph:
        ...     w, piece = popxl.replica_sharded_variable(np.ones((2, 3)), popxl.float32, "w")
        ...     gather, names = all_gather_replica_sharded_graph(NamedTensors(w=piece))
        ...     whole = NamedTensors.pack(names, gather.bind(NamedTensors(w=piece)).call())
        >>> whole.w.shape
        (2, 3)
    """
    name = "all_gather_replica_sharded_graph"
    _check_named(name, tensors, replica_groups, "replica_groups")
    groups = dict.fromkeys(tensors.keys_flat()) if replica_groups is None else replica_groups.to_dict()
    if missing := [name for name in tensors.keys_flat() if name not in groups]:
        raise KeyError(f"{name}: `replica_groups` has no grouping for {missing}.")

    def gathered(name: str, t: popxl.Tensor) -> popxl.Tensor:
        return gather_replica_sharded_tensor(t, use_io_tiles, groups[name])

    return graph_over("all_gather", tensors, gathered)


def reduce_replica_sharded_graph(
    tensors: NamedTensors | NamedVariableFactories,
    op: ReduceOp = "add",
    use_io_tiles: bool = False,
    shard_groups: NamedReplicaGrouping | None = None,
    replica_group: Groups | None = None,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph that applies `reduce_replica_sharded_tensor` to tensors like these.

    Args:
        tensors: templates of the graph's inputs, tensors or factories of variables; only their names and specs are
            used.
        op: ``"add"`` or ``"mean"``.
        use_io_tiles: whether the reduction runs on I/O tiles; the numbers do not depend on it.
        shard_groups: replicas that keep the shards, by flat name; for missing names those of `replica_group`.
        replica_group: the replicas whose values are combined; all of them by default.

    Returns:
        The graph, and the flat names of its outputs, which are sorted. Its inputs have the same names.

    Raises:
        ValueError: for an unknown `op`.

    Example:
        >>> with popxl.Ir(replication=2).main_graph:
        ...     grads = NamedTensors(w=popxl.variable(np.ones((2, 3)), popxl.float32, "dw"))
        ...     reduce, names = reduce_replica_sharded_graph(grads, "mean")
        ...     pieces = NamedTensors.pack(names, reduce.bind(grads).call())
        >>> pieces.w.shape, pieces.w.meta_shape
        ((3,), (2, 3))
    """
    _check_named("reduce_replica_sharded_graph", tensors, shard_groups, "shard_groups")
    groups = {} if shard_groups is None else shard_groups.to_dict()

    def reduced(name: str, t: popxl.Tensor) -> popxl.Tensor:
        reduce = reduce_replica_sharded_tensor
        return _io_tiles.loaded(use_io_tiles, reduce, t, op, replica_group, groups.get(name))

    return graph_over("replica_reduce", tensors, reduced)


def graph_over(
    name: str,
    tensors: NamedTensors | NamedVariableFactories,
    function: Callable[[str, popxl.Tensor], popxl.Tensor],
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Build a graph with sorted named inputs around a function; also return input names."""
    ir = popxl.gir()
    with ir.undone_on_failure():
        graph = ir.create_empty_graph(name)
        with graph:
            specs = {
                key: (t.on_replica if isinstance(t, popxl.Tensor) else t).spec for key, t in tensors.to_dict().items()
            }
            args = {key: popxl.graph_input(**spec, name=key) for key, spec in sorted(specs.items())}
            for key, t in args.items():
                popxl.graph_output(function(key, t))
    return GraphWithNamedArgs(graph, NamedTensors.from_dict(args)), list(args)


def _check_named(function: str, tensors: object, groups: object, argument: str) -> None:
    expected = "NamedTensors or NamedVariableFactories"
    check_leaves(tensors, popxl.Tensor | VariableFactory, f"{function}: `tensors`", expected)
    if groups is not None:
        kinds = popxl.ReplicaGrouping | str | tuple | list | None
        check_leaves(groups, kinds, f"{function}: `{argument}`", "a NamedReplicaGrouping, or None")
