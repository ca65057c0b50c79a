"""What graphs mean, said once more: in NumPy with every rule about storage, and in JAX without storage.

`Machine` carries out a whole Ir, for each replica on a memory of numbered cells. A tensor is an array of cell numbers:
a view is the same cells in another arrangement, an in-place op writes to them, a call copies its inputs to new ones,
unless they are by reference.
Nothing here asks `popxl` what aliases or what is written; of a program it reads the ops, their inputs and attributes,
and which graph inputs are by reference. Where calls were marked as modifying an input is told by whoever marked them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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


@jax.custom_jvp
def _greater_one(a: Array, b: Array) -> Array:
    """The maximum, of which both get the whole gradient where they are equal; JAX's own shares it out."""
    return jnp.maximum(a, b)


@_greater_one.defjvp
def _change_of_greater_one(at: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    result = _greater_one(*at)
    return result, sum(jnp.where(t == result, change, 0) for t, change in zip(at, changes, strict=True))


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
    "Max": lambda np, a, b: (numpy.maximum if np is numpy else _greater_one)(a, b),
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


Work = Generator[Any, Any, Sequence[Array]]
"""A replica at work: it yields an op and its operand where others have to give theirs, and is sent what all gave."""


class Machine:
    """Runs an Ir, all replicas in step. Variables and remote buffers keep their values from run to run.

    Args:
        ir: the program.
        marks: the op id and input position of each call that was marked as modifying an input.
    """

    def __init__(self, ir: popxl.Ir, marks: set[tuple[int, int]]) -> None:
        self.main = ir.main_graph
        self.replicas = [Replica(ir, marks, number) for number in range(ir.replication_factor)]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, list[list[Array]]]:
        """What each replica stores in one run, transfer by transfer, by the ids of streams.

        Args:
            feeds: by the ids of streams: all transfers, each of all replicas.
        """
        works = []
        for number, replica in enumerate(self.replicas):
            replica.waiting = {id: iter(array[:, number]) for id, array in feeds.items()}
            replica.stored = defaultdict(list)
            works.append(replica.carry_out(self.main, replica.variables))
        given: list[Array] | None = None
        while True:
            asked = [next(work, None) if given is None else _sent(work, given) for work in works]
            if None in asked:
                assert asked == [None] * len(works), "only some of the replicas talk to the others"
                break
            assert len({op.id for op, _ in asked}) == 1, "replicas talk to each other in different ops"
            given = [value for _, value in asked]
        for replica in self.replicas:
            replica.forget()
        ids = set().union(*(replica.stored for replica in self.replicas))
        return {id: [replica.stored[id] for replica in self.replicas] for id in ids}

    def values(self, v: popxl.Tensor) -> list[Array]:
        """What each replica holds of a variable."""
        return [replica.cells[replica.held[v]] for replica in self.replicas]


def _sent(work: Work, value: Any) -> Any:
    """What work asks next, once it has got a value; `None` at its end."""
    try:
        return work.send(value)
    except StopIteration:
        return None


