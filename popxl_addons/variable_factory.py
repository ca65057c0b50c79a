"""Factories of variables. A subgraph can only hold a placeholder; its variable is made later, in the main graph.

A `VariableFactory` makes both: the placeholder with `create_input`, the variable with `create_tensor`. A module returns
the factories of all its placeholders as `NamedVariableFactories`, whose `init` makes all the variables.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal, SupportsInt

import numpy as np

import popxl
from popxl import ops
from popxl.dtypes import check_dtype
from popxl.extend.arguments import check_type, integer, one_axis
from popxl.extend.collectives import shard_count, shard_length
from popxl.fp8_utils import as_array
from popxl.initial import Initial, stacked
from popxl.replica_grouping import Groups
from popxl.tensor import Variable
from popxl_addons.dot_tree import DotTree, check_leaves
from popxl_addons.named_replica_grouping import NamedReplicaGrouping, resolved
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_data import (
    DataIter,
    PeekableIterator,
    data_elements,
    first_element,
    memory_map,
    warn_of_rows,
)
from popxl_addons.variable_data import host_scalar_tensor_types as host_scalar_tensor_types

PathLike = str | os.PathLike[str]


class VariableFactory:
    """A deferred variable, created later in a main graph.

    `data_iter` is a callable that returns a host array, or an iterable of host arrays: each array is the value of one
    variable for one replica group. In place of an array there may be a description, such as `popxl.initial.zeros(3)`:
    then the numbers are generated on first use. A callable is called once here, as a check, and its result
    dropped; a first element is then taken to learn `shape` and `dtype`, and kept for the first variable.

    With `shard_over` > 1 the placeholder is a shard of the value: `meta_shape` is the shape of the data, and `shape` is
    ``(ceil(nelms / shard_over),)``. So are the shards of the variable that the replicas keep, which graphs bound to the
    variable get. Otherwise `shape` is the shape of the data and `meta_shape` is None.

    `replica_grouping` says which replicas share a value: a grouping, or names of axes; by default all of them. Where
    there are several groups, and their values are parts of one, `group_axis` is the axis along which that one is
    divided: then a checkpoint can be read with another number of groups. See `Variable.group_axis`.

    The placeholder is of `input_dtype`, which is the `dtype` of the variable unless it is set: see `MixedPrecision`.

    An array as `data_iter` is an iterable of its rows, as in Python: if it does not have a row for each group, a
    `popxl.errors.RowsAsValuesWarning` says so.

    Raises:
        ValueError: if the data cannot be used.
        PopxlError: if it has no such axis as `group_axis`.
        AssertionError: if `shard_over` exceeds the size of a group.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     factory = VariableFactory(lambda: np.ones((2, 3)), popxl.float32, "w")
        ...     w = factory.create_tensor()
        >>> factory.shape, w
        ((2, 3), Variable[w popxl.dtypes.float32 (2, 3)])
    """

    def __init__(
        self,
        data_iter: DataIter,
        dtype: popxl.dtype | None = None,
        name: str | None = None,
        by_ref: bool = False,
        replica_grouping: Groups | None = None,
        shard_over: SupportsInt = 1,
        group_axis: int | None = None,
    ):
        if dtype is not None:
            check_dtype(dtype, f"VariableFactory `{name}`: `dtype`")
        if name is not None:
            check_type(name, str, "The name of a VariableFactory", "a string")
        self.data_iter = PeekableIterator(data_elements(data_iter, name))
        self.name = name
        self.by_ref = by_ref
        self.replica_grouping = resolved(replica_grouping, f"VariableFactory `{name}`: `replica_grouping`")
        warn_of_rows(data_iter, name, self.replica_grouping.num_groups)

        shard_over = _whole_number(shard_over, f"VariableFactory `{name}`: `shard_over`")
        if shard_over > self.replica_grouping.group_size:
            raise AssertionError(
                f"VariableFactory `{name}`: `shard_over` is {shard_over}, but a group has only "
                f"{self.replica_grouping.group_size} replicas to hold the pieces."
            )
        self.replica_sharded = shard_over > 1

        first = first_element(self.data_iter, name)
        described_dtype = first.dtype if isinstance(first, Initial) else None
        self.dtype = dtype or described_dtype or popxl.dtype.as_dtype(first.dtype)
        if isinstance(first, Initial):
            first.check_held_by(self.dtype, f"VariableFactory `{name}`: `data_iter`")
        self.input_dtype = self.dtype
        self.shape: tuple[int, ...] = tuple(first.shape)
        self.meta_shape: tuple[int, ...] | None = None
        if self.replica_sharded:
            self.meta_shape, self.shape = self.shape, (shard_length(self.shape, shard_over),)
        what = f"VariableFactory `{name}`: `group_axis`"
        rank = len(self.whole_shape)
        self.group_axis = None if group_axis is None else one_axis(integer(group_axis, what), rank, what)

    def create_input(self, prefix: str | None = None) -> popxl.Tensor:
        """A placeholder in the current graph, named ``<prefix>.<name>`` or ``<name>``."""
        return popxl.graph_input(self.shape, self.input_dtype, _join(prefix, self.name), self.by_ref, self.meta_shape)

    def create_tensor(
        self,
        name: str | None = None,
        empty: bool = False,
        memmap_dir: PathLike | None = None,
        read_only_if_exists: bool = False,
        sharded: bool = False,
    ) -> Variable:
        """Create the variable; sharded, like `popxl.replica_sharded_variable`, for shard placeholders.

        The current graph must be the main graph. With `empty` the value is left undefined; with `memmap_dir` it lives
        in a file there (see `next_memmap`). With `sharded` the variable is sharded although the placeholder is whole,
        one shard for each replica of the group; unless a value has fewer elements than that.

        Example:
            >>> with popxl.Ir(replication=2).main_graph:
            ...     factory = VariableFactory(lambda: np.zeros((2, 3)), popxl.float32, "m", shard_over=2)
            ...     m = factory.create_tensor()
            >>> m.shape, m.piece.shape
            ((2, 3), (3,))
        """
        name = name or self.name
        data = self._host_value(name, empty, memmap_dir, read_only_if_exists)
        grouping, nelms = self.replica_grouping, math.prod(self.whole_shape)
        replicas = grouping.const_rg.group_size
        if self.meta_shape is None and not (sharded and 1 < replicas <= nelms):
            return self._with_group_axis(popxl.variable(data, self.dtype, name, replica_grouping=grouping))
        shards = replicas if self.meta_shape is None else shard_count(nelms, self.shape[0], replicas)
        v, _ = popxl.replica_sharded_variable(data, self.dtype, name, replica_grouping=grouping, shard_over=shards)
        return self._with_group_axis(v)

    def create_remote_tensor(
        self,
        buffer: popxl.RemoteBuffer,
        entry: int,
        name: str | None = None,
        empty: bool = False,
        memmap_dir: PathLike | None = None,
        read_only_if_exists: bool = False,
    ) -> Variable:
        """Create the variable in slot `entry` of a remote buffer, sharded for buffers with meta-shape."""
        name = name or self.name
        data = self._host_value(name, empty, memmap_dir, read_only_if_exists)
        create = popxl.remote_replica_sharded_variable if buffer.meta_shape else popxl.remote_variable
        return self._with_group_axis(
            create(data, buffer, entry, self.dtype, name, replica_grouping=self.replica_grouping)
        )

    def next_data(self, empty: bool = False) -> Any:
        """The host value of the next variable: one element, or one for each replica group, stacked.

        Descriptions are converted to numbers.
        """
        value = self._next_value(empty)
        return value.numbers(self.dtype) if isinstance(value, Initial) else value

    def _next_value(self, empty: bool) -> Any:
        """Next value, lazily described if data are."""
        if empty:
            return np.empty(self._host_shape, self.dtype.as_numpy())
        if self.replica_grouping.num_groups == 1:
            return self._next_element()
        values = [self._next_element() for _ in range(self.replica_grouping.num_groups)]
        if all(isinstance(value, Initial) for value in values):
            return stacked(values)
        return np.stack([as_array(value) for value in values])

    def _next_element(self) -> Any:
        """Next data element, resembling the first one."""
        try:
            element = next(self.data_iter)
        except StopIteration:
            raise StopIteration(
                f"VariableFactory `{self.name}`: `data_iter` has no element left. Each variable takes one for each "
                "group of replicas; a callable gives as many as are wanted."
            ) from None
        if np.shape(element) != self.whole_shape:
            raise ValueError(
                f"VariableFactory `{self.name}`: `data_iter` gives the shape {np.shape(element)}; expected "
                f"{self.whole_shape}, as of its first element."
            )
        return element

    def next_memmap(
        self, memmap_dir: PathLike, name: str, empty: bool = False, read_only_if_exists: bool = False
    ) -> np.memmap[Any, Any]:
        """The host value in the file ``<memmap_dir>/<name>.npy``, raw and without header.

        A missing file is made and filled with the next data (uninitialised with `empty`); an existing one is opened,
        for reading only if `read_only_if_exists`. Several processes may do this at once: they get the same file.
        """
        return memory_map(
            Path(memmap_dir) / f"{name}.npy",
            self._host_shape,
            self.dtype.as_numpy(),
            None if empty else lambda: popxl.utils.to_numpy(self.next_data(), self.dtype),
            read_only_if_exists,
        )

    def _with_group_axis(self, v: Variable) -> Variable:
        v.group_axis = self.group_axis
        return v

    def _host_value(self, name: str | None, empty: bool, memmap_dir: PathLike | None, read_only_if_exists: bool) -> Any:
        if memmap_dir is None:
            return self._next_value(empty)
        if name is None:
            raise ValueError(
                "VariableFactory: a memory-mapped variable needs a `name`, which its file is called after."
            )
        return self.next_memmap(memmap_dir, name, empty, read_only_if_exists)

    @property
    def spec(self) -> popxl.TensorSpec:
        """Placeholder spec, like `Tensor.spec`."""
        return popxl.TensorSpec(self.shape, self.input_dtype, self.meta_shape or ())

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Variable shape: data shape for one replica group."""
        return self.shape if self.meta_shape is None else self.meta_shape

    @property
    def _host_shape(self) -> tuple[int, ...]:
        groups = self.replica_grouping.num_groups
        return self.whole_shape if groups == 1 else (groups, *self.whole_shape)


