"""Remote buffers for models: a tree of buffers matching a tree of factories, and graphs that load and store them.

Every slot of a buffer holds the same variable of another layer, so one graph with one set of tensors can work through
the layers: load the layer's weights, call, store what has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral

import popxl
from popxl import ops
from popxl.extend.arguments import check_type, integer
from popxl.replica_grouping import Groups
from popxl_addons import _io_tiles
from popxl_addons.dot_tree import DotTree, check_leaves
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_replica_grouping import resolved
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

__all__ = ["create_remote_buffer", "load_remote_graph", "named_buffers", "named_variable_buffers", "store_remote_graph"]


class NamedRemoteBuffers(DotTree[popxl.RemoteBuffer]):
    """A tree whose leaves are remote buffers. One buffer may be a leaf of several trees: tied weights.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     NamedRemoteBuffers(w=popxl.remote_buffer((2, 3), popxl.float32, entries=4))
        NamedRemoteBuffers({
        w: RemoteBuffer[1: 4 x f32[2, 3]],
        })
    """


def create_remote_buffer(
    spec: popxl.TensorSpec | popxl.Tensor,
    entries: int = 1,
    replica_group: Groups | None = None,
    shard_over: int | None = None,
) -> popxl.RemoteBuffer:
    """A remote buffer for values like `spec`, sharded over the replicas of a group.

    Args:
        spec: a tensor or spec. With a meta-shape it is already a shard, and is stored unchanged.
        entries: number of slots.
        replica_group: the replicas that share a value: a grouping, or names of axes; all of them by default.
        shard_over: number of shards: 1 for whole values, by default the number of replicas of the group.

    Raises:
        ValueError: if the elements of a value cannot be divided evenly, or `shard_over` is not a divisor of the group
            size.

    Example:
        Six elements, three on each of two replicas.

        >>> with popxl.Ir(replication=2).main_graph:
        ...     buffer = create_remote_buffer(popxl.TensorSpec((2, 3), popxl.float32), entries=4)
        >>> buffer.tensor_shape, buffer.meta_shape, buffer.entries
        ((3,), (2, 3), 4)
    """
    check_type(spec, popxl.TensorSpec | popxl.Tensor, "create_remote_buffer: `spec`", "a TensorSpec or a tensor")
    group = resolved(replica_group, "create_remote_buffer: `replica_group`").const_rg
    pieces = group.group_size if shard_over is None else integer(shard_over, "create_remote_buffer: `shard_over`")
    if spec.meta_shape or pieces == 1:
        buffer = popxl.remote_buffer(spec.shape, spec.dtype, entries)
        buffer.meta_shape = tuple(spec.meta_shape)
        return buffer
    nelms = math.prod(spec.shape)
    if pieces > 0 and nelms % pieces:
        raise ValueError(
            f"Can't shard tensor with {nelms} elements over {pieces} replicas: all pieces have the same size. Choose a "
            f"divisor for `shard_over`, or 1 to keep the value of shape {tuple(spec.shape)} whole."
        )
    shape_on_host = spec.shape if group.num_groups == 1 else (group.num_groups, *spec.shape)
    return popxl.replica_sharded_buffer(shape_on_host, spec.dtype, group, pieces, entries)


def named_variable_buffers(
    factories: NamedVariableFactories, entries: int = 1, shard_over_dict: Mapping[str, int] | bool | int = True
) -> NamedRemoteBuffers:
    """A buffer for each factory, under the same names. Fill the slots with ``factories.init_remote(buffers, entry)``.

    A factory that is replica-sharded itself gets a buffer for its shards, regardless of `shard_over_dict`.

    Args:
        factories: the factories; each says which replicas share its values.
        entries: number of slots of each buffer.
        shard_over_dict: number of shards of values: one number for all, or for each flat name (names that are missing
            mean the whole group); True for the whole group, False for whole values.

    Raises:
        ValueError: for a number outside of 1 to the group size, for anything else that is not such a number, and as for
            `create_remote_buffer`.

    Example:
        >>> from popxl_addons import VariableFactory
        >>> with popxl.Ir(replication=2).main_graph:
        ...     w = VariableFactory(lambda: np.ones((2, 3)), popxl.float32)
        ...     facts = NamedVariableFactories(w=w, step=VariableFactory(lambda: np.zeros(()), popxl.float32))
        ...     buffers = named_variable_buffers(facts, entries=4, shard_over_dict={"step": 1})
        >>> buffers.w.tensor_shape, buffers.step.tensor_shape
        ((3,), ())
    """
    check_leaves(factories, VariableFactory, "named_variable_buffers: `factories`", "NamedVariableFactories")
    named = factories.to_dict().items()
    pieces = {name: _shard_size(name, factory, shard_over_dict) for name, factory in named}
    return NamedRemoteBuffers.from_dict(
        {
            name: create_remote_buffer(
                popxl.TensorSpec(factory.shape, factory.dtype, factory.meta_shape or ()),
                entries,
                factory.replica_grouping,
                pieces[name],
            )
            for name, factory in named
        }
    )


def _shard_size(name: str, factory: VariableFactory, shard_over: Mapping[str, int] | bool | int) -> int | None:
    """Shard size of one factory from `shard_over_dict`; `None` for the whole group."""
    size = factory.replica_grouping.group_size
    pieces = shard_over.get(name, True) if isinstance(shard_over, Mapping) else shard_over
    if isinstance(pieces, bool):
        return None if pieces else 1
    if not isinstance(pieces, Integral) or not 1 <= pieces <= size:
        raise ValueError(
            f"named_variable_buffers: `shard_over_dict` says {pieces!r} for `{name}`; expected an integer from 1 to "
            f"{size}, the number of replicas in its group, or True or False."
        )
    return int(pieces)


def named_buffers(tensors: NamedTensors | NamedVariableFactories, entries: int = 1) -> NamedRemoteBuffers:
    """A buffer for each tensor or factory, of its shape, dtype and meta-shape, under the same names.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     buffers = named_buffers(NamedTensors(w=popxl.variable([1.0, 2.0])), entries=3)
        >>> buffers.w.tensor_shape, buffers.w.entries
        ((2,), 3)
    """
    kinds = popxl.Tensor | VariableFactory
    check_leaves(tensors, kinds, "named_buffers: `tensors`", "NamedTensors or NamedVariableFactories")
    return NamedRemoteBuffers.from_dict(
        {name: create_remote_buffer(t.spec, entries, shard_over=1) for name, t in tensors.to_dict().items()}
    )


def load_remote(buffers: NamedRemoteBuffers, entry: int | popxl.Tensor = 0, use_io_tiles: bool = False) -> NamedTensors:
    """Load slot `entry` of every buffer, in the current graph.

    Args:
        buffers: buffers to load from, in sorted order.
        entry: number of the slot, or an int32 scalar that is read when the program runs.
        use_io_tiles: whether transfers run on I/O tiles; the numbers do not depend on it.

    Returns:
        New tensors under the names of the buffers; shards have a meta-shape.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     buffers = NamedRemoteBuffers(w=popxl.remote_buffer((2, 3), popxl.float32, entries=4))
        ...     load_remote(buffers, 1).w
        Tensor[w_remote_loaded popxl.dtypes.float32 (2, 3)]
    """
    return NamedTensors.from_dict(
        {
            name: _io_tiles.loaded(use_io_tiles, ops.remote_load, buffer, entry, name)
            for name, buffer in sorted(buffers.to_dict().items())
        }
    )


def store_remote(
    buffers: NamedRemoteBuffers, tensors: NamedTensors, entry: int | popxl.Tensor = 0, use_io_tiles: bool = False
) -> None:
    """Store tensors in slot `entry` of equally named buffers, from the current graph.

    Args:
        buffers, tensors: buffers and tensors to match; names in only one of them are ignored.
        entry, use_io_tiles: as for `load_remote`.

    Raises:
        ValueError: if a tensor does not have the shape and dtype of its buffer.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     buffers = NamedRemoteBuffers(w=popxl.remote_buffer((2,), popxl.float32))
        ...     store_remote(buffers, NamedTensors(w=popxl.constant([1.0, 2.0])))
    """
    named = tensors.to_dict()
    for name, buffer in sorted(buffers.to_dict().items()):
        if name in named:
            _io_tiles.stored(use_io_tiles, ops.remote_store, buffer, entry, named[name])


def load_remote_graph(
    buffers: NamedRemoteBuffers, entries: int = 1, use_io_tiles: bool = False
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Graph that loads one slot of every buffer; its input is the slot's index, an int32 scalar.

    Args:
        buffers: buffers to load from. Each grows to at least `entries` slots.
        entries: number of slots that will be used.
        use_io_tiles: as for `load_remote`.

    Returns:
        The graph, and the flat names of its outputs, which are sorted.

    Example:
        >>> with popxl.Ir().main_graph, popxl.in_sequence():
        ...     buffers = NamedRemoteBuffers(w=popxl.remote_buffer((2,), popxl.float32))
        ...     load, names = load_remote_graph(buffers, entries=2)
        ...     layer = NamedTensors.pack(names, load.call(1))
        >>> names, layer.w.shape
        (['w'], (2,))
    """
    with _graph_of_slot("load_remote", buffers, entries) as (graph, entry):
        names, tensors = load_remote(buffers, entry, use_io_tiles).unpack()
        for t in tensors:
            popxl.graph_output(t)
    return GraphWithNamedArgs(graph), list(names)