class Replica:
    """One replica of a program that runs.

    Args:
        ir, marks: as for `Machine`.
        number: which replica it is.

    Attributes:
        cells: the memory.
        variables: the cells of those that the program may use.
        held: the cells of all variables, those in remote buffers among them.
        waiting, stored: of each stream, what will be loaded, and what has been stored.
    """

    def __init__(self, ir: popxl.Ir, marks: set[tuple[int, int]], number: int) -> None:
        self.marks = marks
        self.number = number
        self.cells = numpy.zeros(64)  # float64 holds every int32 and every bool
        self.used = 0
        self.held = {v: self.new(self.own(v)) for v in ir.main_graph.variables}
        self.variables = {v: cells for v, cells in self.held.items() if not v.location_info.isRemote()}
        self.buffers = {b: self.new(numpy.zeros((b.entries, *b.tensor_shape))) for b in ir.remote_buffers}
        for v in self.held.keys() - self.variables.keys():
            self.held[v] = self.buffers[v.location_info.buffer][v.location_info.entry]
            self.cells[self.held[v]] = self.own(v)
        self.lasting = self.used
        self.waiting: dict[str, Iterator[Array]] = {}
        self.stored: dict[str, list[Array]] = {}

    def own(self, v: Any) -> Array:
        """What this replica has of a variable at first."""
        return v.data if v.replica_grouping.num_groups == 1 else v.data[v.replica_grouping.assignment[self.number]]

    def new(self, values: Any) -> Array:
        """A tensor in fresh cells."""
        values = numpy.asarray(values)
        start, self.used = self.used, self.used + values.size
        while self.used > len(self.cells):
            self.cells = numpy.concatenate([self.cells, numpy.zeros_like(self.cells)])
        self.cells[start : self.used] = values.ravel()
        return numpy.arange(start, self.used).reshape(values.shape)

    def forget(self) -> None:
        """Free the cells of all that does not last from run to run."""
        self.used = self.lasting

    def read(self, t: popxl.Tensor, cells: Array) -> Array:
        """The numbers in the cells of a tensor, wide: integers have to wrap only when they are written."""
        kind = bool if t.dtype == popxl.bool else numpy.int64 if t.dtype.is_int else numpy.float64
        return self.cells[cells].astype(kind)

    def copy(self, cells: Array) -> Array:
        return self.new(self.cells[cells])

    def carry_out(self, graph: popxl.Graph, given: Mapping[popxl.Tensor, Array]) -> Work:
        """Run a graph on the cells of its inputs. Returns copies of its outputs, as they are at its end."""
        values = dict(given)
        for op in graph.ops:
            for t in op.inputs:
                if t not in values:
                    assert isinstance(t, Constant), f"{t} has no value"
                    values[t] = self.new(t.data)
            results = yield from self.results(op, [values[t] for t in op.inputs])
            values.update(zip(op.outputs, results, strict=True))
        return [self.copy(values[t] if t in values else self.new(t.data)) for t in graph.outputs]

    def results(self, op: Any, cells: list[Array]) -> Work:
        """The cells of an op's results."""
        if op.op_type in CONTROL:
            return (yield from CONTROL[op.op_type](self, op, cells))
        if op.op_type in EXCHANGES:
            return EXCHANGES[op.op_type](self, op, cells)
        if op.op_type in VIEWS:
            return [VIEWS[op.op_type](numpy, *cells, **op.attributes)]
        operands = list(map(self.read, op.inputs, cells))
        if op.op_type in BETWEEN:
            values = yield op, operands[0]
            found = BETWEEN[op.op_type](self.of_group(op, values), self.rank(op), **op.attributes)
            if op.modified:
                self.cells[cells[0]] = wrapped(op.inputs[0], found)
                return cells[:1]
        elif op.op_type in WRITES:
            self.cells[cells[0]] = wrapped(op.inputs[0], WRITES[op.op_type](numpy, *operands, **op.attributes))
            return cells[:1]
        else:
            found = NEW[op.op_type](numpy, *operands, **op.attributes)
        found = found if isinstance(found, tuple) else (found,)
        return [self.new(wrapped(t, value)) for t, value in zip(op.outputs, found, strict=True)]

    # Ops that run graphs ----------------------------------------------------------------------------------------------

    def call(self, op: Any, cells: list[Array]) -> Work:
        """Run a graph on copies, and on the cells themselves of what is by reference, or marked at this call."""
        (graph,) = op.called_graphs
        inside = {
            t: each if t.by_ref or (op.id, i) in self.marks else self.copy(each)
            for i, (t, each) in enumerate(zip(graph.inputs, cells, strict=True))
        }
        return (yield from self.carry_out(graph, inside))

    def loop(self, op: Any, cells: list[Array]) -> Work:
        """Results become the first inputs of the next turn; inputs by reference keep their changes, others do not."""
        (turn,) = op.called_graphs
        iteration, go_on, *inputs = turn.inputs
        count = op.attributes["carried"]
        carried = [self.copy(each) for each in cells[:count]]
        before = [self.copy(each) for each in cells]  # what is by value begins with that each time
        kept = [each if t.by_ref else self.copy(each) for t, each in zip(inputs, cells, strict=True)]
        for i in range(op.attributes["repeat_count"]):
            for k, t in enumerate(inputs):
                if k < count:
                    self.cells[kept[k]] = self.cells[carried[k]]
                elif not t.by_ref:
                    self.cells[kept[k]] = self.cells[before[k]]
            given = {iteration: self.new(i), go_on: self.new(True), **dict(zip(inputs, kept, strict=True))}
            _, *carried = yield from self.carry_out(turn, given)
        return carried

    def conditional(self, op: Any, cells: list[Array]) -> Work:
        """Run one branch, on copies."""
        graph, given = branch_taken(op, bool(self.cells[cells[0]].item()), cells[1:])
        inside = {t: self.copy(each) for t, each in zip(graph.inputs, given, strict=True)}
        return (yield from self.carry_out(graph, inside))

    # Ops that talk to the host, and to other replicas -----------------------------------------------------------------

    def load(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        return [self.new(next(self.waiting[op.attributes["stream"].tensor_id]))]

    def store(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        self.stored[op.attributes["stream"].tensor_id].append(self.cells[cells[0]])
        return []

    def slot(self, op: Any, cells: list[Array]) -> Array:
        """The cells of the slot of a remote buffer that an op is about; its number is the last operand."""
        return self.buffers[op.attributes["buffer"]][int(self.cells[cells[-1]].item())]

    def remote_load(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        return [self.copy(self.slot(op, cells))]

    def remote_load_inplace(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        self.cells[cells[0]] = self.cells[self.slot(op, cells)]
        return cells[:1]

    def remote_store(self, op: Any, cells: list[Array]) -> Sequence[Array]:
        self.cells[self.slot(op, cells)] = self.cells[cells[0]]
        return []

    def rank(self, op: Any) -> int:
        """The place of this replica in its group."""
        return self.number // op.attributes["stride"] % op.attributes["group_size"]

    def of_group(self, op: Any, values: list[Array]) -> list[Array]:
        """Of values of all replicas, those of its group, in order."""
        stride, size = op.attributes["stride"], op.attributes["group_size"]
        first = self.number - self.rank(op) * stride
        return values[first : first + size * stride : stride]


CONTROL: dict[str, Callable[[Replica, Any, list[Array]], Work]] = {
    "Call": Replica.call,
    "Loop": Replica.loop,
    "If": Replica.conditional,
}
EXCHANGES: dict[str, Callable[[Replica, Any, list[Array]], Sequence[Array]]] = {
    "HostLoad": Replica.load,
    "HostStore": Replica.store,
    "RemoteLoad": Replica.remote_load,
    "RemoteLoadInplace": Replica.remote_load_inplace,
    "RemoteStore": Replica.remote_store,
}

COMBINED: dict[str, Callable[[Array], Array]] = {
    "add": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.max(0),
    "min": lambda values: values.min(0),
}


def _chunk(whole: Array, rank: int, size: int) -> Array:
    """A part of an array, of as many as there are members; what lacks at the end is 0."""
    length = -(-whole.size // size)
    return numpy.pad(whole.ravel(), (0, length * size - whole.size))[rank * length : (rank + 1) * length]


def _all_reduced(values: list[Array], rank: int, op: str, **group: Any) -> Array:
    return COMBINED[op](numpy.stack(values))


BETWEEN: dict[str, Callable[..., Array]] = {  # of the values of a group, and the rank of who asks
    "ReplicatedAllReduce": _all_reduced,
    "ReplicatedAllReduceInplace": _all_reduced,
    "ReplicatedAllGather": lambda values, rank, shape, **group: numpy.stack(values).reshape(shape),
    "ReplicatedShift": lambda values, rank, distance, **group: values[(rank - distance) % len(values)],
    "ReplicatedReduceScatter": lambda values, rank, op, sharded, **group: _chunk(
        _all_reduced(values, rank, op), rank, len(values)
    ),
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
