"""What graphs mean, said once more: in NumPy with every rule about storage, and in JAX without storage.

`Machine` carries out a whole Ir on a memory of numbered cells. A tensor is an array of cell numbers: a view is the same
cells in another arrangement, an in-place op writes to them, a call copies its inputs to new ones. Nothing here asks
`popxl` what aliases or what is written; of a program it reads the ops, their inputs and attributes, and which graph
inputs are by reference. Where calls were marked as modifying an input is told by whoever marked them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax.extend.core import jaxpr_as_fun

import popxl
from popxl.tensor import Constant

Array = Any
Meaning = Callable[..., Any]

# Ops ----------------------------------------------------------------------------------------------------------------


def _cut(np: Any, t: Array, start: Any, stop: Any, step: Any, axis: Any) -> Array:
    cuts = [slice(None)] * t.ndim
    for at, *cut in zip(axis, start, stop, step, strict=True):
        cuts[at] = slice(*cut)
    return t[tuple(cuts)]


def _block(index: Array, axes: Any, sizes: Any, rank: int) -> tuple[slice, ...]:
    cuts = [slice(None)] * rank
    for begin, axis, size in zip(index.ravel(), axes, sizes, strict=True):
        cuts[axis] = slice(int(begin), int(begin) + size)
    return tuple(cuts)


def _updated(np: Any, t: Array, index: Array, update: Array, axes: Any, sizes: Any) -> Array:
    t[_block(index, axes, sizes, t.ndim)] = update
    return t


def _softmax(np: Any, t: Array, axis: int) -> Array:
    return np.exp(t) / np.exp(t).sum(tuple(range(t.ndim)[axis:]), keepdims=True)


def _swish(np: Any, t: Array) -> Array:
    return t / (1 + np.exp(-t))


ARRANGED: dict[str, Meaning] = {
    "Reshape": lambda np, t, shape: t.reshape(shape),
    "Transpose": lambda np, t, permutation: t.transpose(permutation),
    "Slice": _cut,
    "Concat": lambda np, *ts, axis: np.concatenate(ts, axis),
    "Detach": lambda np, t: t if np is numpy else jax.lax.stop_gradient(t),
}
NEW: dict[str, Meaning] = ARRANGED | {
    "Abs": lambda np, t: np.abs(t),
    "Add": lambda np, a, b: a + b,
    "Cast": lambda np, t, data_type: t.astype(data_type.as_numpy()),
    "Cos": lambda np, t: np.cos(t),
    "CumSum": lambda np, t, dim, reverse: np.cumsum(t, dim),
    "Div": lambda np, a, b: a / b,
    "DynamicSlice": lambda np, t, index, axes, sizes: t[_block(index, axes, sizes, t.ndim)],
    "Fmod": lambda np, a, b: np.fmod(a, b),
    "Gather": lambda np, t, indices, axis, zero_OOR: np.take(t, indices.astype("int32"), axis),
    "Greater": lambda np, a, b: a > b,
    "Identity": lambda np, t: t,
    "Init": lambda np, spec, init_type: np.zeros(spec.shape, spec.dtype.as_numpy()),
    "MatMul": lambda np, a, b, output_type: a @ b,
    "Max": lambda np, a, b: np.maximum(a, b),
    "Mul": lambda np, a, b: a * b,
    "Neg": lambda np, t: -t,
    "Not": lambda np, t: ~t,
    "ReduceLogSumExp": lambda np, t, axis, keepdims: np.log(np.sum(np.exp(t), axis, keepdims=keepdims)),
    "ReduceMax": lambda np, t, axis, keepdims: np.max(t, axis, keepdims=keepdims),
    "ReduceMean": lambda np, t, axis, keepdims: np.mean(t, axis, keepdims=keepdims),
    "ReduceSum": lambda np, t, axis, keepdims: np.sum(t, axis, keepdims=keepdims),
    "Relu": lambda np, t: np.maximum(t, 0),
    "Sin": lambda np, t: np.sin(t),
    "Softmax": _softmax,
    "Split": lambda np, t, lengths, axis: tuple(np.split(t, numpy.cumsum(lengths)[:-1], axis)),
    "Sub": lambda np, a, b: a - b,
    "Subsample": lambda np, t, strides: t[tuple(slice(None, None, stride) for stride in strides)],
    "Swish": _swish,
    "Tanh": lambda np, t: np.tanh(t),
    "Where": lambda np, condition, a, b: np.where(condition, a, b),
}
VIEWS: dict[str, Meaning] = {f"{name}Inplace": meaning for name, meaning in ARRANGED.items()}
WRITES: dict[str, Meaning] = {  # the new content of the first operand
    "Accumulate": lambda np, t, X, f=None: t + (1 if f is None else f) * X,
    "AccumulatorScale": lambda np, t, f: f * t,
    "AddLhsInplace": lambda np, t, u: t + u,
    "CopyVarUpdate": lambda np, t, X: X,
    "DynamicUpdateInplace": _updated,
    "ReluInplace": lambda np, t: np.maximum(t, 0),
    "ScaledAddLhsInplace": lambda np, X, Y, a, b: a * X + b * Y,
    "SwishInplace": _swish,
}

# In NumPy -----------------------------------------------------------------------------------------------------------


class Machine:
    """Runs an Ir. Variables keep their values from run to run.

    Args:
        ir: the program.
        marks: the op id and input position of each call that was marked as modifying an input.
    """

    def __init__(self, ir: popxl.Ir, marks: set[tuple[int, int]]) -> None:
        self.main = ir.main_graph
        self.marks = marks
        self.cells = numpy.zeros(0)  # float64 holds every int32 and every bool
        self.variables = {v: self.new(v.data) for v in self.main.variables}

    def run(self, feeds: Mapping[str, Sequence[Array]]) -> dict[str, list[Array]]:
        """What one run stores, transfer by transfer, by the ids of streams."""
        self.waiting = {id: iter(transfers) for id, transfers in feeds.items()}
        self.stored: dict[str, list[Array]] = defaultdict(list)
        self.carry_out(self.main, self.variables)
        return self.stored

    def new(self, values: Any) -> Array:
        """A tensor in fresh cells."""
        values = numpy.asarray(values)
        start = len(self.cells)
        self.cells = numpy.concatenate([self.cells, values.ravel()])
        return numpy.arange(start, start + values.size).reshape(values.shape)

    def read(self, t: popxl.Tensor, cells: Array) -> Array:
        """The numbers in the cells of a tensor, wide: integers have to wrap only when they are written."""
        kind = bool if t.dtype == popxl.bool else numpy.int64 if t.dtype.is_int else numpy.float64
        return self.cells[cells].astype(kind)

    def copy(self, cells: Array) -> Array:
        return self.new(self.cells[cells])

    def carry_out(self, graph: popxl.Graph, given: Mapping[popxl.Tensor, Array]) -> list[Array]:
        """Run a graph on the cells of its inputs. Returns copies of its outputs, as they are at its end."""
        values = dict(given)
        for op in graph.ops:
            for t in op.inputs:
                if t not in values:
                    assert isinstance(t, Constant), f"{t} has no value"
                    values[t] = self.new(t.data)
            results = self.results(op, [values[t] for t in op.inputs])
            values.update(zip(op.outputs, results, strict=True))
        return [self.copy(values[t] if t in values else self.new(t.data)) for t in graph.outputs]

    def results(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        """The cells of an op's results."""
        if op.op_type in CONTROL:
            return CONTROL[op.op_type](self, op, cells)
        if op.op_type in VIEWS:
            return [VIEWS[op.op_type](numpy, *cells, **op.attributes)]
        operands = map(self.read, op.inputs, cells)
        if op.op_type in WRITES:
            self.cells[cells[0]] = wrapped(op.inputs[0], WRITES[op.op_type](numpy, *operands, **op.attributes))
            return cells[:1]
        found = NEW[op.op_type](numpy, *operands, **op.attributes)
        found = found if isinstance(found, tuple) else (found,)
        return [self.new(wrapped(t, value)) for t, value in zip(op.outputs, found, strict=True)]

    # Ops that run graphs, and ops that talk to the host ---------------------------------------------------------------

    def call(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        """Copy in, run, copy out; what is by reference, or marked at this call, is copied back."""
        (graph,) = op.called_graphs
        inside = [self.copy(each) for each in cells]
        results = self.carry_out(graph, dict(zip(graph.inputs, inside, strict=True)))
        for i, t in enumerate(graph.inputs):
            if t.by_ref or (op.id, i) in self.marks:
                self.cells[cells[i]] = self.cells[inside[i]]
        return results

    def loop(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        """Results become the first inputs of the next turn; inputs by reference keep their changes, others do not."""
        (turn,) = op.called_graphs
        iteration, go_on, *inputs = turn.inputs
        count = op.attributes["carried"]
        carried, kept = [self.copy(each) for each in cells[:count]], [self.copy(each) for each in cells]
        for i in range(op.attributes["repeat_count"]):
            for k, t in enumerate(inputs):
                if k < count:
                    self.cells[kept[k]] = self.cells[carried[k]]
                elif not t.by_ref:
                    self.cells[kept[k]] = self.cells[cells[k]]
            given = {iteration: self.new(i), go_on: self.new(True), **dict(zip(inputs, kept, strict=True))}
            _, *carried = self.carry_out(turn, given)
        for k, t in enumerate(inputs):
            if t.by_ref:
                self.cells[cells[k]] = self.cells[kept[k]]
        return carried

    def conditional(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        """Run one branch, on copies."""
        graph, given = branch_taken(op, bool(self.cells[cells[0]].item()), cells[1:])
        return self.carry_out(graph, {t: self.copy(each) for t, each in zip(graph.inputs, given, strict=True)})

    def load(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        return [self.new(next(self.waiting[op.attributes["stream"].tensor_id]))]

    def store(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        self.stored[op.attributes["stream"].tensor_id].append(self.cells[cells[0]])
        return []


CONTROL: dict[str, Callable[[Machine, Any, list[Array]], Sequence[Array]]] = {
    "Call": Machine.call,
    "Loop": Machine.loop,
    "If": Machine.conditional,
    "HostLoad": Machine.load,
    "HostStore": Machine.store,
}


def wrapped(t: popxl.Tensor, value: Array) -> Array:
    """A result as its tensor holds it: integers wrap around."""
    return numpy.asarray(value).astype(numpy.int64).astype(t.dtype.as_numpy()) if t.dtype.is_int else value


def branch_taken(op: Any, flag: bool, inputs: Sequence[Any]) -> tuple[popxl.Graph, Sequence[Any]]:
    """The branch that a conditional runs, and those of the inputs that are its own."""
    then_branch, else_branch = op.called_graphs
    count = len(then_branch.inputs)
    return (then_branch, inputs[:count]) if flag else (else_branch, inputs[count:])


def transfers(graph: popxl.Graph) -> dict[str, int]:
    """How many transfers of each stream one run of a graph makes at most."""
    counts: dict[str, int] = defaultdict(int)
    for op in graph.ops:
        if op.op_type in ("HostLoad", "HostStore"):
            counts[op.attributes["stream"].tensor_id] += 1
        called = [transfers(callee) for callee in op.called_graphs]
        for id in set().union(*called):
            most = max(each.get(id, 0) for each in called)
            counts[id] += most * op.attributes.get("repeat_count", 1)
    return counts


# In JAX -------------------------------------------------------------------------------------------------------------


def as_jax(graph: popxl.Graph) -> Callable[..., list[Array]]:
    """A graph without in-place ops and streams, as a function of JAX arrays: traced now, whatever the graph becomes."""
    inputs = [jax.ShapeDtypeStruct(t.shape, t.dtype.as_numpy()) for t in graph.inputs]
    return jaxpr_as_fun(jax.make_jaxpr(lambda *given: _in_jax(graph, given))(*inputs))


def _in_jax(graph: popxl.Graph, inputs: Sequence[Array]) -> list[Array]:
    values: dict[popxl.Tensor, Array] = dict(zip(graph.inputs, inputs, strict=True))

    def read(t: popxl.Tensor) -> Array:
        return values[t] if t in values else jnp.asarray(t.data)

    for op in graph.ops:
        values.update(zip(op.outputs, _results_in_jax(op, [read(t) for t in op.inputs]), strict=True))
    return [read(t) for t in graph.outputs]


def _results_in_jax(op: Any, operands: list[Array]) -> Sequence[Array]:
    if op.op_type == "Call":
        return _in_jax(op.called_graphs[0], operands)
    if op.op_type == "Loop":
        for i in range(op.attributes["repeat_count"]):
            _, *operands[: len(op.outputs)] = _in_jax(op.called_graphs[0], [i, True, *operands])
        return operands[: len(op.outputs)]
    if op.op_type == "If":
        flag, *inputs = operands
        taken = [branch_taken(op, which, inputs) for which in (True, False)]
        return jax.lax.cond(flag.reshape(()), *(partial(_in_jax, *branch) for branch in taken))
    found = (NEW | VIEWS)[op.op_type](jnp, *operands, **op.attributes)
    return found if isinstance(found, tuple) else (found,)
