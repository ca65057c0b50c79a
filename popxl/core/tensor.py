"""Tensors: the values of a graph.

A `Tensor` is a name, a spec and a place in a graph; it holds no numbers. A `Variable` and a `Constant` know their
initial numbers, on the host. Their creation is in `popxl.core.create`; the operators and methods that make programs
read like formulas are in `popxl.operators`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from popxl.base.copies import CopyIsSelf
from popxl.core import refused_conversions
from popxl.errors import PopxlError, UndefinedValue
from popxl.replica_grouping import ReplicaGrouping, with_later_replicas
from popxl.tensorlocation import ON_DEVICE, LocationInfo, TileSet
from popxl.values.shapes import integer, one_axis
from popxl.values.spec import TensorSpec

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.dtypes import dtype as dtype_
    from popxl.graph import Graph
    from popxl.initial import Initial
    from popxl.ir import Ir
    from popxl.operators import Operators
else:
    Operators = object  # ops need tensors, so `popxl.operators` gives the class its operators later

Location = tuple[int | None, bool | None]


class Tensor(CopyIsSelf, Operators):
    """A value in a graph, created by ops, graph inputs, `popxl.variable` or `popxl.constant`.

    Two tensors are equal only if they are the same tensor; to compare their elements use `ops.equal`.

    Example:
        >>> with ir.main_graph:
        ...     x = popxl.variable([1.0, 2.0], name="x")
        ...     y = x * 2 + 1
        >>> y.shape, y.dtype
        ((2,), popxl.dtypes.float32)
    """

    __slots__ = (
        "__weakref__",
        "_bound",
        "_by_ref",
        "_dtype",
        "_id",
        "_meta_shape",
        "_name",
        "_origin",
        "_path",
        "_producer",
        "_shape",
        "_used_at",
        "graph_ref",
        "is_read_elsewhere",
    )

    _id: str
    _name: str
    _path: str | None
    _shape: tuple[int, ...]
    _dtype: dtype_
    _meta_shape: tuple[int, ...]
    _by_ref: bool
    graph_ref: weakref.ref[Graph]
    _producer: weakref.ref[Op] | None
    _bound: weakref.ref[Tensor] | None
    _origin: Tensor | None
    _used_at: Location
    is_read_elsewhere: bool

    # Tensors cannot be iterated over or unpacked.
    __iter__ = None
    __contains__ = None

    _kinds: ClassVar[dict[str, type[Tensor]]] = {}

    def __init_subclass__(cls, tensor_type: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if tensor_type is not None:
            Tensor._kinds[tensor_type] = cls

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError(
            f"{type(self).__name__}s are not constructed: use `popxl.variable`, `popxl.constant`, "
            "`popxl.graph_input`, or an op."
        )

    @classmethod
    def _make(cls, graph: Graph, id: str, name: str, spec: TensorSpec) -> Any:
        """A new tensor. Only `Graph` calls this: it keeps ids unique."""
        t = object.__new__(cls)
        t.graph_ref = graph.ref
        t._id = id
        t._name = name
        t._path = None
        t._shape = spec.shape
        t._dtype = spec.dtype
        t._meta_shape = spec.meta_shape
        t._by_ref = False
        t._producer = None
        t._bound = None
        t._origin = None
        t._used_at, t.is_read_elsewhere = (None, None), False
        return t

    @property
    def id(self) -> str:
        """Name of the tensor, unique in its Ir: graph, name scopes and name, joined by slashes."""
        return self._id

    @property
    def name(self) -> str:
        """The id without the graph."""
        return self._name

    @property
    def path(self) -> str:
        """Display name in prints, reports and `popxl.to_jax`: for a module's graph input the dotted path, such as
        `layers.0.query.weight`; otherwise the name."""
        return self._path or self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension, per replica."""
        return self._shape

    @property
    def dtype(self) -> dtype_:
        """Element type."""
        return self._dtype

    @property
    def meta_shape(self) -> tuple[int, ...]:
        """Shape before sharding, of a replica's shard; `()` for other tensors."""
        return self._meta_shape

    @property
    def on_replica(self) -> Tensor:
        """The tensor on one replica: itself, or the shard of a sharded variable."""
        return self

    @property
    def by_ref(self) -> bool:
        """Whether in-place changes of this graph input reach the caller."""
        return self._by_ref

    @by_ref.setter
    def by_ref(self, value: bool) -> None:
        self._by_ref = value
        self.ir.edits.record_edit()

    # Location -------------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph of the tensor."""
        graph = self.graph_ref()
        if graph is None:
            raise ReferenceError(f"The Ir of the tensor {self.id} is gone; keep a reference to the Ir.")
        return graph

    @property
    def ir(self) -> Ir:
        """The Ir of the tensor."""
        return self.graph.ir

    @property
    def scope(self) -> str:
        """The id of the tensor's graph; `""` for the main graph."""
        return self.id[: -len(self.name)].rstrip("/")

    @property
    def producer(self) -> Op | None:
        """The op that makes the tensor; `None` for variables, constants and graph inputs."""
        return None if self._producer is None else self._producer()

    @property
    def origin(self) -> Tensor:
        """The base tensor of an in-place alias; otherwise the tensor itself."""
        return self if self._origin is None else self._origin

    @property
    def location(self) -> Location:
        """IPU and tile set (true for I/O tiles), each `None` where it is not known.

        The location of the op that makes the tensor; for a graph input, that of the tensor bound to it; otherwise the
        lowest of the ops that use it.
        """
        op = self.producer
        if op is not None:
            return op.location_of(self)
        bound = None if self._bound is None else self._bound()
        if bound is not None:
            ipu, tiles = bound.location
            return (self._used_at[0] if ipu is None else ipu, self._used_at[1] if tiles is None else tiles)
        return self._used_at

    @property
    def has_certain_location(self) -> bool:
        """Whether `location` is exact: ops of called graphs may be on other IPUs than the call."""
        op = self.producer
        if op is not None:
            return op.has_certain_location(self)
        bound = None if self._bound is None else self._bound()
        return not self.is_read_elsewhere if bound is None else bound.has_certain_location

    @property
    def ipu(self) -> int:
        """The tensor's IPU number. Raises `UndefinedValue` if unplaced."""
        ipu, _ = self.location
        if ipu is None:
            raise UndefinedValue(f"The IPU of {self!r} is not known: no op that has an IPU makes or uses it.")
        return ipu

    @property
    def tile_set(self) -> str:
        """`"compute"` or `"io"`; `UndefinedValue` if unspecified."""
        _, io_tiles = self.location
        if io_tiles is None:
            raise UndefinedValue(f"The tile set of {self!r} is not known: no op makes or uses it.")
        return "io" if io_tiles else "compute"

    @property
    def location_info(self) -> LocationInfo:
        """Storage in a remote buffer and sharding; variables only."""
        return ON_DEVICE

    def set_producer(self, op: Op, alias_of: Tensor | None = None) -> None:
        """Record the producing op, and the operand whose storage it overwrites and returns."""
        self._producer = weakref.ref(op)
        self._origin = None if alias_of is None else alias_of.origin

    def note_read(self, location: Location, elsewhere: bool) -> None:
        """Record where an op reads the tensor, which may determine its location, and whether the read really happens
        elsewhere."""
        if self._producer is None:
            self._used_at = min(self._used_at, location, key=_known_first)
            self.is_read_elsewhere = self.is_read_elsewhere or elsewhere

    @property
    def used_at(self) -> Location:
        """Lowest location among reading ops; `None` parts for unread tensors and op results."""
        return self._used_at

    def set_location(self, ipu: int | None, io_tiles: bool | None) -> None:
        """Record the location, whichever ops use the tensor."""
        self._used_at = (ipu, io_tiles)

    def bound_to(self, parent: Tensor) -> None:
        """Record the first tensor of a caller that a call site binds to this graph input."""
        if self._bound is None:
            self._bound = weakref.ref(parent)

    # Spec and name --------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> TensorSpec:
        """Shape, dtype and meta-shape."""
        return TensorSpec(self.shape, self.dtype, self.meta_shape)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nelms(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def strides(self, shape: Iterable[int] | None = None) -> tuple[int, ...]:
        """Byte strides of a C-contiguous array of `shape` (default: the tensor's own) and the tensor's dtype."""
        sizes = tuple(self.shape if shape is None else shape)
        return tuple(self.dtype.itemsize * math.prod(sizes[i + 1 :]) for i in range(len(sizes)))

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether the host copy is known to equal the device's value."""
        raise PopxlError(f"{self!r} has no numbers on the host; only variables and constants have.")

    # Conversions that are refused -----------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return refused_conversions.truth(self)

    def __int__(self) -> NoReturn:
        raise refused_conversions.number_refused(self, "an int")

    def __float__(self) -> NoReturn:
        raise refused_conversions.number_refused(self, "a float")

    def __complex__(self) -> NoReturn:
        raise refused_conversions.number_refused(self, "a complex number")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{self!r} is no array. {refused_conversions.HOW_TO_READ}")

    @property
    def __jax_array__(self) -> None:
        return refused_conversions.asked_by_jax(self)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise refused_conversions.assignment_refused(self)

    def __len__(self) -> int:
        if not self.shape:
            raise ValueError(f"{self!r} is a scalar, which has no length.")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.id} {self.dtype!r} {self.shape}]"


