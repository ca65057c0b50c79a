"""Graphs as text: `schedule`, the listing that PopXL programs print, and `algebra`, named definitions for readers.

The text of a graph is deterministic. Nothing here computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np

from popxl.base.pages import LONGEST, Listing, Page
from popxl.core.aliasing import reachable
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream
from popxl.values.spec import brief

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


def schedule(graph: Graph, names: Mapping[Tensor, str] | None = None) -> str:
    """Text of a graph's ops in execution order, one line each, with numbered tensors.

    Args:
        names: names for some of the graph's inputs, shown as `name=%2`.

    Example:
        >>> print(schedule(graph, {graph.inputs[1]: "w"}))
        Graph : ...
          (%1, w=%2) -> (%3) {
            MatMul... (%1 [(2, 4) float32], %2 [(4, 3) float32]) -> (%3 [(2, 3) float32])
          }
    """
    numbers: dict[Tensor, int] = {}

    def number(t: Tensor) -> str:
        return f"%{numbers.setdefault(t, len(numbers) + 1)}"

    def numbers_of(tensors: Sequence[Tensor]) -> str:
        return ", ".join(f"{number(t)} [{t.shape} {t.dtype.name}]" for t in tensors)

    known = names or {}
    inputs = ", ".join(f"{known[t]}={number(t)}" if t in known else number(t) for t in graph.inputs)
    lines = []
    for op in graph.ops:
        called = f"({op.called_graphs[0].name})" if len(op.called_graphs) == 1 else ""
        lines.append(f"    {op.op_type}.{op.id}{called} ({numbers_of(op.inputs)}) -> ({numbers_of(op.outputs)})")
    outputs = ", ".join(number(t) for t in graph.outputs)
    return "\n".join([f"Graph : {graph.name}", f"  ({inputs}) -> ({outputs}) {{", *(lines or ["    "]), "  }"])


Note = Callable[[Tensor], str]
"""Function that returns a remark to print after the type of a value."""


def _nothing(t: Tensor) -> str:
    return ""


def algebra(graph: Graph, note: Note = _nothing) -> str:
    """Text of a graph and its callees as definitions of named values.

    `&x` marks an operand that the op overwrites. Graphs are shown once, however often they are called.
    """
    _, *called = reachable(graph)
    text = definition(graph, note)
    if called:
        text += "\n  where\n" + "\n\n".join(indent(definition(callee, note), "    ") for callee in called)
    return text


def page(graph: Graph) -> Page:
    """Notebook page of a graph: its definition, with foldable callees.

    Of many graphs, only the first are shown; of a long graph, its beginning and end.
    """
    _, *called = reachable(graph)
    omitted = [f"and {len(called) - LONGEST} more graphs"] if len(called) > LONGEST else []
    listings = [Listing(_number_calls(g), definition(g), g is graph) for g in (graph, *called[:LONGEST])]
    return Page(graph.title, [*listings, *omitted])


def _number_calls(graph: Graph) -> str:
    return f"{graph.name or 'main graph'}: {len(graph.ops)} op{'s' * (len(graph.ops) != 1)}"


def definition(graph: Graph, note: Note = _nothing) -> str:
    """A graph as definitions of named values, without the graphs it calls."""
    return "\n".join(_lines(graph, note))


def line(op: Op) -> str:
    """Text line of an op in its graph's definition.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     y = popxl.variable([1.0, 2.0], name="x") + 1
        >>> print(line(y.producer))
        add_out: f32[2] = Add(x, 1.0)
    """
    results = ", ".join(map(_typed, op.outputs))
    return f"{results} = {_expression(op)}" if results else _expression(op)


def summary(ops: Sequence[Op]) -> str:
    """Short text for several ops: their called graphs, or first and last op.

    Example:
        >>> summary(main.ops[:2])
        'Init … HostLoad, 2 ops'
    """
    called = Counter(graph.name for op in ops for graph in op.called_graphs)
    plain = sum(not op.called_graphs for op in ops)
    plain_text = f"{plain} op{'s' * (plain > 1)}"
    if not called:
        return ops[0].op_type if len(ops) == 1 else f"{ops[0].op_type} … {ops[-1].op_type}, {plain_text}"
    names = [name if count == 1 else f"{name} ×{count}" for name, count in called.items()]
    names[3:] = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names, plain_text] if plain else names)


def _lines(graph: Graph, note: Note) -> Iterator[str]:
    parameters = ", ".join(f"{'&' if t.by_ref else ''}{_typed(t)}{note(t)}" for t in graph.inputs)
    yield f"{graph.name}({parameters}):{_differentiated(graph)}" if graph.name or parameters else "main graph:"
    rows: list[tuple[tuple[Tensor, ...], str]] = [row for v in graph.variables for row in _declared(v)]
    rows += [(op.outputs, _expression(op)) for op in graph.ops]
    width = max((len(_typed(t) + note(t)) for tensors, _ in rows for t in tensors), default=0)
    for tensors, expression in rows:
        *earlier, last = (_typed(t) + note(t) for t in tensors) if tensors else ("",)
        yield from (f"    {text}," for text in earlier)
        yield f"    {last:{width}} = {expression}" if last else f"    {expression}"
    if graph.outputs:
        yield f"    return {', '.join(t.path for t in graph.outputs)}"
    elif not rows:
        yield "    pass"


def _differentiated(graph: Graph) -> str:
    """Custom derivative of a graph, as text; empty for op-by-op differentiation."""
    if graph.derivative is not None:
        return "  # has its own derivative"
    if graph.keeps is None:
        return ""
    keeps, offloads = (
        ", ".join(t.path for t in graph.tensors if t in tensors)
        for tensors in (graph.keeps - graph.offloads, graph.offloads)
    )
    clauses = [f"{verb} {names}" for verb, names in (("keeps", keeps), ("offloads", offloads)) if names]
    return f"  # computed again for its gradient{', which ' * bool(clauses)}{' and '.join(clauses)}"


def _declared(v: Variable) -> Iterator[tuple[tuple[Tensor, ...], str]]:
    """Text of a variable: storage location outside the device, and shard per replica."""
    location, sharing = v.location_info, _shared_along(v)
    if v.piece is not None:
        yield (v,), f"variable in pieces{sharing}"
        yield (v.piece,), f"piece of {v.name}"
    elif location.buffer is not None:
        sharding = " in pieces" if location.sharded else ""
        yield (v,), f"variable{sharding} in buffer {location.buffer.remote_buffer_id}, slot {location.entry}{sharing}"
    else:
        yield (v,), f"variable{sharing}"


def _shared_along(v: Variable) -> str:
    """Named axes along which replicas share a variable, unless all axes do."""
    axes, grouping = v.ir.named_axes, v.replica_grouping
    if axes is None or grouping.num_groups == 1:
        return ""
    names = axes.names(grouping.assignment)
    if names == ():
        return ", one for each replica"
    return f", shared along {', '.join(names)}" if names else f", {grouping}"


def _typed(t: Tensor) -> str:
    return f"{t.path}: {brief(t)}"


def _expression(op: Op) -> str:
    device = f"  @ ipu {op.ipu}" if op.ipu else ""
    return f"{op.op_type}{_arguments(op)}{device}"


def _arguments(op: Op) -> str:
    if op.kind.stands_for is not None:
        return f"({', '.join(member.op_type + _arguments(member) for member in op.parts)})"
    operands = [f"{'&' if i in op.modified else ''}{_operand(t)}" for i, t in enumerate(op.inputs)]
    named = zip(op.operand_names(), op.kind.operand_names(len(operands)), operands, strict=True)
    arguments = [text if name == default_name else f"{name}={text}" for name, default_name, text in named]
    plain = {n: v for n, v in op.attributes.items() if v is not None and n not in op.kind.graphs}
    along = _along(op)
    if along:
        del plain["stride"], plain["group_size"]
    arguments += [f"{name}={_plain(value)}" for name, value in plain.items()] + along
    called = "".join(f" {graph.name}" for graph in op.called_graphs)
    return f"{called}({', '.join(arguments)})"


def _along(op: Op) -> list[str]:
    """Named axes of an op's collective, instead of strides."""
    if not op.kind.between_replicas or (axes := op.graph.ir.named_axes) is None:
        return []
    names = axes.strided_names(op.attributes["stride"], op.attributes["group_size"])
    axes_text = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return [f"along={axes_text}"] if names else []


def _operand(t: Tensor) -> str:
    if not isinstance(t, Constant):
        return t.path
    return _elements(t.data.view(t.dtype.as_jax())) if t.nelms <= 4 else f"constant {brief(t)}"


def _elements(array: np.ndarray) -> str:
    """Text of a whole array, with enough digits to identify each number in its dtype."""
    return f"[{', '.join(map(_elements, array))}]" if array.ndim else str(array[()])


def _plain(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _elements(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Stream):
        return f"{value.tensor.name} ×{value.num_host_transfers}" if value.has_own_transfers else value.tensor.name
    if isinstance(value, RemoteBuffer):
        return str(value.remote_buffer_id)
    return str(value)
