"""From a graph to a function of arrays: one loop, one environment.

Ops run in the order they were created. Each reads its operands from the environment, applies its lowering, and writes
its results back. The environment keeps one value for each *storage*: a view is read from its base and written through
to it, so in-place ops and views need nothing else. Nobody outside of this file knows that arrays are immutable.

A graph that is called from several places becomes one function that is compiled once: XLA is told to keep its calls.
What a graph touches besides its inputs (the streams, and which check failed) goes in and comes out as values; see
`runtime.lowering.effects`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax import lax

from popxl.base.names import identifier
from popxl.base.nesting import Nested, done
from popxl.core.aliasing import by_reference, callees_first, changed_inputs, reachable, written_inputs
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import chooses
from popxl.errors import PopxlError, PopxlInternalError
from popxl.fp8_utils import to_device
from popxl.graph import Graph
from popxl.ops.call import call_kind
from popxl.ops.conditional import conditional_kind
from popxl.ops.host import host_call_kind, host_load_kind, host_store_kind, print_tensor_kind
from popxl.ops.kernels.kernel import in_forms
from popxl.ops.repeat import EXTRA_INPUTS, EXTRA_OUTPUTS, loop_kind, returned_by_ref
from popxl.options import SessionOptions
from runtime.calls import kept
from runtime.interrupts import handle_waiting
from runtime.lowering import effects
from runtime.lowering.collectives import devices_meet, group_of
from runtime.lowering.effects import Channels, channels_of
from runtime.lowering.machine_parts import AnyOrder, MachineParts, Order, parts_for
from runtime.lowering.meetings import Meetings
from runtime.lowering.rolled import AsWritten, Rolled, bring_together, roll
from runtime.lowering.scopes import Scopes, of_op
from runtime.lowering.sharing import Sharing
from runtime.lowering.stacks import Row, put_back, read
from runtime.targets.replicas import Replicas, is_on_host

Array = Any
Meaning = Callable[["Lowering", Op, "Environment", Channels], "Nested[None] | None"]

meanings: dict[OpKind, Meaning] = {}
"""What ops do whose meaning needs the machine: at once, or as nested work. Others say it: `op.kind.lowering`."""


def meaning(kind: OpKind) -> Callable[[Meaning], Meaning]:
    """Register what an op of this kind does."""

    def register(function: Meaning) -> Meaning:
        meanings[kind] = function
        return function

    return register


class Environment:
    """The current value of every storage of one graph, while it runs; or the row of a stack that has it.

    Args:
        values: those of storages that have one before.
        order: keeps the order of updates.
        same: tensors that stand for others.
        turns: how many turns the loop has that the graph runs in: values may be cut out of as many rows.
    """

    def __init__(
        self, values: Mapping[Tensor, Array | Row], order: Order, same: Mapping[Tensor, Tensor], turns: int
    ) -> None:
        self.values = dict(values)
        self._order = order
        self._same = same
        self._turns = turns

    def note(self, op: Op) -> None:
        """Note that an op has read its operands: what overwrites them comes after its result."""
        result = next((t for t in op.outputs if t in self.values), None)
        if result is not None:  # it is no view, say
            for t in op.inputs:
                self._order.note(self._seen_through(t)[0], result, self.read(result))

    def note_call(self, op: Op, results: Results) -> None:
        """The same of the ops of a graph that an op has called."""
        for i, computed in results.computed.items():
            self._order.note_within(self._seen_through(op.inputs[i])[0], computed)

    def computed_from(self, inputs: Sequence[Tensor]) -> dict[int, Array]:
        """What was computed last from inputs of the graph, by position."""
        return self._order.computed_from(inputs)

    def place(self, t: Tensor) -> Array | Row:
        """Where a tensor is: in a row, if that is all of it. Otherwise its current value."""
        storage, views = self._seen_through(t)
        place = None if views else self.values.get(storage)
        return place if isinstance(place, Row) else self.read(t)

    def sharing(self, op: Op) -> Sharing:
        """Which inputs of the graph that an op runs share storage, of those that are by reference."""
        (run,) = op.runs
        by_ref = by_reference(op)
        storages = {i: self._storages(op.inputs[i]) for i in by_ref} if len(by_ref) > 1 else {}
        users: dict[Tensor, set[int]] = {}
        for i, of_input in storages.items():
            for storage in of_input:
                users.setdefault(storage, set()).add(i)
        groups = [found for found in users.values() if len(found) > 1 and not found.isdisjoint(op.modified)]
        positions = frozenset[int]().union(*groups)
        if not positions:
            return Sharing()
        same = {run.inputs[i]: op.inputs[i] for i in sorted(positions)}
        inside = dict.fromkeys(storage for i in sorted(positions) for storage in storages[i])
        written = dict.fromkeys(storage for i in sorted(positions & op.modified) for storage in storages[i])
        values = {storage: self.read(storage) for storage in inside}
        return Sharing(positions, {**self._same, **same}, values, tuple(written))

    def _storages(self, t: Tensor) -> tuple[Tensor, ...]:
        """The storages that a tensor is made of."""
        found: dict[Tensor, None] = {}
        waiting = [t]
        while waiting:
            storage, _ = self._seen_through(waiting.pop())
            joined = view_of(storage)
            if joined is None:
                found[storage] = None
            else:
                waiting += reversed(joined.inputs)
        return tuple(found)

    def read(self, t: Tensor) -> Array:
        """The current value of a tensor: of its storage, or seen through the views that lie between."""
        storage, views = self._seen_through(t)
        value = self._storage(storage)
        for view in views:
            value = view.apply([value])
        return value

    def put(self, t: Tensor, place: Array | Row) -> None:
        """Give a tensor that an op makes its first value; or a row that nobody else has."""
        if isinstance(place, Row):
            self.values[t] = place
        else:
            self.write(t, place)

    def write(self, t: Tensor, value: Array) -> None:
        """Change a tensor: its storage, or the part of it that the views between show."""
        changes = [(t, value)]
        while changes:
            t, value = changes.pop()
            storage, views = self._seen_through(t)
            bases = [self._storage(storage)] if views else []
            for view in views[:-1]:
                bases.append(view.apply([bases[-1]]))
            for view, base in zip(reversed(views), reversed(bases), strict=True):
                (value,) = view.put([base], value)
            joined = view_of(storage)
            if joined is None:
                place = self.values.get(storage)
                rows = len(place.stack.array) if isinstance(place, Row) else self._turns
                value = self._order.overwriting(storage, value, rows)
                if isinstance(place, Row):
                    place.write(value)
                else:
                    self.values[storage] = value
            else:
                parts = joined.put([self.read(base) for base in joined.inputs], value)
                changes += reversed(list(zip(joined.inputs, parts, strict=True)))

    def _storage(self, t: Tensor) -> Array:
        """The value of a tensor that is no view of a single other."""
        joined = view_of(t)
        if joined is not None:
            return done(self._joined(joined))
        if t not in self.values:
            if not isinstance(t, Constant):
                raise no_value(t)
            self.values[t] = jnp.asarray(to_device(t.data, t.dtype))
        return read(self.values[t])

    def _seen_through(self, t: Tensor) -> tuple[Tensor, list[Op]]:
        """The tensor that `t` is a view of, in the end, and the views from there to `t`; views of several end it."""
        views = []
        t = t.origin
        while True:
            view = view_of(t)
            if t in self._same:
                t = self._same[t].origin
            elif view is not None and len(view.inputs) == 1:
                views.append(view)
                t = view.inputs[0].origin
            else:
                return t, views[::-1]

    def _joined(self, op: Op) -> Nested[Array]:
        """What a view of several tensors shows; they may be such views themselves."""
        parts = []
        for base in op.inputs:
            storage, views = self._seen_through(base)
            joined = view_of(storage)
            part = self._storage(storage) if joined is None else (yield self._joined(joined))
            for view in views:
                part = view.apply([part])
            parts.append(part)
        return op.apply(parts)


def no_value(t: Tensor) -> PopxlError:
    """The error for a storage that nothing gives a value."""
    return PopxlError(f"Session: {t!r} has no value. It is an input of {t.graph.title}, which nothing is bound to.")


def view_of(t: Tensor) -> Op | None:
    """The op that makes `t` a view of others, if it is one."""
    op = t.producer
    return op if op is not None and op.kind.view is not None else None


@dataclass(frozen=True)
class Results:
    """What running a graph gives.

    Attributes:
        outputs: those of the graph.
        written: the final values of the inputs that it overwrote, by position.
        shared: those of the storages that inputs share, and that it may have changed.
        computed: what was computed last from inputs, by position; of a graph whose call is not kept.
    """

    outputs: tuple[Any, ...]
    written: dict[int, Any]
    shared: dict[Tensor, Array] = field(default_factory=dict)
    computed: dict[int, Array] = field(default_factory=dict)

    def read(self) -> Results:
        """The same, with nothing in rows."""
        written = {i: read(place) for i, place in self.written.items()}
        return Results(tuple(map(read, self.outputs)), written, self.shared, self.computed)


class Lowering:
    """The graphs of one program, as functions of arrays.

    Args:
        ops: what the program runs.
        options: those of the Ir; they say how exactly ops multiply, and switch some of the checks of their operands.
        keep_calls: keep the calls of graphs that are called from several places. Otherwise everything is inlined.
        replicas: those that run the program; what is lowered is the program of one of them.
        scheduling: says what is carried out of a graph, in order: its ops, or loops of them.
        in_order: whether a single replica prints in the order of the ops. JAX (0.10.2) cannot lower an order of effects
            along with results in the host's memory.
    """

    def __init__(
        self,
        ops: Iterable[Op],
        options: SessionOptions,
        keep_calls: bool = True,
        replicas: Replicas = Replicas(),  # noqa: B008  # one replica, which nothing changes
        scheduling: AsWritten = AsWritten(),  # noqa: B008  # it has no state
        in_order: bool = True,
    ) -> None:
        self.replicas = replicas
        self.scheduling = scheduling
        self.prints_in_order = in_order and replicas.count == 1  # JAX: of one device
        self._options = options
        self._kept = {graph for graph, sites in _call_sites(ops).items() if keep_calls and sites > 1}
        self._function = cache(self._function_of)
        self._ran_on: WeakValueDictionary[tuple[Graph, tuple[int, ...]], Array] = WeakValueDictionary()  # the first
        self._around: list[Sequence[Array | Row]] = [()]  # the inputs of the graphs that are being run
        self._turns = 1
        self._in_loop = False
        self._scopes = Scopes()
        self._meetings = Meetings()

    @cached_property
    def machine(self) -> MachineParts:
        """What the machine adds to the program."""
        return parts_for(self.replicas.platform)

    @property
    def is_shared(self) -> bool:
        """Whether it is traced once for several replicas, which one device runs."""
        return self.replicas.count > 1 and self.replicas.mesh is None

    def run(self, ops: Iterable[Op | Rolled], values: Mapping[Tensor, Array | Row], channels: Channels) -> Environment:
        """Run ops of one graph, in order. Returns what is in its storages afterwards."""
        self._meetings = Meetings()
        return done(self.running(ops, values, channels))

    def running(
        self,
        ops: Iterable[Op | Rolled],
        values: Mapping[Tensor, Array | Row],
        channels: Channels,
        same: Mapping[Tensor, Tensor] | None = None,
    ) -> Nested[Environment]:
        """The same, as work that is nested. The scheduling says what stands for others, unless that is given."""
        same = self.scheduling.same if same is None else same
        environment = Environment(values, self.machine.order(self._in_loop), same, self._turns)
        for op in (part for each in ops for part in ((each,) if isinstance(each, Rolled) else each.parts)):
            handle_waiting()
            if isinstance(op, Rolled):
                roll(self, op, environment, channels)
                continue
            inside = self.carry_out(op, environment, channels)
            if inside is not None:
                yield inside
            if not op.called_graphs:
                environment.note(op)
            for storages in self.scheduling.gathered.get(op, ()):
                bring_together(environment, storages)
        return environment

    def carry_out(self, op: Op, environment: Environment, channels: Channels) -> Nested[None] | None:
        """Do what an op does: at once, or as nested work."""
        if op.kind in meanings:
            return meanings[op.kind](self, op, environment, channels)
        if op.kind.view is not None:  # a view is made when somebody looks through it
            return None
        operands = [environment.read(t) for t in op.inputs]
        try:
            self._check(op, operands, channels)
            with of_op(op), in_forms(self.machine.forms), jax.default_matmul_precision(self._options.precision):
                results = self.apply(op, operands)
        except PopxlError:  # says what it has to say
            raise
        except Exception as problem:
            text = f"`{op.source.text}` " if op.source.text else ""
            raise PopxlError(
                f"Session: {op!r} in {op.graph.title}, at {text}({op.source}), cannot be run: {problem}"
            ) from problem
        store_results(op, results, environment)
        if op.inputs:  # else it waits for nothing
            channels.note(results)
        return None

    def apply(self, op: Op, operands: Sequence[Array]) -> Any:
        """The results of an op."""
        return self._between_replicas(op, operands) if op.kind.between_replicas else op.apply(operands)

    def _between_replicas(self, op: Op, operands: Sequence[Array]) -> Any:
        """The results of an op that talks to other replicas."""
        attributes = dict(op.attributes)
        try:
            group = group_of(self.replicas, attributes.pop("stride"), attributes.pop("group_size"))
            if self.met((op,)) is None:
                return op.apply(operands, attributes | {"group": group})
            results = op.apply([*map(self._meetings.said, operands)], attributes | {"group": group})
            jax.tree.map(self._meetings.note, results)
            return results
        except PopxlError as problem:
            raise PopxlError(f"Session: {op!r} ({op.source}) cannot be run: {problem}") from None

    def met(self, ops: Iterable[Op]) -> Array | None:
        """What depends on all meetings of devices so far, if devices meet in these ops and XLA does not order that."""
        is_asked = self.machine.turns is not None and devices_meet(ops, self.replicas)
        return self._meetings.met() if is_asked else None

    @contextmanager
    def meeting_after(self, met: Array | None) -> Iterator[Callable[[], Array | None]]:
        """While a computation is traced that is carried out as a whole. Gives what depends on its meetings so far."""
        around, self._meetings = self._meetings, Meetings(met)
        try:
            yield lambda: None if met is None else self._meetings.met()
        finally:
            self._meetings = around

    def meet_after(self, met: Array | None) -> None:
        """Have what follows come after the meetings of a computation."""
        if met is not None:
            self._meetings = Meetings(met)

    def _check(self, op: Op, operands: Sequence[Array], channels: Channels) -> None:
        """Check what the op requires of its operands, as far as the options ask for it."""
        for number, required in enumerate(op.kind.requirements):
            if required.operand in op.operand_names() and (
                not required.option or getattr(self._options, required.option)
            ):
                channels.check(op, number, required.holds(operands[op.operand_names().index(required.operand)]))

    def call(self, graph: Graph, inputs: Sequence[Array], channels: Channels) -> Results:
        """Run a graph on the values of its inputs: in place, or as a call that XLA keeps."""
        return done(self.calling(graph, inputs, channels))

    def calling(
        self,
        graph: Graph,
        inputs: Sequence[Array | Row],
        channels: Channels,
        in_rows: bool = False,
        sharing: Sharing = Sharing(),  # noqa: B008  # it has no state
    ) -> Nested[Results]:
        """The same, as work that is nested.

        Args:
            graph: the graph.
            inputs: for its inputs, values; or rows, which are overwritten where it overwrites these.
            channels: what it uses besides.
            in_rows: what it gives may be in rows, too.
            sharing: inputs that share storage. A call in which there are some is not kept.
        """
        acts_at_once = channels.running is not None and effects.acts_at_once(graph)
        if graph not in self._kept or sharing or acts_at_once:
            results = yield self._inline(graph, inputs, channels, sharing)
            return results if in_rows else results.read()
        streams = channels_of(graph)
        given = tuple(map(read, inputs)), channels.take(streams), self.met(graph.ops)
        outputs, written, used, met = self._function(graph)(*given)
        self.meet_after(met)
        channels.put_back(streams, used)
        channels.note((outputs, written))
        return Results(outputs, written)

    def _inline(
        self, graph: Graph, inputs: Sequence[Array | Row], channels: Channels, sharing: Sharing
    ) -> Nested[Results]:
        given = dict(zip(graph.inputs, self._apart(graph, inputs), strict=True))
        if sharing:
            given = {t: value for t, value in given.items() if t not in sharing.same} | dict(sharing.values)
        same = sharing.same if sharing else None
        with self._scopes.of_graph(graph), self.within(inputs):
            environment = yield self.running(self.scheduling.schedule(graph), given, channels, same)
        count = Counter(t.origin for t in graph.outputs)
        own = [t.origin not in given and count[t.origin] == 1 for t in graph.outputs]
        return Results(
            tuple((environment.place if o else environment.read)(t) for t, o in zip(graph.outputs, own, strict=True)),
            {i: environment.place(t) for i in written_inputs(graph) if (t := graph.inputs[i]) in given},
            {storage: environment.read(storage) for storage in sharing.written},
            environment.computed_from(graph.inputs),
        )

    @contextmanager
    def within(self, inputs: Sequence[Array | Row]) -> Iterator[None]:
        """While a graph with these inputs is run."""
        self._around.append(inputs)
        try:
            yield
        finally:
            self._around.pop()

    @contextmanager
    def within_turn(self, rows: int = 1) -> Iterator[None]:
        """While a turn of a loop is run, which sees nothing around it; arrays may have so many rows like its values."""
        around = self._turns, self._in_loop
        self._turns, self._in_loop = self._turns * rows, True
        try:
            with self.within(()):
                yield
        finally:
            self._turns, self._in_loop = around

    def _apart(self, graph: Graph, inputs: Sequence[Array | Row]) -> Sequence[Array | Row]:
        """Inputs of a graph; where it has run on the same, XLA takes them for others.

        What a program computes twice is computed twice, and not before what it is computed for is there: all inputs of
        the graph around it, such as gradients. XLA would find that it is the same, do it once and keep the result,
        which is what a program avoids that recomputes.
        """
        if not inputs or not all(isinstance(value, jax.core.Tracer) for value in inputs):  # rows, or no compiler
            return inputs
        key = graph, tuple(map(id, inputs))
        if self._ran_on.get(key) is not inputs[0]:
            self._ran_on[key] = inputs[0]
            return inputs
        around = [value for value in self._around[-1] if not isinstance(value, Row)]
        return lax.optimization_barrier((*inputs, *around))[: len(inputs)]

    def _function_of(self, graph: Graph) -> Callable[..., Any]:
        """The one function of a graph whose calls are kept."""
        streams = channels_of(graph)

        def function(inputs: tuple[Array, ...], taken: Any, met: Array | None) -> Any:
            channels = Channels(dict(zip(streams, taken, strict=True)))
            with self.within_turn(), self.meeting_after(met) as now:  # as a loop: it is called several times
                results = done(self._inline(graph, inputs, channels, Sharing())).read()
                return results.outputs, results.written, channels.take(streams), now()

        function.__name__ = function.__qualname__ = identifier(graph.id) or "graph"
        return kept(function, in_order=1)


@contextmanager
def room_to_recurse(main: Graph) -> Iterator[None]:
    """Let JAX recurse as deep as a program has branches in branches, but no deeper than XLA can follow.

    Calls need no recursion. Loops in loops get no more of it than there is, enough for some forty, because XLA does not
    survive a hundred; branches may be a hundred and fifty deep.
    """
    depth: dict[Graph, int] = {}
    for graph in callees_first(main):
        inside = [depth[callee] + chooses(op) for op in graph.ops for callee in op.called_graphs]
        depth[graph] = max(inside, default=0)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 1000 + 10 * min(depth[main], 150)))  # JAX takes some 12 frames a level
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _call_sites(ops: Iterable[Op]) -> Counter[Graph]:
    """How many ops of a program run each graph."""
    sites = Counter(callee for op in ops for callee in op.called_graphs)
    for graph in dict.fromkeys(graph for callee in sites for graph in reachable(callee)):
        sites.update(callee for op in graph.ops for callee in op.called_graphs)
    return sites


def targets_of(op: Op) -> list[Tensor]:
    """Where what an op's lowering returns belongs: its outputs, unless they alias what it overwrites, and that."""
    overwritten = [op.inputs[i] for i in sorted(op.modified)]
    return overwritten if op.kind.aliased else [*op.outputs, *overwritten]