def _known_first(location: Location) -> tuple[float, float]:
    """The order of locations: by IPU, compute tiles before I/O tiles; what is not known comes last."""
    ipu, io_tiles = location
    return (math.inf if ipu is None else ipu, math.inf if io_tiles is None else io_tiles)


@contextmanager
def taken_back_on_failure(t: Tensor) -> Iterator[Tensor]:
    """Create a tensor for a `with` block; a failing block removes it from its graph."""
    try:
        yield t
    except BaseException:
        t.graph.forget(t)
        raise


class Variable(Tensor, tensor_type="Variable"):
    """A mutable main-graph tensor with the program's lifetime.

    Attributes:
        data: host copy: the initial value, and later the result of the last transfer or write. A value that is only
            described is made on first access.
        initial: description of the initial value, until `data` is first accessed; else `None`.
        retrieval_mode: replicas whose values are read back: `"one_per_group"` or `"all_replicas"`.
        location_info: whether the variable is in a remote buffer, and whether it is sharded.
        piece: tensor that programs use in place of a sharded variable: the shard of a replica.
    """

    __slots__ = (
        "_data",
        "_group_axis",
        "_replica_grouping",
        "initial",
        "location_info",
        "piece",
        "retrieval_mode",
    )

    _data: np.ndarray | None
    _replica_grouping: ReplicaGrouping
    initial: Initial | None
    retrieval_mode: str
    location_info: LocationInfo
    piece: Tensor | None
    _group_axis: int | None

    @property
    def data(self) -> np.ndarray:
        """The host copy."""
        if self._data is None:
            with self.ir.host_copies.lock:  # only one of several threads makes the value
                if self._data is None:
                    self.data = self.numbers()
        assert self._data is not None
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        # In C order, whatever order was written: arrays from the device are copied in through a flat view.
        self._data, self.initial = value if value.flags.c_contiguous else value.copy("C"), None

    def numbers(self) -> np.ndarray:
        """A copy of the host values; generated for described variables."""
        initial, data = self.initial, self._data
        if initial is None or data is not None:
            return np.array(data)
        return initial.numbers(self.dtype)

    def set_initial(self, initial: Initial) -> None:
        """Describe the initial value, in place of a host copy."""
        self._data, self.initial = None, initial

    @property
    def replica_grouping(self) -> ReplicaGrouping:
        """Groups of replicas that share one value."""
        return with_later_replicas(self._replica_grouping)

    @replica_grouping.setter
    def replica_grouping(self, grouping: ReplicaGrouping) -> None:
        self._replica_grouping = grouping

    @property
    def on_replica(self) -> Tensor:
        return self if self.piece is None else self.piece

    @property
    def group_axis(self) -> int | None:
        """The axis along which group values form one whole value, group 0 first. `None` (default) means independent
        values. Assignable.

        Runs do not depend on it. A checkpoint stores the whole value, and can be read with another number of groups.

        Raises:
            TypeError: on assigning anything but an integer or `None`.
            PopxlError: on assigning an axis that the shape does not have.
        """
        return self._group_axis

    @group_axis.setter
    def group_axis(self, axis: int | None) -> None:
        what = f"`group_axis` of {self!r}"
        self._group_axis = None if axis is None else one_axis(integer(axis, what), len(self.shape), what)

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether host copy and device value are known to agree; runs may change variables."""
        return self.ir.host_copies.in_sync

    @property
    def shape_on_host(self) -> tuple[int, ...]:
        """Host copy shape: one leading row per replica group, with several groups."""
        groups = self.replica_grouping.num_groups
        return self.shape if groups == 1 else (groups, *self.shape)

    @property
    def shape_on_replica(self) -> tuple[int, ...]:
        """Value shape per replica."""
        return self.shape

    @property
    def is_read_only(self) -> bool:
        """Whether the host copy cannot be written: a memory map that was opened for reading."""
        return self._data is not None and not self._data.flags.writeable

    @property
    def _memmap_arr(self) -> np.memmap | None:
        return self._data if isinstance(self._data, np.memmap) else None


class Constant(Tensor, tensor_type="Constant"):
    """A tensor whose numbers never change.

    Attributes:
        data: numbers of the tensor (read-only).
    """

    __slots__ = ("data",)

    data: np.ndarray

    @property
    def in_sync_with_ipu(self) -> bool:
        """True: nothing changes a constant."""
        return True


ScalarType = int | float | complex | bool
HostTensor = np.ndarray | Iterable[ScalarType]
HostScalarTensor = ScalarType | HostTensor
TensorLike = Tensor | HostScalarTensor
host_tensor_types: tuple[type, ...] = (np.ndarray, Iterable)
TILE_SET_MAP = {TileSet.Compute: "compute", TileSet.IO: "io", TileSet.Undefined: "undefined"}
