"""The record of an op in a graph, `Op`, and the checks that every op makes before it is recorded.

An op is one use of a declaration (`popxl.core.declaration`), created by calling it. This file defines the record and
its edits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from popxl.base.names import snake
from popxl.base.source import DebugRecord, SourceLocation
from popxl.context import user_frame
from popxl.core.aliasing import called_by
from popxl.core.tensor import Location, Tensor
from popxl.core.tracing import needed
from popxl.core.traits import Run
from popxl.errors import PopxlError, PopxlInternalError
from popxl.graph import Graph

if TYPE_CHECKING:
    from popxl.context import Context
    from popxl.core.declaration import OpKind
    from popxl.tensorlocation import ExecutionContext
    from popxl.values.spec import TensorSpec

T = TypeVar("T")


class OpSignature(NamedTuple):
    """Computation of an op, independent of the tensors that it reads.

    Attributes:
        operands: names of the inputs, if some operand is a plain value.
    """

    operands: tuple[str, ...] | None
    attributes: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Op:
    """Op in a graph: kind, operands, results, placement and source line.

    Attributes:
        kind: the declaration.
        id: number of the op, unique in the Ir; the first op has 100.
        inputs: tensors read, in the order of the kind's operands. Operands given as plain values are attributes.
        outputs: tensors made.
        attributes: plain values, by name.
        modified: positions of the inputs that the op overwrites.
        ipu, io_tiles: placement of the op.
        location: placement of its results; equal to the op's placement, except for copies.
        execution_context: part of the program that the op belongs to.
        name: the active name scopes and the kind's name, joined by slashes.
        after: ids of ops that `in_sequence` puts before this one. Creation order is always a legal order.
    """

    __slots__ = (
        "__weakref__",
        "_created_at",
        "_graph",
        "after",
        "attributes",
        "execution_context",
        "id",
        "inputs",
        "io_tiles",
        "ipu",
        "kind",
        "location",
        "modified",
        "name",
        "operands",
        "outputs",
    )

    def __init__(
        self,
        kind: OpKind,
        graph: Graph,
        inputs: tuple[Tensor, ...],
        operands: tuple[str, ...] | None,
        attributes: dict[str, Any],
        context: Context,
    ) -> None:
        self.kind = kind
        self._graph = graph.ref
        self.inputs = inputs
        self.outputs: tuple[Tensor, ...] = ()
        self.operands = operands
        self.attributes: MappingProxyType[str, Any] = MappingProxyType(attributes)
        self.modified = kind.modified(attributes, operands)
        self.ipu = context.ipu_id
        self.io_tiles = context.io_tile_set
        place = (context.ipu_id, context.io_tile_set)
        self.location: Location = place if kind.placed is None else kind.placed.place(inputs, attributes, place)
        self.execution_context: ExecutionContext = context.execution_context
        self.name = context.scope_prefix + kind.name
        self._created_at: SourceLocation | DebugRecord | tuple[Any, int] = context.debug_record or user_frame()
        self.after: tuple[int, ...] = ()
        self.id = -1  # set by the graph that the op is appended to

    @classmethod
    def restore(cls, kind: OpKind, graph: Graph, source: SourceLocation, **state: Any) -> Op:
        """Recreate an op from saved state, or part of a composite op."""
        op = object.__new__(cls)
        op.kind, op._graph, op._created_at = kind, graph.ref, source
        op._set(state)
        return op

    def _set(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, MappingProxyType(dict(value)) if name == "attributes" else value)

    def edit(self, **state: Any) -> None:
        """Set attributes of the op. Only this method may set them: existing sessions detect such edits.

        Args:
            **state: new values, by attribute name. Their consistency is not checked.

        Example:
            >>> site = ops.call_with_info(graph, x, w)
            >>> site.op.edit(modified=site.op.modified | {0})
        """
        graph = self.graph
        self._set(state)
        graph.ir.edits.record_edit()

    @property
    def graph(self) -> Graph:
        """The op's graph. Raises `ReferenceError` after the end of its Ir."""
        graph = self._graph()
        if graph is None:
            raise ReferenceError(f"The Ir of the op {self} is gone; keep a reference to the Ir.")
        return graph

    def location_of(self, t: Tensor) -> Location:
        """The declared location of a result."""
        if not self.kind.ipus:
            return self.location
        return (self.attributes[self.kind.ipus][self.outputs.index(t)], self.location[1])

    def actual_location(self, t: Tensor) -> Location:
        """The actual location of a result: calls and loops of multi-IPU graphs may leave it elsewhere."""
        if self.kind.runs is None or self.kind.runs.chooses:
            return self.location_of(t)
        (run,) = self.runs
        inner = run.outputs[self.outputs.index(t)].origin
        found_at = inner.location if inner.producer is None else inner.producer.actual_location(inner)
        return found_at if self._relocates_to(found_at) else self.location

    def has_certain_location(self, t: Tensor) -> bool:
        """Whether a result's ops are where this op is: a called graph may have been built on another IPU."""
        i = self.outputs.index(t)
        results = {result for run in self.runs for result in (run.outputs[i], run.outputs[i].origin)}
        return all(result.has_certain_location and not _differ(result.location, self.location) for result in results)

    def input_locations(self) -> tuple[Location, ...]:
        """Location where the op reads each input; `None` for open parts.

        An op whose results are on several IPUs reads an operand where the result at its position is, if there are as
        many.
        """
        if not self.kind.ipus:
            return ((self.ipu, self.io_tiles),) * len(self.inputs)
        ipus = self.attributes[self.kind.ipus]
        op_ipus = ipus if len(ipus) == len(self.inputs) else (None,) * len(self.inputs)
        return tuple((ipu, self.io_tiles) for ipu in op_ipus)

    def read_elsewhere(self) -> tuple[bool, ...]:
        """Flag for each input: whether a called graph reads it on another IPU."""
        elsewhere = {
            t
            for run in self.runs
            for inner, t in run.bindings
            if inner.is_read_elsewhere or _differ(inner.used_at, self.location)
        }
        return tuple(t in elsewhere for t in self.inputs)

    def _relocates_to(self, location: Location) -> bool:
        """Test whether this op calls or loops a multi-IPU graph that includes a location's IPU."""
        if location[0] in (None, self.ipu):
            return False
        return len({op.ipu for graph in called_by([self]) for op in graph.ops}) > 1

    @property
    def op_type(self) -> str:
        """Printed name of the kind, such as `"MatMul"`."""
        return self.kind.name

    @property
    def source(self) -> SourceLocation:
        """The user's line that created the op."""
        created_at = self._created_at
        if isinstance(created_at, DebugRecord):
            return created_at.location
        return created_at if isinstance(created_at, SourceLocation) else SourceLocation.of(created_at)

    @property
    def debug_record(self) -> DebugRecord:
        """The call that created the op: of a function with `popxl.context.op_debug_context`, otherwise of the op."""
        if isinstance(self._created_at, DebugRecord):
            return self._created_at
        inputs, outputs = (tuple(t.id for t in tensors) for tensors in (self.inputs, self.outputs))
        api = snake(self.op_type)
        scopes = self.name.removesuffix(self.op_type)
        return DebugRecord(api, f"{scopes}{api}", inputs, self.source.resolved, outputs)

    @property
    def parts(self) -> tuple[Op, ...]:
        """Executed ops in order: the op itself, or members of a composite op."""
        return (self,) if self.kind.stands_for is None else self.kind.stands_for.parts(self)

    @property
    def called_graphs(self) -> tuple[Graph, ...]:
        """The graphs that the op runs."""
        return tuple(self.attributes[name] for name in self.kind.graphs)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Called graphs, with their bindings."""
        return () if self.kind.runs is None else self.kind.runs.of(self)

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """Inputs that share storage with the first output; empty for results with separate storage."""
        if self.kind.view is not None:
            return self.inputs
        return tuple(self.inputs[i] for i in self.modified) if self.kind.aliased else ()

    def clone(self, inputs: Sequence[Tensor]) -> Op:
        """Clone the op in the current graph, with other inputs."""
        operands, attributes = self.kind.arguments(self, inputs)
        return self.kind.record(*operands, results=[t.name for t in self.outputs], **attributes)

    @property
    def gains(self) -> bool:
        """Test whether the op gains a result for each new graph output."""
        return self.kind.runs is not None and self.kind.runs.gains is not None

    def add_result_for(self, output: Tensor) -> None:
        """Add a result for a new graph output, if the op returns such outputs."""
        if not self.gains:
            return
        name, spec = output.name, self.kind.runs.gains(output.spec, self.attributes)  # type: ignore[union-attr,misc]
        t: Tensor = self.graph.new_tensor(name, spec, scoped=False)
        t.set_producer(self)
        self.edit(outputs=(*self.outputs, t))

    def gain_input(self, t: Tensor) -> None:
        """Bind a tensor to the newest input of the called graph; loops pass it unchanged to every iteration.

        Args:
            t: tensor of the op's graph, with the spec of the input.

        Raises:
            PopxlError: if `t` is not such a tensor, or the op is neither a call nor a loop.
        """
        wanted = self.called_graphs[0].inputs[-1] if self.gains else None
        if wanted is None or t.graph_ref is not self._graph or t.spec.to_tuple() != wanted.spec.to_tuple():
            raise PopxlError(f"{self!r} ({self.source}) cannot bind {t!r} to {wanted!r}, an input gained by its graph.")
        self.edit(inputs=(*self.inputs, t))
        t.note_read(self.input_locations()[-1], self.read_elsewhere()[-1])
        wanted.bound_to(t)

    def trim_outputs(self, count: int) -> None:
        """Take back the results after the first `count`. Nothing may use them."""
        for t in self.outputs[count:]:
            self.graph.forget(t)
        self.edit(outputs=self.outputs[:count])

    def operand_names(self) -> tuple[str, ...]:
        """Names of the inputs, as the kind's function calls them."""
        return self.operands or self.kind.operand_names(len(self.inputs))

    def apply(self, values: Sequence[Any], attributes: Mapping[str, Any] | None = None) -> Any:
        """Call the kind's function on values instead of inputs, with given or own attributes."""
        return self._call(self.kind.lowering, values, attributes=self.attributes if attributes is None else attributes)

    def on_arrays(self) -> Callable[..., Any]:
        """The op as a function of input arrays."""
        return self.kind.on_arrays(self.operands, self.attributes)

    @property
    def signature(self) -> OpSignature:
        """Identity of the computation: operand names, attributes, and specs, without the tensors."""
        inputs, outputs = (tuple(t.spec for t in tensors) for tensors in (self.inputs, self.outputs))
        return OpSignature(self.operands, tuple(self.attributes.items()), inputs, outputs)

    def remembered(self, what: str, make: Callable[[], T], *more: Any) -> T:
        """Cached result of `make` for ops of equal kind and signature; see `OpKind.remembered`."""
        return self.kind.remembered((what, *self.signature, *more), make)

    def traced(self) -> Any:
        """The jaxpr of the op, without dead code."""
        return needed(self.on_arrays(), *self.signature[2:])[0]

    def put(self, bases: Sequence[Any], view: Any) -> Any:
        """Write a view back: the bases of a view op after the update."""
        if self.kind.view is None:
            raise PopxlInternalError(f"{self!r} is no view.")
        return self._call(self.kind.view.put, bases, view, attributes=self.attributes)

    def _call(
        self, function: Callable[..., Any], values: Sequence[Any], *more: Any, attributes: Mapping[str, Any]
    ) -> Any:
        if self.operands is None:
            return function(*values, *more, **attributes)
        return function(*more, **dict(zip(self.operands, values, strict=True)), **attributes)

    def result_names(self, count: int) -> Sequence[str]:
        """Result names derived from the declaration."""
        result = self.kind.result
        if not isinstance(result, str):
            return result[:count]
        if "{" not in result:
            return [result] * count
        substitutions = dict(zip(self.operand_names(), (t.name for t in self.inputs), strict=True)) | self.attributes
        return [result.format(**substitutions, i=i) for i in range(count)]

    def __repr__(self) -> str:
        return f"Op[{self.name}.{self.id}]"


