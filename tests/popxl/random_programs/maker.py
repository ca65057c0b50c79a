"""From a seed to a random program: ops of all sorts, on tensors that fit, written straight into graphs.

Programs never leave defined ground: what is written in place has one cell for each element, a tensor is passed by
reference once, though others may share its storage, replicas talk to each other where all of them come by, and whatever
decides about control flow is an integer or a bool, which is the same on every machine. Floats stay small, so that
rounding does too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import popxl
from popxl import TensorSpec, ops
from popxl.tensor import Constant, Variable
from tests.popxl.random_programs.meanings import BETWEEN

LARGEST = 24
"""Elements of a tensor."""

LONGEST = 400
"""Ops that one op may run, with all calls and turns."""

Test = Callable[[Any], bool]


class NothingFits(Exception):
    """There is no operand for an op here; another op is tried."""


@dataclass(frozen=True)
class Value:
    """A tensor that ops may take, and the tensors whose storage it shares. `None` if it may not be written."""

    t: popxl.Tensor
    storage: frozenset[popxl.Tensor] | None

    @property
    def is_float(self) -> bool:
        return self.t.dtype == popxl.float32

    @property
    def is_int(self) -> bool:
        return self.t.dtype == popxl.int32


def fresh(t: popxl.Tensor) -> Value:
    return Value(t, frozenset([t]))


def writable(v: Value) -> bool:
    return v.storage is not None


def is_view(v: Value) -> bool:
    return writable(v) and v.t not in v.storage


def is_constant(v: Value) -> bool:
    return isinstance(v.t, Constant)


def like(spec: TensorSpec) -> Test:
    return lambda v: v.t.spec == spec


def is_number(v: Value) -> bool:
    return v.is_float or v.is_int


class Maker:
    """Makes one program in the main graph of an Ir, or in a graph of its own.

    Args:
        seed: what all choices follow from.
        pure: no in-place ops, references and streams, so that the program has a gradient.
        smooth: no kinks either, so that it has a second one.
        streams: whether the program talks to the host on its way.
        buffers: whether it has remote buffers.
        replicas: how many run it.
        layers: whether graphs are called again and again, with other operands each time.

    Attributes:
        marks: op id and input position of each call that was marked as modifying an input.
    """

    def __init__(
        self,
        seed: int,
        pure: bool = False,
        smooth: bool = False,
        streams: bool = True,
        buffers: bool = False,
        replicas: int = 1,
        layers: bool = False,
    ) -> None:
        self.seed = seed
        self.replicas = replicas
        self.random = np.random.default_rng(seed)
        self.pure, self.smooth = pure, smooth
        self.graphs: list[popxl.Graph] = []
        self.marks: set[tuple[int, int]] = set()
        self.loads: list[popxl.HostToDeviceStream] = []
        self.stores: list[popxl.DeviceToHostStream] = []
        self.buffers: list[popxl.RemoteBuffer] = []
        self.has_buffers = buffers
        self.depth = 0
        self.is_in_branch = False
        self.has_layers = layers
        self.actions = [self.elementwise, self.pair, self.reduce, self.index, self.arrange, self.join, self.view] * 2
        self.actions += [self.run] * 12 + [self.constant] * 3
        if not pure:
            self.actions += [self.write] * 8 + [self.view] * 4
            self.actions += [self.load, self.store] * 2 * streams
            self.actions += [self.exchange] * 6 * buffers
            self.actions += [self.talk] * 4 * (replicas > 1)

    # Programs -------------------------------------------------------------------------------------------------------

    def main(self, most: int | None = None) -> None:
        """A program on variables in the current graph, which stores half of all other values at the end.

        Args:
            most: how often to add something to the main graph at most. A smaller number gives the beginning of the same
                program.
        """
        specs = [((2, 3), "f"), ((3,), "f"), ((), "f"), ((2, 3), "i"), ((2, 2, 3), "i"), ((4,), "i"), ((), "i")]
        values = [fresh(self.variable(shape, kind)) for shape, kind in specs]
        if self.has_buffers:
            self.make_buffers()
        values += self.load(values) if self.load in self.actions else []
        count = self.between(4, 14)
        self.fill(values, count if most is None else min(count, most), depth=2)
        if self.has_layers and most is None:
            self.fill_with_layers(values)
        shown = [v.t for v in values if not isinstance(v.t, Variable) and self.maybe()]
        for i, t in enumerate(shown):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype, f"program{self.seed}_value{i}"), t)

    def make_buffers(self) -> None:
        """Remote buffers, some of whose slots are variables. Some arrays of slots look like tensors."""
        shapes = [((2, 3), "f", 2), ((3,), "f", 2), ((3,), "f", 1), ((), "f", 3), ((2, 3), "i", 2), ((), "i", 4)]
        for _ in range(self.between(1, 3)):
            shape, kind, entries = self.choice(shapes)
            buffer = popxl.remote_buffer(shape, popxl.float32 if kind == "f" else popxl.int32, entries)
            self.buffers.append(buffer)
            for i in range(entries):
                if self.maybe(0.6):
                    popxl.remote_variable(remote_buffer=buffer, offset=i, **self.of_groups(shape, kind))

    def graph(self, inputs: Sequence[popxl.Tensor], most: int | None = None) -> popxl.Graph:
        """A program as a graph of some inputs, which returns three floats. `most` as for `main`."""

        def program(*inputs: Any) -> list[popxl.Tensor]:
            values = list(map(fresh, inputs))
            count = self.between(4, 14)
            self.fill(values, count if most is None else min(count, most), depth=2)
            floats = [v.t for v in values if v.is_float]
            return [floats[-1], self.choice(floats), self.choice(floats)]

        return popxl.gcg().ir.create_graph(program, *inputs)

    def fill(self, values: list[Value], count: int, depth: int) -> None:
        """Add about so many ops to the current graph, and their results to the values."""
        self.depth, outer = depth, self.depth
        for _ in range(count):
            try:
                values += self.choice(self.actions)(values)
            except NothingFits:
                pass
        self.depth = outer

    # Choices --------------------------------------------------------------------------------------------------------

    def maybe(self, probability: float = 0.5) -> bool:
        return bool(self.random.random() < probability)

    def between(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.random.integers(len(options))]

    def pick(self, values: Sequence[Value], *tests: Test) -> Value:
        """One of the values that pass all tests; rather a late one, so that programs become deep.

        Where gradients are to flow, rather a float.
        """
        fitting = [v for v in values if all(test(v) for test in tests)]
        if self.pure and self.maybe(0.75):
            fitting = [v for v in fitting if v.is_float] or fitting
        if not fitting:
            raise NothingFits
        return fitting[int(len(fitting) * self.random.random() ** 0.5)]

    def rather(self, probability: float, test: Test, values: Sequence[Value], *tests: Test) -> Value:
        """One of the values that pass all tests; with this probability one that passes the first, too, if any does."""
        if self.maybe(probability):
            try:
                return self.pick(values, test, *tests)
            except NothingFits:
                pass
        return self.pick(values, *tests)

    def array(self, shape: tuple[int, ...], kind: str) -> np.ndarray:
        if kind == "f":
            return self.random.uniform(-1, 1, shape).astype(np.float32)
        return self.random.integers(-9, 10, shape).astype(np.int32)

    def variable(self, shape: tuple[int, ...], kind: str) -> popxl.Tensor:
        return popxl.variable(name=kind, **self.of_groups(shape, kind))

    def grouping(self) -> Any:
        """Some, or all, or each of the replicas by itself."""
        size = self.choice([n for n in (1, 2, 4) if n <= self.replicas])
        stride = self.choice([n for n in (1, 2) if size * n <= self.replicas])
        return popxl.gcg().ir.replica_grouping(stride, size)

    def of_groups(self, shape: tuple[int, ...], kind: str) -> dict[str, Any]:
        """Data for a variable, which replicas share it, and which of them are asked for it."""
        if self.replicas == 1:
            return {"data": self.array(shape, kind)}
        grouping = self.grouping()
        several = (grouping.num_groups,) if grouping.num_groups > 1 else ()
        mode = self.choice(["one_per_group", "all_replicas"])
        return {"data": self.array((*several, *shape), kind), "replica_grouping": grouping, "retrieval_mode": mode}

    def axis(self, t: popxl.Tensor) -> int:
        if not t.rank:
            raise NothingFits
        return self.between(0, t.rank - 1)

    def position(self, values: Sequence[Value], size: int) -> popxl.Tensor:
        """A computed index below `size`."""
        number = ops.reshape(self.pick(values, lambda v: v.is_int and v.t.nelms == 1).t, (1,))
        return ops.cast(ops.abs(ops.fmod(number, popxl.constant(size, popxl.int32))), popxl.uint32)

    # Ops that make new tensors --------------------------------------------------------------------------------------

    def constant(self, values: list[Value]) -> list[Value]:
        v = self.pick(values, is_number)
        return [fresh(popxl.constant(self.array(v.t.shape, "f" if v.is_float else "i")))]

    def elementwise(self, values: list[Value]) -> list[Value]:
        t = self.pick(values, is_number).t
        functions = {
            popxl.float32: [ops.tanh, ops.sin, ops.cos, ops.negate, ops.swish, lambda t: t * 0.5 - 0.25],
            popxl.int32: [ops.negate, lambda t: t * 3 + 1, lambda t: ops.cast(t % 5, popxl.float32) * 0.2],
        }[t.dtype]
        if not self.smooth:  # not at 0, where the derivative would be a choice
            functions = functions + [lambda t: ops.relu(away_from_0(t)), lambda t: ops.abs(away_from_0(t))]
        functions = functions + [ops.identity, ops.detach]
        return [fresh(self.choice(functions)(t))]

    def pair(self, values: list[Value]) -> list[Value]:
        v = self.pick(values, is_number)
        a, b = v.t, self.pick(values, lambda u: u.t.dtype == v.t.dtype and fit(u.t, v.t)).t
        if self.maybe(0.2):
            flag = self.pick(values, lambda u: u.t.dtype == popxl.bool and fit(u.t, a, b)).t
            return [fresh(ops.where(flag, a, b))]
        matrices = a.rank == b.rank == 2 and a.shape[1] == b.shape[1]
        if v.is_int:
            functions = [ops.add, ops.sub, ops.mul, ops.maximum, ops.greater, ops.greater]
            functions += [lambda a, b: a @ b.T] * 3 * matrices
        else:
            functions = [
                lambda a, b: (a + b) * 0.5,
                lambda a, b: (a - b) * 0.5,
                lambda a, b: ops.tanh(a * b),
                lambda a, b: a / (b * b + 1),
            ]
            functions += [lambda a, b: ops.maximum(a, away_from_0(b))] * (not self.smooth)
            functions += [lambda a, b: ops.tanh(a @ b.T)] * 3 * matrices
        return [fresh(self.choice(functions)(a, b))]

    def reduce(self, values: list[Value]) -> list[Value]:
        v = self.pick(values, is_number)
        functions = [ops.sum] if v.is_int else [ops.mean, ops.logsumexp, lambda *how: ops.tanh(ops.sum(*how))]
        functions += [ops.max] * (not self.pure)  # among equals, the derivative is a choice
        if v.t.rank and self.maybe(0.2):
            function = ops.cumsum if v.is_int else ops.softmax
            return [fresh(function(v.t, self.axis(v.t)))]
        axes = tuple(d for d in range(v.t.rank) if self.maybe(0.6))
        return [fresh(self.choice(functions)(v.t, axes, self.maybe(0.3)))]

    def index(self, values: list[Value]) -> list[Value]:
        t = self.pick(values).t
        axis = self.axis(t)
        size = t.shape[axis]
        if self.maybe(0.3) and not self.pure:
            return [fresh(ops.dynamic_slice(t, self.position(values, size), [axis], [1], True))]
        if self.maybe(0.3):
            return [fresh(ops.gather(t, self.position(values, size), axis))]
        if t.nelms // size * 3 > LARGEST:
            raise NothingFits
        rows = self.random.integers(0, size, 3).astype(np.int32)
        return [fresh(ops.gather(t, popxl.constant(rows), axis))]

    def arrange(self, values: list[Value]) -> list[Value]:
        v = self.pick(values)
        if v.t.rank and self.maybe(0.2):
            axis = self.axis(v.t)
            cut = self.between(1, v.t.shape[axis])
            lengths = [n for n in (cut, v.t.shape[axis] - cut) if n]
            return list(map(fresh, ops.split(v.t, lengths, axis)))
        return [fresh(self.arranged(v.t, ""))]

    def join(self, values: list[Value]) -> list[Value]:
        parts, axis = self.joinable(values)
        return [fresh(ops.concat([v.t for v in parts], axis))]

    # Views, and writing in place ------------------------------------------------------------------------------------

    def view(self, values: list[Value]) -> list[Value]:
        if self.maybe(0.25):
            parts, axis = self.joinable(values)
            whole = all(map(writable, parts)) and parts[0].storage.isdisjoint(parts[1].storage)
            storage = frozenset().union(*(v.storage for v in parts)) if whole else None
            return [Value(ops.concat_([v.t for v in parts], axis), storage)]
        v = self.rather(0.4, is_view, values) if self.maybe() else self.rather(0.5, writable, values)
        return [Value(self.arranged(v.t, "_"), v.storage)]

    def arranged(self, t: popxl.Tensor, suffix: str) -> popxl.Tensor:
        """The elements of a tensor, or some of them, in another arrangement."""

        def op(name: str) -> Callable[..., popxl.Tensor]:
            return getattr(ops, name + suffix)

        name = self.choice(["reshape", "transpose", "transpose", "slice", "slice", "flatten", "detach"])
        if name == "reshape":
            first = self.choice([d for d in (1, 2, 3, 4) if t.nelms % d == 0])
            second = self.choice([d for d in (1, 2, 3) if t.nelms // first % d == 0])
            return op(name)(t, self.choice([(first, -1), (first, second, -1)]))
        if name == "transpose" and t.rank:
            return op(name)(t, self.random.permutation(t.rank).tolist())
        if name == "slice":
            axis = self.axis(t)
            start = self.between(0, t.shape[axis] - 1)
            stop = self.between(start + 1, t.shape[axis])
            if self.maybe(0.3):
                return op(name)(t, stop - 1, start - 1 if start else None, -1, axis)
            return op(name)(t, start, stop, axis=axis)
        return op("detach" if name == "detach" else "flatten")(t)

    def joinable(self, values: list[Value]) -> tuple[list[Value], int]:
        """Values that can be joined, and the axis."""
        first = self.pick(values)
        axis = self.axis(first.t)

        def rest(t: popxl.Tensor) -> tuple[Any, ...]:
            return (t.dtype, t.rank, t.shape[:axis], t.shape[axis + 1 :])

        def fits(v: Value) -> bool:
            return rest(v.t) == rest(first.t) and v.t.nelms + first.t.nelms <= LARGEST

        return [first, self.pick(values, fits)], axis

    def write(self, values: list[Value]) -> list[Value]:
        """Write a tensor in place. Everything that shares its storage changes with it."""
        v = self.rather(0.5, self.choice([is_view, is_constant]), values, writable, is_number)
        u = self.pick(values, like(v.t.spec)).t
        functions = [ops.relu_, lambda t: ops.var_updates.copy_var_update_(t, u)]
        if v.is_int:
            small = self.pick(values, lambda u: u.is_int and broadcast(u.t, v.t) == v.t.shape).t
            functions += [
                lambda t: ops.var_updates.accumulate_(t, u),
                lambda t: ops.scaled_add_(t, u, 3.0, -2.0),
                lambda t: ops.add_(t, small),
            ]
            functions += [lambda t: self.row_written(values, t)] * bool(v.t.rank)
        else:
            functions += [
                ops.swish_,
                lambda t: ops.var_updates.accumulator_scale_(ops.add_(t, u), 0.5),
                lambda t: ops.scaled_add_(t, u, 0.5, -0.5),
                lambda t: ops.var_updates.accumulator_scale_(ops.var_updates.accumulate_(t, u, 0.25), 0.8),
            ]
        return [Value(self.choice(functions)(v.t), v.storage)]

    def row_written(self, values: list[Value], t: popxl.Tensor) -> popxl.Tensor:
        """One row, at a computed index."""
        axis = self.axis(t)
        row = TensorSpec((*t.shape[:axis], 1, *t.shape[axis + 1 :]), t.dtype)
        update = self.one_like(values, row)
        return ops.dynamic_update_(t, self.position(values, t.shape[axis]), update, [axis], [1], True)

    # Streams --------------------------------------------------------------------------------------------------------

    def load(self, values: list[Value]) -> list[Value]:
        if not self.loads or self.maybe():
            bools, numbers = [((), popxl.bool), ((1,), popxl.bool)], [((2, 3), popxl.float32), ((), popxl.int32)]
            shape, dtype = self.choice(bools + numbers)
            self.loads.append(popxl.h2d_stream(shape, dtype, f"program{self.seed}_load{len(self.loads)}"))
        return [fresh(ops.host_load(self.choice(self.loads)))]

    def store(self, values: list[Value]) -> list[Value]:
        t = self.pick(values).t
        fitting = [stream for stream in self.stores if stream.spec == t.spec]
        if not fitting or self.maybe(0.2):
            fitting = [popxl.d2h_stream(t.shape, t.dtype, f"program{self.seed}_store{len(self.stores)}")]
            self.stores += fitting
        ops.host_store(self.choice(fitting), t)
        return []

    # Remote buffers, and other replicas -----------------------------------------------------------------------------

    def exchange(self, values: list[Value]) -> list[Value]:
        """Load a slot, over something that is there or as a new tensor, or store to one."""
        buffer = self.choice(self.buffers)
        slot: Any = self.between(0, buffer.entries - 1)
        if self.maybe(0.3):
            slot = self.position(values, buffer.entries)
        if self.maybe(0.3):
            return [fresh(ops.remote_load(buffer, slot))]
        if self.maybe(0.3):
            v = self.pick(values, writable, like(buffer.spec))
            return [Value(ops.remote_load_(buffer, slot, v.t), v.storage)]
        ops.remote_store(buffer, slot, self.pick(values, like(buffer.spec)).t)
        return []

    def talk(self, values: list[Value]) -> list[Value]:
        """Combine, gather or pass on what the replicas of a group have."""
        if self.is_in_branch:
            raise NothingFits
        group, collectives = self.grouping(), ops.collectives
        if self.maybe(0.2):
            t = self.pick(values, lambda v: v.t.nelms * self.replicas <= LARGEST).t
            axis = self.axis(t) if t.rank else 0
            return [fresh(collectives.replicated_all_gather(t, axis, group, self.choice(["concat", "new_axis"])))]
        if self.maybe(0.2):
            t = self.choice(values).t
            return [fresh(collectives.replicated_shift(t, self.between(-3, 3), group))]
        v = self.pick(values, is_number)
        how = self.choice(["mean" if v.is_float else "add", "max", "min"])
        if self.maybe(0.2):
            return [fresh(collectives.replicated_reduce_scatter(v.t, how, group))]
        if writable(v) and self.maybe(0.3):
            return [Value(collectives.replicated_all_reduce_(v.t, how, group), v.storage)]
        return [fresh(collectives.replicated_all_reduce(v.t, how, group))]

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def run(self, values: list[Value]) -> list[Value]:
        return self.choice([self.call, self.call, self.repeat, self.conditional])(values)

    def call(self, values: list[Value]) -> list[Value]:
        graph = self.known_or_made(values)
        bound = self.bind(graph, values)
        ts = [v.t for v in bound]
        k = self.between(0, len(ts))
        site = ops.call_with_info(graph, *ts[:k], inputs_dict=dict(zip(graph.inputs[k:], ts[k:], strict=True)))
        taken = [v.storage for v, t in zip(bound, graph.inputs, strict=True) if t.by_ref]
        for i, v in enumerate(bound):
            free = not graph.inputs[i].by_ref and writable(v)
            free = free and (all(v.storage.isdisjoint(each) for each in taken) or self.maybe(0.3))
            if free and ts.count(v.t) == 1 and not self.pure and self.maybe(0.2):
                site.set_parent_input_modified(v.t, self.maybe())
                self.marks.add((site.op.id, i))
                taken.append(v.storage)
        return list(map(fresh, site.outputs))

    def fill_with_layers(self, values: list[Value]) -> None:
        """Add a pass through layers to the main graph, more ops, and other passes, some of them backwards."""
        passes: list[list[list[Value]]] = []
        for _ in range(self.between(1, 3)):
            try:
                of_turns = passes[-1] if passes and self.maybe(0.7) else [[] for _ in range(self.between(3, 5))]
                passes.append(self.layers(values, of_turns[:: self.choice([1, -1])]))
                values += self.choice(passes[-1])[:1]
            except NothingFits:
                pass
            self.fill(values, self.between(0, 3), depth=1)

    def layers(self, values: list[Value], of_turns: Sequence[list[Value]]) -> list[list[Value]]:
        """Turn by turn calls of one graph or two, and maybe an op after each.

        Args:
            values: what there is.
            of_turns: what there is for each turn besides.

        Returns:
            What there is for each turn then: what was made in it, and the variables that it used.
        """
        graphs = [self.known_or_made([*values, *of_turns[0]]) for _ in range(self.between(1, 2))]
        if sum(len(of_turns) * length(graph) for graph in graphs) > LONGEST:
            raise NothingFits
        sites = [(graph, [self.role(t, values, len(of_turns)) for t in graph.inputs]) for graph in graphs]
        after = self.maybe(0.3)
        made: list[list[Value]] = []
        for turn, there in enumerate(of_turns):
            now: list[Value] = []
            for graph, roles in sites:
                bound = [role(turn, [*values, *(made[-1] if made else []), *there, *now]) for role in roles]
                if is_refused(graph, bound):
                    raise NothingFits
                now += list(map(fresh, ops.call(graph, *(v.t for v in bound))))
                now += [v for v in bound if isinstance(v.t, Variable)]
                now += [fresh(ops.tanh(now[0].t))] if after and now and now[0].is_float else []
            made.append(now)
        return made

    def role(self, t: popxl.Tensor, values: list[Value], turns: int) -> Callable[[int, list[Value]], Value]:
        """What an input of a layer gets in each turn, given the number of the turn and what there is: the same always;
        what was made last; or what is made for it here, variables or constants, which some turns may share."""
        kind = {popxl.float32: "f", popxl.int32: "i"}.get(t.dtype)
        if self.maybe(0.3) or kind is None:
            same = self.pick(values, like(t.spec))
            return lambda turn, there: same
        if self.maybe(0.4):
            return lambda turn, there: [v for v in there if like(t.spec)(v)][-1]
        make = popxl.constant if self.maybe(0.2) else None
        own = [fresh(make(self.array(t.shape, kind)) if make else self.variable(t.shape, kind)) for _ in range(turns)]
        which = [self.between(0, turns - 1) for _ in own] if self.maybe(0.2) else [*range(turns)]
        values += own if self.maybe(0.3) else []
        return lambda turn, there: own[which[turn]]

    def repeat(self, values: list[Value]) -> list[Value]:
        graph = self.known_or_made(values, is_loop, loop=True)
        turns = self.choice([0, 1, 2, 3])
        if turns * length(graph) > LONGEST:
            raise NothingFits
        return list(map(fresh, ops.repeat(graph, turns, *(v.t for v in self.bind(graph, values)))))

    def conditional(self, values: list[Value]) -> list[Value]:
        flags = [v.t for v in values if v.t.dtype == popxl.bool and v.t.shape in ((), (1,))]
        if not flags or self.maybe(0.3):
            number = ops.sum(self.pick(values, lambda v: v.is_int).t)
            flags = [ops.greater(number, popxl.constant(self.between(-5, 5), popxl.int32))]

        def fits(graph: popxl.Graph) -> bool:
            return not any(t.by_ref for t in graph.inputs)

        def returns(graph: popxl.Graph) -> list[TensorSpec]:
            return [t.spec for t in graph.outputs]

        outside, self.is_in_branch = self.is_in_branch, True
        try:
            one = self.known_or_made(values, fits, references=False)
            results = returns(one)
            other = self.known_or_made(values, lambda g: fits(g) and returns(g) == results, False, returns=results)
        finally:
            self.is_in_branch = outside
        branches = [one, other] if self.maybe() else [other, one]
        inputs = [[v.t for v in self.bind(graph, values)] for graph in branches]
        return list(map(fresh, ops.conditional(self.choice(flags), *branches, *inputs)))

    def known_or_made(self, values: list[Value], fits: Test = lambda g: True, *how: Any, **more: Any) -> popxl.Graph:
        """A graph that is there already and fits, if the values can be bound to it; or else a new one."""
        there = {v.t.spec for v in values}
        known = [g for g in self.graphs if {t.spec for t in g.inputs} <= there and length(g) < LONGEST and fits(g)]
        known = [g for g in known if not (self.is_in_branch and talks(g))]
        return self.choice(known) if known and self.maybe() else self.made(values, *how, **more)

    def made(
        self,
        values: list[Value],
        references: bool = True,
        loop: bool = False,
        returns: Sequence[TensorSpec] | None = None,
    ) -> popxl.Graph:
        """A new graph, for inputs like some of the values."""
        if not self.depth:
            raise NothingFits
        templates = [self.pick(values) for _ in range(self.between(1, 4))]
        by_ref = [references and not self.pure and writable(v) and self.maybe(0.4) for v in templates]
        loop = loop or self.maybe()

        def body(first: Any) -> list[popxl.Tensor]:
            more = zip(templates[1:], by_ref[1:], strict=True)
            inputs = [first, *(popxl.graph_input(v.t.shape, v.t.dtype, "more", ref) for v, ref in more)]
            inside = list(map(fresh, inputs))
            self.fill(inside, self.between(1, 4), self.depth - 1)
            if returns is not None:
                return [self.one_like(inside, spec) for spec in returns]
            if loop:
                wanted = [t.spec for t in inputs[: self.between(not self.maybe(0.2), len(inputs))]]
                made = inside[len(inputs) :] if self.maybe(0.8) else []
                return [self.one_like([v for v in made if like(spec)(v)] or inside, spec) for spec in wanted]
            return [self.pick(inside).t for _ in range(self.between(0, 3))]

        body.__annotations__["first"] = popxl.TensorByRef if by_ref[0] else popxl.Tensor
        graph = popxl.gcg().ir.create_graph(body, templates[0].t)
        self.graphs.append(graph)
        return graph

    def one_like(self, values: list[Value], spec: TensorSpec) -> popxl.Tensor:
        try:
            return self.pick(values, like(spec)).t
        except NothingFits:
            return ops.init(spec.shape, spec.dtype)

    def bind(self, graph: popxl.Graph, values: list[Value]) -> list[Value]:
        """A value for each input of a graph. Those by reference are bound once, and rarely overlap."""
        bound: list[Value] = []
        shared: list[Value] = []
        overlapping = self.maybe(0.3)

        def fits(v: Value) -> bool:
            return v not in shared

        def overlaps(v: Value) -> bool:
            return writable(v) and any(not v.storage.isdisjoint(u.storage) for u in shared)

        def free(v: Value) -> bool:
            return writable(v) and v not in bound and (overlapping or not overlaps(v))

        for t in graph.inputs:
            tests = (like(t.spec), free) if t.by_ref else (like(t.spec), fits)
            by_ref = overlapping and t.by_ref
            bound.append(self.rather(0.7, overlaps, values, *tests) if by_ref else self.pick(values, *tests))
            shared.extend(bound[-1:] * t.by_ref)
        return bound


def is_refused(graph: popxl.Graph, bound: Sequence[Value]) -> bool:
    """Whether a call would be refused: what it changes is passed twice, or has no cells of its own."""
    by_ref = [v for v, t in zip(bound, graph.inputs, strict=True) if t.by_ref]
    return any(not writable(v) or bound.count(v) > 1 for v in by_ref)


def away_from_0(t: popxl.Tensor) -> popxl.Tensor:
    return t + 0.0731 if t.dtype == popxl.float32 else t


def broadcast(*ts: popxl.Tensor) -> tuple[int, ...] | None:
    """The shape that tensors have together."""
    try:
        return np.broadcast_shapes(*(t.shape for t in ts))
    except ValueError:
        return None


def fit(*ts: popxl.Tensor) -> bool:
    """Whether tensors can be broadcast, to one that is small."""
    shape = broadcast(*ts)
    return shape is not None and np.prod(shape) <= LARGEST


def is_loop(graph: popxl.Graph) -> bool:
    """Whether a graph can be repeated: its outputs look like its first inputs."""
    outputs, inputs = ([t.spec for t in tensors] for tensors in (graph.outputs, graph.inputs))
    return inputs[: len(outputs)] == outputs


def talks(graph: popxl.Graph) -> bool:
    """Whether replicas talk to each other in a graph."""
    return any(op.op_type in BETWEEN or any(map(talks, op.called_graphs)) for op in graph.ops)


def length(graph: popxl.Graph) -> int:
    """How many ops running a graph runs at most."""
    turns = (op.attributes.get("repeat_count", 1) * sum(map(length, op.called_graphs)) for op in graph.ops)
    return len(graph.ops) + sum(turns)