def store_remote_graph(buffers: NamedRemoteBuffers, entries: int = 1, use_io_tiles: bool = False) -> GraphWithNamedArgs:
    """A graph that stores in a slot of every buffer: its first input is the number of the slot, an int32 scalar.

    Args:
        buffers: buffers to store to. Each grows to at least `entries` slots.
        entries: number of slots that will be used.
        use_io_tiles: as for `store_remote`.

    Returns:
        The graph. Its other inputs are what is stored, under the names of the buffers: bind it to tensors.

    Example:
        >>> with popxl.Ir().main_graph, popxl.in_sequence():
        ...     buffers = NamedRemoteBuffers(w=popxl.remote_buffer((2,), popxl.float32))
        ...     store = store_remote_graph(buffers, entries=2)
        ...     _ = store.bind(NamedTensors(w=popxl.constant([1.0, 2.0]))).call(1)
    """
    with _graph_of_slot("store_remote", buffers, entries) as (graph, entry):
        args = NamedTensors.from_dict(
            {name: popxl.graph_input(**b.spec, name=name) for name, b in sorted(buffers.to_dict().items())}
        )
        store_remote(buffers, args, entry, use_io_tiles)
    return GraphWithNamedArgs(graph, args)


@contextmanager
def _graph_of_slot(name: str, buffers: NamedRemoteBuffers, entries: int) -> Iterator[tuple[popxl.Graph, popxl.Tensor]]:
    """Context that builds a graph with the number of a slot as first input. The buffers get at least `entries` slots.

    Yields the graph, and this input.
    """
    check_leaves(buffers, popxl.RemoteBuffer, f"{name}_graph: `buffers`", "NamedRemoteBuffers")
    entries, ir = integer(entries, f"{name}_graph: `entries`"), popxl.gir()
    with ir.undone_on_failure():
        graph = ir.create_empty_graph(name)
        with graph:
            yield graph, popxl.graph_input((), popxl.int32, "entry")
    for buffer in buffers.values_flat():
        buffer.entries = max(buffer.entries, entries)