# Checks of every op -------------------------------------------------------------------------------------------------


def at_this_line(graph: Graph) -> str:
    """Location text for errors: the graph, and the user's calling line."""
    source = SourceLocation.of(user_frame())
    return f"In {graph.title}, at `{source.text}` ({source})." if source.text else f"In {graph.title}."


def not_a_tensor(name: str, operand: str, value: Any) -> TypeError:
    """Build the error for a non-tensor operand."""
    if isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value):
        remedy = (
            "These are several tensors, such as a call returns: take one of them, as in `(y,) = ops.call(graph, x)`."
        )
    elif callable(getattr(value, "call", None)) or isinstance(value, Graph):
        remedy = "A graph is no value: call it first, and take what the call returns."
    else:
        remedy = "Make a tensor of it with `popxl.constant(value, dtype)`."
    return TypeError(f"{name}: `{operand}` must be a Tensor; got {value!r} ({type(value).__name__}). {remedy}")


def foreign_tensor(name: str, operand: str, t: Tensor, graph: Graph) -> ValueError:
    """Build the error for a tensor from another graph."""
    home = t.graph_ref()
    if home is None or home.ir is not graph.ir:
        remedy = "It belongs to another Ir; a program is made of the tensors of one."
    else:
        remedy = (
            f"It is in {home.title}. Pass it into the graph as an input (an argument of the function given to "
            "`create_graph`, or `popxl.graph_input`) and bind it where the graph is called."
        )
    return ValueError(f"{name}: `{operand}` is {t!r}, which is not in {graph.title}, the current graph. {remedy}")


def _differ(first: Location, second: Location) -> bool:
    """Whether two locations are known to be on different IPUs or tile sets."""
    return any(a != b for a, b in zip(first, second, strict=True) if a is not None and b is not None)


def check_colocated(names: Sequence[str], tensors: Sequence[Tensor], operands: tuple[str, ...] | None = None) -> None:
    """Raise `ValueError` for tensors (all, or those named in `operands`) on different IPUs or tile sets."""
    for index, what, attribute in ((0, "IPUs", "ipu"), (1, "tile sets", "tile_set")):
        first: tuple[str, Tensor, Any] | None = None
        for name, t in zip(names, tensors, strict=True):
            value = t.location[index]
            if value is None or (operands is not None and name not in operands):
                continue
            if first is None or (first[2] != value and not first[1].has_certain_location):
                first = (name, t, value)
            elif first[2] != value and t.has_certain_location:
                raise ValueError(
                    f"The tensors `{first[0]}` and `{name}` are located on different {what}: "
                    f"{getattr(first[1], attribute)} and {getattr(t, attribute)}. Copy one of them first "
                    "(`ops.ipu_copy`, `ops.io_tile_copy`)."
                )
