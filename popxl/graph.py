"""`Graph`: ops in order of creation, the tensors that they make, and the names of both.

A graph is entered with `with graph:`, and ops created inside become part of it. It is also the one place that
invents names: everything else passes a wish, and gets a tensor whose id is unique in the Ir.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from popxl.base.arguments import check_type
from popxl.base.copies import NotCopyable
from popxl.context import get_current_context
from popxl.core import editing
from popxl.core.printing import algebra, page, schedule
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.dtypes import check_dtype, dtype
from popxl.errors import PopxlError
from popxl.values.spec import TensorSpec

if TYPE_CHECKING:
    from popxl.base.source import SourceLocation
    from popxl.core.derivative import Derivative
    from popxl.core.recording import Op
    from popxl.ir import Ir

__all__ = ["Graph"]


class Graph(NotCopyable):
    """A graph of an Ir: main graph or called subgraph.

    Obtain graphs from an `Ir`: `ir.main_graph`, `ir.create_graph(...)`, `ir.create_empty_graph(...)`.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph as main:
        ...     x = popxl.variable([1.0, 2.0], name="x")
        ...     y = x + 1
        >>> print(main)
        main graph:
            x: f32[2]       = variable
            add_out: f32[2] = Add(x, 1.0)

    Attributes:
        ops: the ops, in creation order, which is the order they run in.
        call_sites: the ops of the Ir that run this graph.
        differentiable: false for a graph whose gradient has to be supplied: differentiating a caller then asks for the
            gradient information of this graph instead of differentiating it.
        derivative: rule that differentiates the graph, unless its ops are differentiated one by one.
        keeps: for a graph that its gradient graph recomputes, the tensors that are kept for this.
        offloads: those among them that are kept in host memory.
        gradient_of: for a gradient graph, its forward graph.
        gradient_given_at: for a graph with a gradient supplied by a module, the line that supplied it.
    """

    def __init__(self) -> None:
        raise TypeError(
            "Graphs are not constructed: use `ir.main_graph`, `ir.create_graph` or `ir.create_empty_graph`."
        )

    @classmethod
    def _make(cls, ir: Ir, id: str) -> Graph:
        """A new graph. Only `Ir` calls this."""
        graph = object.__new__(cls)
        graph._ir = ir
        graph._id = id
        graph.ref = weakref.ref(graph)
        graph.ops = []
        graph.call_sites = []
        graph._inputs = []
        graph._outputs = []
        graph._tensors = {}
        graph._streams = {}
        graph._prefix = f"{id}/" if id else ""
        return graph

    _ir: Ir
    _id: str
    ref: weakref.ref[Graph]
    ops: list[Op]
    call_sites: list[Op]
    differentiable: bool = True
    derivative: Derivative | None = None
    keeps: frozenset[Tensor] | None = None
    offloads: frozenset[Tensor] = frozenset()
    gradient_of: Graph | None = None
    gradient_given_at: SourceLocation | None = None
    _inputs: list[Tensor]
    _outputs: list[Tensor]
    _tensors: dict[str, Tensor]
    _streams: dict[str, Tensor]  # a separate namespace: a stream and a tensor loaded from it may share a name
    _prefix: str

    # Identity ---------------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """`""` for the main graph; otherwise a unique name within the Ir."""
        return self._id

    @property
    def name(self) -> str:
        """The id."""
        return self._id

    @property
    def ir(self) -> Ir:
        """The graph's Ir."""
        return self._ir

    @property
    def title(self) -> str:
        """The graph in a sentence: "the main graph", or "graph `loss_subgraph(0)`"."""
        return f"graph `{self.id}`" if self.id else "the main graph"

    @property
    def main_graph(self) -> Graph:
        """The main graph of the graph's Ir."""
        return self.ir.main_graph

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs, in the order callers bind them."""
        return tuple(self._inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs, in order."""
        return tuple(self._outputs)

    @property
    def inputs_by_name(self) -> dict[str, Tensor]:
        """Ordered mapping of input names to inputs."""
        return {t.name: t for t in self._inputs}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the graph, sorted by id; in the main graph, one for each stream among them."""
        return tuple(sorted([*self._tensors.values(), *self._streams.values()], key=lambda t: t.id))

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Variables sorted by id; empty except for the main graph."""
        return tuple(sorted([t for t in self._tensors.values() if isinstance(t, Variable)], key=attrgetter("id")))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The constants, sorted by id; those that operators made of numbers too."""
        return tuple(t for t in self.tensors if isinstance(t, Constant))

    @property
    def called_graphs(self) -> tuple[Graph, ...]:
        """The distinct graphs that ops of this graph run, in order of their first call."""
        return tuple(dict.fromkeys(graph for op in self.ops for graph in op.called_graphs))

    def get_tensor(self, tensor_id: str) -> Tensor:
        """The tensor, or else stream tensor, with this id. Raises `PopxlError` for unknown ids."""
        t = self._tensors.get(tensor_id, self._streams.get(tensor_id))
        if t is None:
            raise PopxlError(f"There is no tensor with the id {tensor_id!r} in {self.title}.")
        return t

    def __contains__(self, t: object) -> bool:
        """Whether the graph has a tensor with the id of `t`. Raises `TypeError` for non-tensors."""
        if not isinstance(t, Tensor):
            raise TypeError(f"Only a Tensor can be in a graph; got {t!r} ({type(t).__name__}).")
        return t.id in self._tensors or t.id in self._streams

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            raise TypeError(f"A Graph is compared with a Graph only; got {other!r} ({type(other).__name__}).")
        return self is other

    __hash__ = object.__hash__  # of identity, as equality is

    def __repr__(self) -> str:
        return f"Graph[id={self.id} name={self.name}]"

    def __str__(self) -> str:
        return algebra(self)

    def _repr_html_(self) -> str:
        return page(self).html()

    def print_schedule(self) -> str:
        """The ops in the order they run, one line each, with numbered tensors. Returns the text."""
        return schedule(self)

    # Building -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        get_current_context().push_graph(self)
        return self

    def __exit__(self, *exception: object) -> None:
        get_current_context().pop_graph()

    def new_tensor(self, name: str | None, spec: TensorSpec, kind: type[Tensor] = Tensor, scoped: bool = True) -> Any:
        """A tensor of this graph that nothing makes yet. Its id is the wished name, made unique."""
        if name is not None:
            check_type(name, str, "The name of a tensor", "a string")
        wish = f"{get_current_context().scope_prefix}{name or 't'}" if scoped else name or "t"
        return self._named(wish, spec, kind, self._tensors)

    def new_stream_tensor(self, name: str, spec: TensorSpec) -> Tensor:
        """The tensor that stands for a stream. Its id is the wished name, made unique among those of streams."""
        return self._named(f"{get_current_context().scope_prefix}{name}", spec, Tensor, self._streams)

    def _named(self, wish: str, spec: TensorSpec, kind: type[Tensor], known: dict[str, Any]) -> Any:
        """A tensor among those known. Its name is the wish, made unique among theirs."""
        if not isinstance(spec.dtype, dtype):  # checked here, because the text of the error is expensive
            check_dtype(spec.dtype, f"The dtype of {wish!r}")
        id = self._prefix + wish
        if id in known:
            suffix = f"__t{self.ir.next_suffix()}"
            wish, id = wish + suffix, id + suffix
            if id in known:
                raise PopxlError(f"The tensor id {id!r} is taken: names ending in `__t<number>` are for popxl to give.")
        t = known[id] = kind._make(self, id, wish, spec)
        self._ir.edits.record_edit()
        return t

    def rename(self, t: Tensor, name: str) -> None:
        """Rename a tensor of this graph to a unique name, before any reference to its id."""
        self.forget(t)
        self._adopt(t, name)

    def show_as(self, paths: Mapping[Tensor, str]) -> None:
        """Set the printed paths of tensors of this graph: see `Tensor.path`. Paths that are names of other tensors are
        left out."""
        for t, path in paths.items():
            if t.graph_ref is self.ref and self._tensors.get(self._prefix + path, t) is t:
                t._path = path

    def add_input(
        self, spec: TensorSpec, name: str | None = None, by_ref: bool = False, path: str | None = None
    ) -> Tensor:
        """Append an input. The path is its display name, if different from its name."""
        t = self.new_tensor(name, spec)
        t._by_ref = by_ref
        self._inputs.append(t)
        if path is not None:
            self.show_as({t: path})
        return t

    def add_input_like(self, t: Tensor, by_ref: bool = False) -> Tensor:
        """Append an input with spec, name and display name of another graph's tensor."""
        return self.add_input(t.spec, t.name, by_ref, t._path)

    def sort_inputs(self, first: int, key: Callable[[Tensor], Any]) -> None:
        """Order the inputs from number `first` on. Only for a graph that nothing calls yet."""
        self._inputs[first:] = sorted(self._inputs[first:], key=key)
        self._ir.edits.record_edit()

    def add_output(self, t: Tensor, extend_calls: bool = True) -> None:
        """Append `t` to the outputs.

        Args:
            t: a tensor of this graph. Any tensor may be an output, and more than once.
            extend_calls: give every existing call of the graph the new output too.

        Raises:
            TypeError: if `t` is not a tensor.
            ValueError: if `t` is not in this graph.
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"graph_output: expected a Tensor, got {t!r} ({type(t).__name__}).")
        if t.graph_ref is not self.ref:
            raise ValueError(f"graph_output: {t!r} is not in {self.title}.")
        self._outputs.append(t)
        self._ir.edits.record_edit()
        if extend_calls:
            for op in self.call_sites:
                op.add_result_for(t)

    def forget(self, t: Tensor) -> None:
        """Take back a tensor that nothing uses."""
        del self._tensors[t.id]

    def trim_outputs(self, count: int) -> None:
        """Take back the outputs after the first `count`. Nothing may use them."""
        del self._outputs[count:]
        self._ir.edits.record_edit()

    def append(self, op: Op, specs: Sequence[TensorSpec], names: Sequence[str | None]) -> None:
        """Append a checked op and create its results. For use by `OpKind` only."""
        sequence = get_current_context().sequence
        key = (self, op.execution_context) if sequence.mode is not None else None
        op.after = sequence.predecessors(key)
        op.outputs = self._new_tensors(specs, names)
        op.id = self.ir.next_op_id()
        sequence.remember(key, op.id)
        self.take_in(op)

    def take_in(self, op: Op) -> None:
        """Append an op with existing results, and notify dependents."""
        for t, place, elsewhere in zip(op.inputs, op.input_locations(), op.read_elsewhere(), strict=True):
            t.note_read(place, elsewhere)
        for part in op.parts:
            overwritten = part.inputs[min(part.modified)] if part.kind.aliased and part.modified else None
            for t in part.outputs:
                t.set_producer(op, overwritten)
        self.ops.append(op)
        self._ir.edits.record_edit()
        for graph in op.called_graphs:
            graph.call_sites.append(op)

    # Editing --------------------------------------------------------------------------------------------------------

    def reorder(self, ops: Iterable[Op]) -> None:
        """Reorder ops, preserving meaning.

        Linear in the number of ops. Ongoing iterations over `graph.ops` continue in the old order.

        Args:
            ops: the ops of the graph, in their new order.

        Raises:
            PopxlError: if these are not the ops of the graph, or one comes before an op that it needs: which makes an
                input of it, uses the same storage while one of them changes it, uses the same stream, or comes first
                by `in_sequence`. Nothing has changed then.

        Example:
            >>> loads = [op for op in graph.ops if not op.inputs]
            >>> graph.reorder(loads + [op for op in graph.ops if op.inputs])
        """
        editing.reorder(self, ops)

    def replace(self, ops: Sequence[Op], by: Callable[..., Any]) -> None:
        """Replace ops by others with the same result tensors, so that consumers stay unchanged.

        `by` is called in this graph to create the new ops. It gets the inputs of `ops`, those of the first op first,
        and returns tensors for all their outputs in the same order, each made by a new op. The new ops take the place
        of `ops` in the schedule, on the device, in name scopes, and in the order given by `in_sequence`. Hooks see them
        after all edits.

        Linear in the number of ops. Ongoing iterations over `graph.ops` continue over the old ops.

        Args:
            ops: ops of this graph that follow each other and do not need each other's results.
            by: function that makes the new ops.

        Raises:
            PopxlError: if `ops` are not such ops, or the new tensors differ from the results in number, shape, dtype or
                shared storage. Nothing has changed then, nor if `by` raises.

        Example:
            >>> graph = ir.create_graph(lambda x: x * x + 1, x)
            >>> (square,) = (op for op in graph.ops if op.op_type == "Mul")
            >>> graph.replace([square], lambda lhs, rhs: ops.pow(lhs, 2))
        """
        editing.replace(self, ops, by)

    def remove(self, ops: Iterable[Op]) -> None:
        """Remove ops whose results nothing needs. Ops that `in_sequence` has put after them come after those before.

        Args:
            ops: ops of this graph.

        Raises:
            PopxlError: if `ops` are not ops of this graph, or another op or an output needs a result of theirs. Nothing
                has changed then.

        Example:
            >>> graph = ir.create_graph(lambda x: x * x + 1, x)
            >>> square = graph.ops[0]
            >>> graph.replace([graph.ops[-1]], lambda *_: ops.exp(graph.inputs[0]))
            >>> graph.remove([square])
            >>> [op.op_type for op in graph.ops if op.op_type != "Constant"]
            ['Exp']
        """
        editing.remove(self, ops)

    def move(self, ops: Iterable[Op], into: Graph, given: Mapping[Tensor, Tensor]) -> None:
        """Move ops to the end of another graph, preserving order.

        The results move along: they remain the same tensors, under names that are unique in the other graph. The order
        given by `in_sequence` is kept, also relative to ops of the other graph.

        Linear in the number of ops. Ongoing iterations over `graph.ops` continue over the old ops. Hooks
        are not called: nothing is created.

        Args:
            ops: ops of this graph, whose results nothing else in it needs.
            into: a graph of the same Ir that nothing calls.
            given: tensors of the other graph that replace tensors that stay in this one.

        Raises:
            PopxlError: for other `ops` or `into`, or if `given` maps a tensor that is read and stays here to no tensor
                of `into` with the same spec. Then nothing has changed.

        Example:
            >>> y = ops.gelu(x)
            >>> part = ir.create_empty_graph("part")
            >>> main.move([y.producer], part, {x: part.add_input(x.spec, "x")})
            >>> part.add_output(y)
            >>> (y_of_call,) = ops.call(part, x)
        """
        editing.move(self, ops, into, given)

    def _adopt(self, t: Tensor, name: str) -> None:
        """Take over an unowned tensor under a unique name."""
        fresh = self.new_tensor(name, t.spec, scoped=False)
        t._id, t._name, t.graph_ref = fresh.id, fresh.name, self.ref
        self._tensors[t.id] = t

    def _new_tensors(self, specs: Sequence[TensorSpec], names: Sequence[str | None]) -> tuple[Tensor, ...]:
        """Several new tensors; none, if a name cannot be given."""
        if len(specs) == 1 == len(names):  # nearly always
            return (self.new_tensor(names[0], specs[0]),)
        made: list[Tensor] = []
        try:
            for spec, name in zip(specs, names, strict=True):
                made.append(self.new_tensor(name, spec))
        except BaseException:
            for t in made:
                self.forget(t)
            raise
        return tuple(made)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def register_op_created_hook(self, fn: Callable[[Op], Any]) -> int:
        """Call `fn(op)` after each op created in this graph. Returns a handle for removing the hook."""
        return get_current_context().register_op_created_hook(fn, self)

    def remove_op_created_hook(self, handle: int) -> None:
        """Remove a hook of any graph. Raises `ValueError` for an unknown handle."""
        get_current_context().remove_op_created_hook(handle)
