"""How a right program is made wrong: one edit of its graphs, or of a variable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl.extend.graphs import reachable
from popxl.graph import Graph
from popxl.op import Op
from popxl.tensor import Variable

REDUCING = ("ReplicatedAllReduce", "ReplicatedAllReduceInplace")
SWAPPED = {"add": "mean", "mean": "add"}


@dataclass(frozen=True)
class Mutation:
    """An edit of one op or variable.

    Attributes:
        kind: what is done.
        where: number of the graph and of the op in it; or -1, and the number of the variable.
        number: tells edits of one kind of one op apart.
        apply: does it.
    """

    kind: str
    where: tuple[int, int]
    number: int
    apply: Callable[[Any], None]

    def on(self, ir: popxl.Ir) -> tuple[set[str], str]:
        """Edit a program that was built in the same way. Returns the lines that are right, and what was edited."""
        graph, number = self.where
        if graph < 0:
            v = ir.main_graph.variables[number]
            reads = (op for op in ir.main_graph.ops if op.kind.between_replicas or op.kind.drops)
            lines = {str(op.source) for op in (*reads, *_readers_of({v}, ir.main_graph))}
            self.apply(v)
            return lines, v.name
        op = graphs(ir)[graph].ops[number]
        lines, name = right_lines(op), f"{op.op_type} of {op.inputs[0].path if op.inputs else op.outputs[0].path}"
        self.apply(op)
        return lines, f"{name} ({op.source})"


def graphs(ir: popxl.Ir) -> tuple[Graph, ...]:
    return reachable(ir.main_graph)


def right_lines(op: Op) -> set[str]:
    """The line of an op, and those of the ops that its result reaches up to the next that changes something in place:
    what is missing is seen where it matters."""
    found = {op}
    _follow(op.graph, {*op.outputs, *(op.inputs[i] for i in op.modified)}, op.graph.ops.index(op) + 1, found)
    return {str(each.source) for each in found}


def _follow(graph: Graph, reached: set[popxl.Tensor], first: int, found: set[Op]) -> None:
    """Note the ops of a graph, from one on, that tensors reach, also in the graphs that it calls and that call it."""
    for op in graph.ops[first:]:
        if not reached.isdisjoint(op.inputs):
            if op not in found:
                found.add(op)
                for run in op.runs:
                    _follow(run.graph, _bound(run, reached), 0, found)
            if not op.modified:
                reached.update(op.outputs)
    if not reached.isdisjoint(graph.outputs):
        for site in graph.call_sites:
            if site not in found:
                found.add(site)
                _follow(site.graph, {*site.outputs}, site.graph.ops.index(site) + 1, found)


def _bound(run: Any, to: Set[popxl.Tensor]) -> set[popxl.Tensor]:
    """The inputs of a run of a graph that are bound to some tensors of the caller."""
    return {t for t, given in zip(run.inputs, run.operands, strict=False) if given in to}


def _readers_of(some: Set[popxl.Tensor], graph: Graph) -> Iterator[Op]:
    """The ops that take one of these tensors themselves, also in called graphs."""
    for op in graph.ops if some else ():
        if not some.isdisjoint(op.inputs):
            yield op
            for run in op.runs:
                yield from _readers_of(_bound(run, some), run.graph)


def mutations(ir: popxl.Ir) -> Iterator[Mutation]:
    """All single edits of a program that there are."""
    sizes = ir.axes
    strides = _strides(sizes)
    for g, graph in enumerate(graphs(ir)):
        for o, op in enumerate(graph.ops):
            numbers: dict[str, Iterator[int]] = defaultdict(count)
            for kind, apply in _of_op(op, sizes, strides):
                yield Mutation(kind, (g, o), next(numbers[kind]), apply)
    for n, v in enumerate(ir.main_graph.variables):
        grouping = v.replica_grouping
        whole = v.piece is None and not v.location_info.isRemote()
        if whole and grouping.group_size > 1 and v.dtype.is_floating_point and v.nelms > 1:
            yield Mutation("initialise replicas differently", (-1, n), 0, _own_values)
        if whole and v.dtype is popxl.uint32 and v.shape == (2,):
            if grouping.num_groups > 1:
                yield Mutation("tie a seed", (-1, n), 0, _tied)
            if grouping.group_size > 1:
                yield Mutation("untie a seed", (-1, n), 0, _untied)


def _of_op(op: Op, sizes: dict[str, int], strides: dict[str, int]) -> Iterator[tuple[str, Callable[[Op], None]]]:
    attributes = op.attributes
    if op.kind.between_replicas and "group_size" in attributes and attributes["group_size"] > 1:
        stored = any(each.op_type == "HostStore" for t in op.outputs for each in _readers(op.graph, t))
        reduces = "op" in attributes and op.outputs and op.inputs[0].shape == op.outputs[0].shape
        if reduces and not op.modified and attributes.get("identical", "nothing") != "inputs":
            yield ("take a local for a global loss" if stored else "drop a collective"), _dropped
            yield "reduce twice", _doubled
            yield "scale by a wrong n", lambda op: _scaled(op, 1 / op.attributes["group_size"])
            if op.inputs[0].producer is not None and _movable(op.inputs[0].producer):
                yield "move a collective", _moved
        if attributes.get("op") in SWAPPED:
            yield "sum for mean, mean for sum", lambda op: _edited(op, op=SWAPPED[op.attributes["op"]])
        if reduces:
            half = attributes["group_size"] // 2
            if half > 1:
                yield "another group", lambda op: _edited(op, group_size=op.attributes["group_size"] // 2)
        for axis, size in sizes.items():
            other = strides[axis] != attributes["stride"]
            if other and size == attributes["group_size"]:
                yield "exchange axes", lambda op, stride=strides[axis]: _edited(op, stride=stride)
            elif reduces and size < attributes["group_size"] and len(sizes) > 1:
                yield "another group", lambda op, s=strides[axis], n=size: _edited(op, stride=s, group_size=n)
        if "op" not in attributes and _same_before(op) is not None:
            yield "read a stale piece", _stale
    if op.op_type == "HostLoad" and op.outputs[0].dtype.is_floating_point:
        yield "feed the same batch to all", _fed_alike
    if op.op_type == "MatMul":
        for i, t in enumerate(op.inputs):
            square = t.rank == 2 and t.shape[0] == t.shape[1]
            if square and isinstance(t, Variable) and t.replica_grouping.num_groups > 1:
                yield "transpose a shard", lambda op, i=i: _transposed(op, i)


def _same_before(op: Op) -> popxl.Tensor | None:
    """What an earlier op has made of the same tensor in the same way."""
    ops_before = op.graph.ops[: op.graph.ops.index(op)]
    same = (each for each in ops_before if each.kind is op.kind and each.inputs == op.inputs)
    return next((each.outputs[0] for each in same), None)


def _strides(sizes: dict[str, int]) -> dict[str, int]:
    found, stride = {}, 1
    for name, size in reversed(sizes.items()):
        found[name], stride = stride, stride * size
    return found


def _readers(graph: Graph, t: popxl.Tensor) -> list[Op]:
    return [op for op in graph.ops if t in op.inputs]


def _edited(op: Op, /, **attributes: Any) -> None:
    op.edit(attributes={**op.attributes, **attributes})


def _dropped(op: Op) -> None:
    """Have whatever reads the result read what it is made of."""
    (before,), (after,) = op.inputs[:1], op.outputs
    _replaced(op, lambda t: ops.identity(t) if before is not after else t)


def _replaced(op: Op, by: Callable[..., Any]) -> None:
    """Put other ops in the place of one, at its line."""
    graph, source, known = op.graph, op.source, {*op.graph.ops}
    graph.replace([op], by)
    for made in graph.ops:
        if made not in known:
            made.edit(_created_at=source)


def _clone(op: Op, *inputs: popxl.Tensor) -> Any:
    return op.kind(*inputs, **op.attributes)


def _stale(op: Op) -> None:
    before = _same_before(op)
    assert before is not None
    _replaced(op, lambda *_: ops.identity(before))


def _doubled(op: Op) -> None:
    def twice(t: popxl.Tensor) -> Any:
        return _clone(op, _clone(op, t))

    _replaced(op, twice)


def _scaled(op: Op, factor: float) -> None:
    _replaced(op, lambda t: _clone(op, t) * factor)


def _movable(producer: Op) -> bool:
    """Whether an op makes one value of floats, and could have been behind a collective."""
    plain = not (producer.called_graphs or producer.modified or producer.kind.view or producer.kind.between_replicas)
    return plain and len(producer.outputs) == 1 and bool(producer.inputs) and producer.inputs[0].dtype.is_floating_point


def _moved(op: Op) -> None:
    """Reduce what the op before takes, in place of what it makes."""
    producer = op.inputs[0].producer
    assert producer is not None

    def before(*inputs: popxl.Tensor) -> Any:
        return producer.clone([_clone(op, inputs[0]), *inputs[1:]]).outputs

    if len({*producer.inputs}) < len(producer.inputs):
        raise ValueError("it takes a tensor twice")
    _replaced(producer, before)
    _dropped(op)


def _fed_alike(op: Op) -> None:
    """All replicas get the data of one."""

    def of_one(*_: popxl.Tensor) -> Any:
        t = ops.host_load(op.attributes["stream"])
        rows = ops.collectives.replicated_all_gather(t, 0, output_shape="new_axis")
        return ops.slice(rows, 0, 1, axis=0).reshape(t.shape) * 1

    _replaced(op, of_one)


def _transposed(op: Op, i: int) -> None:
    def other(*inputs: popxl.Tensor) -> Any:
        return _clone(op, *(t.T if j == i else t for j, t in enumerate(inputs)))

    _replaced(op, other)


def _own_values(v: Variable) -> None:
    """A value of its own for each replica."""
    ir, data = v.ir, v.numbers()
    grouping = v.replica_grouping
    rows = data[None] if grouping.num_groups == 1 else data
    each = rows[np.asarray(grouping.assignment)].astype(np.float32)
    each = each + np.random.default_rng(1).normal(size=each.shape) / 4
    v.replica_grouping = ir.replica_grouping(group_size=1)
    v.data = each.astype(data.dtype)


def _tied(v: Variable) -> None:
    """One seed for all replicas."""
    data = v.numbers()
    v.data = np.broadcast_to(data[:1], data.shape)


def _untied(v: Variable) -> None:
    """A seed for each replica."""
    ir = v.ir
    v.replica_grouping = ir.replica_grouping(group_size=1)
    v.data = popxl.create_seeds(11, replicas=ir.replication_factor)