def store_results(op: Op, results: Array | Sequence[Array], environment: Environment) -> None:
    """Put what an op's lowering returned where it belongs."""
    values = list(results) if isinstance(results, tuple | list) else [results]
    targets = targets_of(op)
    if len(values) != len(targets):
        raise PopxlInternalError(
            f"{op!r} ({op.source}): the lowering returned {len(values)} results for {len(targets)}."
        )
    for t, value in zip(targets, values, strict=True):
        environment.write(t, as_declared(t, value, op))


def as_declared(t: Tensor, value: Array, op: Op) -> Array:
    """A value in the dtype that its tensor declares: ops may compute in a wider one, and round once, here."""
    value = jnp.asarray(value)
    if value.shape != t.shape and op.modified:
        raise PopxlError(
            f"{op!r} ({op.source}) would overwrite {t!r} with a result of shape {value.shape}; what is written in "
            "place has to broadcast to the shape of the first operand."
        )
    if value.shape != t.shape:
        raise PopxlInternalError(
            f"{op!r} ({op.source}) declares {t!r}, and its lowering made an array of shape {value.shape}. If the op is "
            "yours, its `shape` rule and its `lowering` disagree; otherwise this is a bug in popxl."
        )
    wanted = t.dtype.as_jax()
    return value if value.dtype == wanted else value.astype(wanted)