class NamedVariableFactories(DotTree[VariableFactory]):
    """A tree of factories for a module's variables.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts = NamedVariableFactories(w=VariableFactory(lambda: np.zeros((2, 3)), popxl.float32))
        ...     variables = facts.init("fc")
        >>> variables
        NamedTensors({
        w: Variable[fc.w popxl.dtypes.float32 (2, 3)],
        })
    """

    def init(
        self,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: PathLike | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """A variable for every factory, in sorted order, named ``<prefix>.<flat name>``. In the main graph.

        Each call makes new variables, with the next elements of the data. `empty`, `memmap_dir` and
        `read_only_if_exists` are those of `VariableFactory.create_tensor`.
        """
        return self._init(prefix, empty, memmap_dir, read_only_if_exists, sharded=False)

    def init_sharded(
        self,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: PathLike | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """Like `init`, with sharded variables, one shard per replica of a group in device memory.

        Variables with fewer elements than replicas stay whole. Graphs take whole tensors: `train_step` gathers them,
        and so does `rts.gather_replica_sharded_tensor`. Optimisers shard their state too.

        Example:
            >>> with popxl.Ir(replication=2).main_graph:
            ...     facts = NamedVariableFactories(w=VariableFactory(lambda: np.zeros((2, 3)), popxl.float32))
            ...     variables = facts.init_sharded()
            >>> variables.w.shape, variables.w.piece.shape
            ((2, 3), (3,))
        """
        return self._init(prefix, empty, memmap_dir, read_only_if_exists, sharded=True)

    def init_remote(
        self,
        buffers: DotTree[Any],
        entry: int = 0,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: PathLike | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """Like `init`, with variables in slot `entry` of equally named buffers; ignores surplus buffers.

        Before any variable is made all buffers are looked at: `KeyError` lists the names that `buffers` lacks,
        `ValueError` those whose buffer holds another number of elements, or elements of another dtype.

        Example:
            >>> with popxl.Ir().main_graph:
            ...     facts = NamedVariableFactories(w=VariableFactory(lambda: np.zeros((2, 3)), popxl.float32))
            ...     buffers = DotTree(w=popxl.remote_buffer((2, 3), popxl.float32, entries=2))
            ...     layers = [facts.init_remote(buffers, i, prefix=f"layer{i}") for i in range(2)]
            >>> layers[1].w.name
            'layer1.w'
        """
        factories = self._sorted("init_remote")
        what = "NamedVariableFactories.init_remote: `buffers`"
        check_leaves(buffers, popxl.RemoteBuffer, what, "NamedRemoteBuffers")
        slots = buffers.to_dict()
        if missing := [name for name, _ in factories if name not in slots]:
            raise KeyError(f"NamedVariableFactories.init_remote: `buffers` has no buffer for {missing}.")
        if unfit := [
            f"'{name}' is {factory.dtype.name}{list(factory.whole_shape)}, and its buffer is {slots[name]!r}"
            for name, factory in factories
            if not _fits(factory, slots[name])
        ]:
            raise ValueError(f"NamedVariableFactories.init_remote: these do not fit: {'; '.join(unfit)}.")
        return NamedTensors.from_dict(
            {
                name: factory.create_remote_tensor(
                    slots[name], entry, _join(prefix, name), empty, memmap_dir, read_only_if_exists
                )
                for name, factory in factories
            }
        )

    def init_zero(self) -> NamedTensors:
        """A plain tensor of zeros for every factory, in the current graph: no variables are made."""
        return self._init_plain("zero")

    def init_undef(self) -> NamedTensors:
        """A plain tensor with undefined contents for every factory, in the current graph: no variables are made."""
        return self._init_plain("undef")

    def _init(
        self, prefix: str | None, empty: bool, memmap_dir: PathLike | None, read_only_if_exists: bool, sharded: bool
    ) -> NamedTensors:
        return NamedTensors.from_dict(
            {
                name: factory.create_tensor(_join(prefix, name), empty, memmap_dir, read_only_if_exists, sharded)
                for name, factory in self._sorted("init")
            }
        )

    def _sorted(self, method: str) -> list[tuple[str, VariableFactory]]:
        """The factories by name, in sorted order. `TypeError` if there is something else among them."""
        check_leaves(self, VariableFactory, f"NamedVariableFactories.{method}: leaves", "VariableFactory")
        return sorted(self.to_dict().items())

    def _init_plain(self, init_type: Literal["zero", "undef"]) -> NamedTensors:
        return NamedTensors.from_dict(
            {name: ops.init(f.shape, f.dtype, name, init_type) for name, f in self.to_dict().items()}
        )

    @property
    def replica_groupings(self) -> NamedReplicaGrouping:
        """Map flat names to groupings. Creates a new tree each time: keep it in a variable for additions."""
        return NamedReplicaGrouping.from_dict({name: f.replica_grouping for name, f in self.to_dict().items()})


def add_variable_input(
    name: str,
    data_iter: DataIter,
    dtype: popxl.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: Groups | None = None,
    group_axis: int | None = None,
) -> tuple[popxl.Tensor, VariableFactory]:
    """Create a factory and its placeholder in the current graph.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.create_empty_graph("f"):
        ...     w, factory = add_variable_input("w", lambda: np.ones(3), popxl.float32)
        >>> with ir.main_graph:
        ...     variable = factory.create_tensor()
    """
    factory = VariableFactory(data_iter, dtype, name, by_ref, replica_grouping, group_axis=group_axis)
    return factory.create_input(), factory


def add_replica_sharded_variable_input(
    name: str,
    data_iter: DataIter,
    dtype: popxl.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: Groups | None = None,
    shard_over: SupportsInt | None = None,
    group_axis: int | None = None,
) -> tuple[popxl.Tensor, VariableFactory]:
    """Create a factory, with a shard placeholder in the current graph.

    `shard_over` is the number of shards: by default the size of the group, which by default is all replicas. If that is
    1 the placeholder is whole.
    """
    factory = replica_sharded_factory(name, data_iter, dtype, by_ref, replica_grouping, shard_over, group_axis)
    return factory.create_input(), factory


def replica_sharded_factory(
    name: str,
    data_iter: DataIter,
    dtype: popxl.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: Groups | None = None,
    shard_over: SupportsInt | None = None,
    group_axis: int | None = None,
) -> VariableFactory:
    """A factory whose variable is split over `shard_over` replicas, by default the whole group."""
    group = resolved(replica_grouping, f"VariableFactory `{name}`: `replica_grouping`")
    pieces = group.group_size if shard_over is None else shard_over
    return VariableFactory(data_iter, dtype, name, by_ref, group, pieces, group_axis)


def _whole_number(number: Any, what: str) -> int:
    """Check an integral number of any numeric type, including NumPy quotients."""
    if isinstance(number, float | np.floating) and number.is_integer():
        return int(number)
    return integer(number, what)


def _fits(factory: VariableFactory, buffer: popxl.RemoteBuffer) -> bool:
    slot = buffer.meta_shape or buffer.tensor_shape
    return math.prod(factory.whole_shape) == math.prod(slot) and factory.dtype == buffer.tensor_dtype


def _join(prefix: str | None, name: str | None) -> str | None:
    check_type(prefix, str | None, "NamedVariableFactories.init: `prefix`", "a string")
    return ".".join(part for part in (prefix, name) if part) or None