meaning(host_load_kind)(effects.host_load)
meaning(host_store_kind)(effects.host_store)
meaning(print_tensor_kind)(effects.print_tensor)
meaning(host_call_kind)(effects.host_call)


@meaning(call_kind)
def _call(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> Nested[None]:
    """Copy in, run, copy out; inputs by reference are copied back."""
    (graph,) = op.called_graphs
    check_bound(op)
    places, sharing = _given(op, environment), environment.sharing(op)
    results = yield lowering.calling(graph, places, channels, in_rows=True, sharing=sharing)
    for t, place in zip(op.outputs, results.outputs, strict=False):  # the graph may have gained outputs since
        environment.put(t, place)
    for i in sorted(op.modified & results.written.keys()):
        if not isinstance(places[i], Row):
            environment.write(op.inputs[i], read(results.written[i]))
        else:
            put_back(results.written[i], places[i])
    for storage, value in results.shared.items():
        environment.write(storage, value)
    environment.note_call(op, results)


def _given(op: Op, environment: Environment, own: int = 0, by_value: Container[int] = frozenset()) -> list[Array | Row]:
    """What an op passes to the graph that it runs: rows, but where the graph would change what others have in them.

    Args:
        op: the op.
        environment: that of the op.
        own: how many inputs of the graph come before.
        by_value: positions of what is no row in any case.
    """
    places = [environment.place(t) for t in op.inputs]
    rows = {i: place for i, place in enumerate(places) if isinstance(place, Row)}
    if rows:
        written, count = {i - own for i in changed_inputs(op.called_graphs[0])}, Counter(rows.values())
        changed = {row for i, row in rows.items() if i in written}
        for i, row in rows.items():
            is_copied = i in by_value or (i in written and i not in op.modified)
            if is_copied or (row in changed and count[row] > 1):
                places[i] = row.read()
    return places


def check_bound(op: Op) -> None:
    """`PopxlError` if a graph has gained inputs since an op that runs it was made."""
    if not all(run.is_bound for run in op.runs):
        titles = " or ".join(graph.title for graph in dict.fromkeys(op.called_graphs))
        raise PopxlError(
            f"Session: {titles} gained inputs after {op!r} ({op.source}) was made, and nothing is bound to them there. "
            "Call a graph after it has all its inputs."
        )


@meaning(conditional_kind)
def _conditional(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> None:
    """Run one branch. It alone moves on the streams that it uses."""
    check_bound(op)
    cond, *inputs = (environment.read(t) for t in op.inputs)
    then_branch, else_branch = op.called_graphs
    count = len(then_branch.inputs)
    streams = channels_of(then_branch, else_branch)
    stepping = channels.stepping(streams)

    def branch(graph: Graph, values: Sequence[Array], when: bool) -> Callable[[Any], Any]:
        def run(state: Any) -> Any:
            positions, met = state
            inside = stepping.at(positions)
            if lowering.is_shared:
                taken = cond.reshape(()) == when
                inside.running = taken if channels.running is None else channels.running & taken
            with lowering.meeting_after(met) as now:
                results = lowering.call(graph, values, inside)
                return results.outputs[: len(op.outputs)], (inside.positions(streams), now())

        return run

    branches = (branch(then_branch, inputs[:count], True), branch(else_branch, inputs[count:], False))
    # Several replicas on one device choose between results, and must not between whole buffers in the host's memory.
    one_of = _both if lowering.is_shared and any(map(is_on_host, jax.tree.leaves(stepping.start))) else lax.cond
    outputs, (positions, met) = one_of(cond.reshape(()), *branches, (stepping.start, lowering.met((op,))))
    lowering.meet_after(met)
    channels.leave(stepping, positions, outputs)
    for t, value in zip(op.outputs, outputs, strict=True):
        environment.write(t, value)


def _both(cond: Array, then_branch: Callable[[Any], Any], else_branch: Callable[[Any], Any], start: Any) -> Any:
    """What `lax.cond` gives. What is in the host's memory goes through both branches: they change it where they run."""
    then = then_branch(start)
    handed = jax.tree.map(lambda new, old: new if is_on_host(old) else old, then[1], start)
    return jax.tree.map(lambda a, b: b if is_on_host(b) else jnp.where(cond, a, b), then, else_branch(handed))


class Loop:
    """What a loop does, turn by turn.

    Carried from turn to turn are the first inputs, as many as there are carried results; and the inputs by reference,
    but for those that each turn returns. Of inputs that share storage, that is carried: a turn begins by writing the
    carried results to it, in their order. Everything else is the same in every turn. Further results are those of all
    turns, stacked.

    Attributes:
        start: what the first turn gets.
    """

    def __init__(self, op: Op, environment: Environment) -> None:
        self._op = op
        self._carried = op.attributes["carried"]
        self._sharing = environment.sharing(op)
        self._carried_too = returned_by_ref(op) - self._sharing.positions if op.modified else frozenset()
        by_value = frozenset(range(self._carried)) | self._carried_too
        self._inputs = _given(op, environment, EXTRA_INPUTS, by_value | self._sharing.positions)
        self._rows = {k: place for k, place in enumerate(self._inputs) if isinstance(place, Row)}
        self._stacks = tuple(dict.fromkeys(row.stack for k, row in self._rows.items() if k in op.modified))
        self._alone = op.modified - self._rows.keys() - self._sharing.positions
        contents = {k: self._inputs[k] for k in sorted(self._alone - self._carried_too)}
        arrays = [stack.array for stack in self._stacks]
        shared = {storage: self._sharing.values[storage] for storage in self._sharing.written}
        self.start = (tuple(self._inputs[: self._carried]), contents, arrays, shared)

    def turning(self, lowering: Lowering, state: Any, i: Array, channels: Channels) -> Nested[tuple[Any, Any]]:
        """One turn: what the next one gets, and the further results."""
        results_before, contents, arrays, shared = state
        now = dict(zip(self._stacks, arrays, strict=True))
        outside = dict.fromkeys(row.stack for row in self._rows.values())
        stacks = {stack: stack.holding(now.get(stack, stack.array)) for stack in outside}
        values = list(self._inputs)
        for k, content in contents.items():
            values[k] = content
        for k, row in self._rows.items():
            values[k] = Row(stacks[row.stack], row.number)
        values[: self._carried] = results_before
        given = [i, jnp.asarray(True), *values]
        sharing = self._sharing.holding(shared)
        if sharing:
            storages = Environment(sharing.values, AnyOrder(), sharing.same, 1)
            for k in sorted(sharing.positions.intersection(range(self._carried))):
                storages.write(self._op.inputs[k], results_before[k])
            sharing = sharing.holding(storages.values)
        results = yield lowering.calling(self._op.attributes["graph"], given, channels, in_rows=True, sharing=sharing)
        for k in self._rows.keys() & self._op.modified:
            put_back(results.written.get(k + EXTRA_INPUTS, values[k]), values[k])
        after = {k: read(results.written.get(k + EXTRA_INPUTS, values[k])) for k in contents}
        outputs = tuple(map(read, results.outputs[EXTRA_OUTPUTS:]))
        arrays = [stacks[stack].array for stack in self._stacks]
        return (outputs[: self._carried], after, arrays, results.shared), outputs[self._carried :]

    def finish(self, state: Any, stacked: Sequence[Array], environment: Environment) -> None:
        """Write the results, given what a further turn would get, and the further results of all turns."""
        outputs, contents, arrays, shared = state
        for stack, array in zip(self._stacks, arrays, strict=True):
            stack.array = array
        for t, value in zip(self._op.outputs, (*outputs, *stacked), strict=True):
            environment.write(t, value)
        for k in sorted(self._alone):
            environment.write(self._op.inputs[k], outputs[k] if k in self._carried_too else contents[k])
        for storage, value in shared.items():
            environment.write(storage, value)


@meaning(loop_kind)
def _loop(lowering: Lowering, op: Op, environment: Environment, channels: Channels) -> None:
    """One compiled body, however many turns. The streams are carried, too."""
    loop, streams = Loop(op, environment), channels_of(op.attributes["graph"])
    stepping = channels.stepping(streams)

    def turn(state: Any, i: Array) -> Any:
        before, positions, met = state
        inside = stepping.at(positions)
        with lowering.within_turn(), lowering.meeting_after(met) as now:
            after, further = done(loop.turning(lowering, before, i, inside))
            return (after, inside.positions(streams), now()), further

    count = op.attributes["repeat_count"]
    start = (loop.start, stepping.start, lowering.met((op,)))
    (state, positions, met), stacked = lax.scan(turn, start, jnp.arange(count, dtype=jnp.int32))
    lowering.meet_after(met)
    channels.leave(stepping, positions, (state, stacked))
    loop.finish(state, stacked, environment)
