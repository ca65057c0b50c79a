"""A program as a plan: pieces that are compiled once each, and run one after the other by the host, without waiting.

A graph that is called often is a piece; so are the ops between such calls. Pieces of equal structure share one
executable, so that compile time does not grow with the number of calls, and programs that call the same graph share
it too. What a piece overwrites is donated to it. The other way, one program whose calls XLA keeps, is in
`runtime.program`, which chooses.

If each IPU of the program is a device of its own, a piece is on one of them, and what it reads of others is copied
there (`runtime.placement`). As the host waits for nothing, pieces on different devices run at the same time, as far as
they do not need each other's results: so do the stages of a pipeline, whose loop the host goes through, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from time import perf_counter
from typing import Any

import jax
import numpy as np

from popxl.aliasing import callees_first, reachable, storages
from popxl.fp8_utils import to_device
from popxl.graph import Graph
from popxl.nesting import Nested, done
from popxl.op import Op
from popxl.ops.call import call_kind
from popxl.ops.repeat import EXTRA_INPUTS, EXTRA_OUTPUTS, loop_kind
from popxl.options import SessionOptions
from popxl.printing import summary
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import HostToDeviceStream, Stream
from popxl.tensor import Constant, Tensor
from runtime import remote
from runtime.effects import FAILURE, Channel, Channels, Failure, channels_of_ops
from runtime.executables import copied
from runtime.lower import Lowering, no_value
from runtime.placement import Places, can_enter
from runtime.replicas import Replicas
from runtime.structure import Encoding, Structure, Structures, encoded, structure_of
from runtime.timeline import Recorder

Array = Any
Key = Tensor | tuple[Tensor, int]
"""A storage; or its copy in another place."""

Values = dict[Any, Array]
"""What is in storages and copies, by their keys."""

SMALLEST = 16
"""A graph of fewer ops is not worth a dispatch of its own: it is part of the piece that calls it."""

TOGETHER = 4
"""Calls that are alike and follow each other are one piece, so many at a time: the more, the less often XLA has to wait
for the end of one before it begins the next; the fewer, the less there is to compile."""

REPEATED = 2000
"""A program is planned if XLA would otherwise compile this many ops that it has compiled already."""

WORTHWHILE = 100_000
"""Numbers that a dispatch reads and writes, on average, where placing ops on several CPU devices pays: these share the
cores, and would be kept waiting by the host."""


class Choice:
    """Which calls of a program become pieces: those of graphs that are called twice or more, and are large enough.

    Args:
        main: the graph that the program runs.
        smallest: how many ops are enough. `None`: no calls are pieces.
        places: the IPUs of the ops, if they are devices of their own.

    Attributes:
        lost: inputs of loops that are known not to be owned in all turns, so that planning a nest of loops finds that
            out once.
    """

    def __init__(self, main: Graph, smallest: int | None = SMALLEST, places: Places | None = None) -> None:
        self._structures = Structures(main)
        self._places = places
        self.lost: defaultdict[Op, set[Tensor]] = defaultdict(set)
        self._numbers_in = cache(lambda graph: self.numbers(graph.ops))
        for graph in () if places is None else callees_first(main)[:-1]:  # so that none has to look far
            self._numbers_in(graph)
        calls = Counter(self._structures.calls(main))
        for graph in () if places is None else places.loops:
            calls += self._structures.calls(graph)
        sizes = {self._structures.of(graph): self._structures.size(graph) for graph in reachable(main)[1:]}
        self._pieces = {s for s, count in calls.items() if smallest is not None and count > 1 and sizes[s] >= smallest}
        self.repeated = sum((calls[s] - 1) * sizes[s] for s in self._pieces)

    def is_worth_it(self) -> bool:
        """Whether a plan pays."""
        return self.repeated >= REPEATED

    def is_piece(self, op: Op) -> bool:
        """Whether an op is a call that is a piece of its own."""
        is_alike = op.kind is call_kind and self._structures.of(op.called_graphs[0]) in self._pieces
        return is_alike and not self.is_on_several(op)

    def is_entered(self, op: Op) -> bool:
        """Whether an op is a call or loop that the host carries out step by step: because there are pieces in the graph
        that it calls, or because its ops are in several places."""
        if self.is_on_several(op):
            return True
        if op.kind is not call_kind or self.is_piece(op):
            return False
        return can_enter(op) and not self._pieces.isdisjoint(self._structures.calls(op.called_graphs[0]))

    def is_on_several(self, op: Op) -> bool:
        """Whether an op runs in several places."""
        return self._places is not None and self._places.spans(op)

    def place(self, op: Op) -> int:
        """Where an op runs: the number of an IPU. Of one that is entered, what none of its steps touches is there."""
        if self._places is None:
            return 0
        return self._places.default(op) if self._places.spans(op) else min(self._places.of(op))

    def landing(self, t: Tensor, place: int) -> int:
        """Where a result is to go that is made in a place."""
        found = None if self._places is None else self._places.landing(t)
        return place if found is None else found

    def numbers(self, ops: Iterable[Op]) -> int:
        """How many numbers ops read and write, with all that they call."""
        return sum(map(self._numbers_of, ops))

    def _numbers_of(self, op: Op) -> int:
        own = sum(t.nelms for t in (*op.inputs, *op.outputs))
        return own + op.attributes.get("repeat_count", 1) * sum(map(self._numbers_in, op.called_graphs))

    def encoded(self, ops: Iterable[Op]) -> Encoding:
        """Ops, written down. Calls that are pieces are alike whatever numbers they are passed: of a layer, say."""
        ops = tuple(ops)
        passed = {t.origin for op in ops if self.is_piece(op) for t in op.inputs if isinstance(t.origin, Constant)}
        return encoded(ops, self._structures, passed)


@dataclass(frozen=True)
class Target:
    """What pieces are compiled for.

    Attributes:
        replicas: those that run the program.
        slots: where the arrays of remote buffers are.
        options: those of the Ir.
        transfers: how many of each stream there are in a run.
        wide: whether 64 bits are kept.
    """

    replicas: Replicas
    slots: Any
    options: SessionOptions
    transfers: int
    wide: bool

    def key(self) -> tuple[Any, ...]:
        """What makes a difference."""
        replicas = (self.replicas.count, self.replicas.sharding())
        options = (self.options.throwIfLog2ScaleTensorNotInRange, self.inlines)
        return (*replicas, self.slots, *options, self.transfers, self.wide)

    @property
    def inlines(self) -> bool:
        """Whether calls within a piece are as if they had been written out."""
        return self.options.calledGraphs == "inlined"


class Run:
    """One run of a program: the state of its streams and buffers, and what carries out the steps.

    Args:
        targets: what pieces are compiled for, by their places.
        where: the place of each stream and buffer.
        channels: by their places.
        recorder: calls executables, and copies, in place of the steps.
    """

    def __init__(
        self,
        targets: Mapping[int, Target],
        where: Mapping[Channel, int],
        channels: Mapping[int, Channels],
        recorder: Recorder | None,
    ) -> None:
        self._targets = targets
        self._where = dict(where)
        self._channels = channels
        self._recorder = recorder

    def call(self, executable: Any, name: Callable[[], str], *arguments: Any) -> Any:
        """Call an executable."""
        if self._recorder is None:
            return executable(*arguments)
        return self._recorder(name(), executable, *arguments)

    def put(self, array: Array, place: int) -> Array:
        """An array, in another place."""
        return self._put(array, self._targets[place].replicas.sharding())

    def _put(self, array: Array, sharding: Any) -> Array:
        return copied(array, sharding) if self._recorder is None else self._recorder.copy(array, sharding)

    def number(self, value: Any, place: int) -> Array:
        """A number of the host."""
        return self._targets[place].replicas.put(np.asarray(value))

    def channels(self, place: int, shared: Iterable[Channel] = ()) -> Channels:
        """The streams and buffers of a place. Those that are used in others too are brought there first."""
        here = self._channels[place]
        for c in shared:
            if self._where[c] != place:
                (state,) = self._channels[self._where[c]].take((c,))
                target = self._targets[place]
                sharding = target.slots if isinstance(c, RemoteBuffer) else target.replicas.sharding()
                array, position = state
                there = position if isinstance(position, int) else self.put(position, place)
                here.put_back((c,), [(self._put(array, sharding), there)])
                self._where[c] = place
        return here


# Steps --------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Something that the host does.

    Attributes:
        reads: the storages that it reads, the ones that it overwrites among them.
        makes: the storages that have a new value afterwards.
        frees: the storages that nobody needs afterwards.
        place: where it runs, or what it does not touch is; the number of an IPU.
        fetches: what has to be copied first, and the places where it is to be.
        ends: where what it makes is afterwards.
        drops: the keys of what nobody needs afterwards, copies included.
    """

    reads: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]
    frees: tuple[Tensor, ...] = ()
    place: int = 0
    fetches: tuple[tuple[Tensor, int], ...] = ()
    ends: dict[Tensor, int] = field(default_factory=dict)
    drops: tuple[Key, ...] = ()

    def fetch(self, values: Values, run: Run) -> None:
        """Copy what is needed in other places."""
        for t, place in self.fetches:
            values[t, place] = run.put(values[t], place)


@dataclass
class Piece(Step):
    """Ops that are compiled together, and run at once.

    Attributes:
        ops: what is run.
        encoding: the ops, written down.
        donated: the storages that the ops overwrite, whose new value somebody needs, and that nobody else holds.
        keys: under which the piece finds what it reads, where that is in another place.
        shared: the streams and buffers that pieces in other places use too.
        seconds: how long it took to compile it; 0, if something of the same structure had been compiled before.
    """

    ops: tuple[Op, ...] = ()
    encoding: Any = None
    donated: tuple[Tensor, ...] = ()
    keys: dict[Tensor, Key] = field(default_factory=dict)
    shared: tuple[Channel, ...] = ()
    seconds: float = 0.0

    @property
    def form(self) -> Structure:
        """The structure of the ops alone."""
        return structure_of(tuple(self.encoding.code))

    @property
    def name(self) -> str:
        """What is run, in a few words."""
        return summary(self.ops)

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """The streams and buffers that the ops use."""
        return channels_of_ops(self.ops)

    def found(self, target: Target) -> Structure:
        """What the piece is: its ops, what of them is donated and needed, and what they are compiled for."""
        number = self.encoding.numbers
        results = (tuple(number[t] for t in self.donated), tuple(number[t] for t in self.makes))
        return structure_of((*self.encoding.code, results, target.key()))

    def compile(self, targets: Mapping[int, Target]) -> None:
        """Compile the ops, unless ops of the same structure have been compiled before."""
        target = targets[self.place]
        self.feeds = tuple(c for c in self.channels if isinstance(c, HostToDeviceStream))
        self.kept = tuple(t for t in self.encoding.roots if t not in self.donated)
        self._given_up, self._given = (tuple(self.keys.get(t, t) for t in ts) for ts in (self.donated, self.kept))
        passed = (t for t in self.kept if isinstance(t, Constant))
        self._constants = {t: target.replicas.put(to_device(t.data, t.dtype)) for t in passed}
        self._sent = tuple((t, place) for t, place in self.ends.items() if place != self.place)
        self.structure = self.found(target)
        if self.structure.executable is None:
            start = perf_counter()
            lowering = Lowering(self.ops, target.options, not target.inlines, target.replicas)

            def piece(donated: Any, kept: Any, feeds: Any, positions: Any) -> Any:
                channels = Channels({c: (feed, 0) for c, feed in zip(self.feeds, feeds, strict=True)})
                channels.move(self.channels, positions)
                values = dict(zip((*self.donated, *self.kept), (*donated, *kept), strict=True))
                environment = lowering.run(self.ops, values, channels)
                return [environment.values[t] for t in self.makes], channels.positions(self.channels)

            spread = target.replicas.spread(piece)
            lowered = jax.jit(spread, donate_argnums=(0, 3)).lower(*self._arguments(target))
            self.structure.text = lowered.as_text
            self.structure.executable = target.replicas.compile(lowered)
            self.seconds = perf_counter() - start

    def _arguments(self, target: Target) -> tuple[Any, ...]:
        def spec(shape: tuple[int, ...], dtype: Any) -> Any:
            return target.replicas.spec(shape, dtype)

        def transfers(c: Stream | Failure) -> Any:
            if isinstance(c, Failure):
                return spec(c.shape, c.start.dtype)
            return spec((target.transfers, *c.shape), c.dtype.as_jax())

        def carried(c: Channel) -> Any:
            if isinstance(c, RemoteBuffer):
                return remote.spec(c, target.replicas, target.slots)
            return position if isinstance(c, HostToDeviceStream) else (transfers(c), position)

        position = spec((), np.dtype(np.int32))
        return (
            [spec(t.shape, t.dtype.as_jax()) for t in self.donated],
            [spec(t.shape, t.dtype.as_jax()) for t in self.kept],
            [transfers(c) for c in self.feeds],
            {i: carried(c) for i, c in enumerate(self.channels)},
        )

    def __call__(self, values: Values, run: Run) -> None:
        """Run the ops."""
        self.fetch(values, run)
        channels = run.channels(self.place, self.shared)
        made, positions = run.call(
            self.structure.executable,
            self._name,
            [values[key] for key in self._given_up],
            self._passed(values),
            [channels.transfers(c) for c in self.feeds],
            channels.positions(self.channels),
        )
        channels.move(self.channels, positions)
        values.update(zip(self.makes, made, strict=True))
        for t, place in self._sent:
            values[t] = run.put(values[t], place)
        for key in self.drops:
            del values[key]

    def _passed(self, values: Values) -> list[Array]:
        """What is read and not given up: constants that are passed to calls are the same in all runs."""
        if not self._constants:
            return [values[key] for key in self._given]
        return [self._constants[key] if key in self._constants else values[key] for key in self._given]

    def _name(self) -> str:
        return self.name


@dataclass
class Entry(Step):
    """A call that the host carries out step by step; or a loop, turn by turn.

    Attributes:
        op: the call, or the loop.
        turns: how often the graph is gone through.
        inputs: the inputs of the graph for those of the op.
        results: the storages of the graph for the results of the op.
        extra: the inputs that only the graph of a loop has: the number of the turn, and true.
        inside: the steps.
        keys: under which the inputs are found.
        again: what the inputs are in the next turn: storages of the graph.
        returns: the inputs that have to be copied before the next turn, and where to.
    """

    op: Any = None
    turns: int = 1
    inputs: tuple[Tensor, ...] = ()
    results: tuple[Tensor, ...] = ()
    extra: tuple[Tensor, ...] = ()
    inside: Any = None
    keys: tuple[Key, ...] = ()
    again: dict[Tensor, Tensor] = field(default_factory=dict)
    returns: tuple[tuple[Tensor, int], ...] = ()

    def compile(self, targets: Mapping[int, Target]) -> None:
        """Put the constants that are passed to where the steps read them."""
        self._constants = {
            inner: targets[self.inside.starts.get(inner, self.place)].replicas.put(to_device(t.data, t.dtype))
            for t, inner in zip(self.op.inputs, self.inputs, strict=True)
            if isinstance(t, Constant)
        }
        self._numbered = tuple((t, self.inside.starts[t]) for t in self.extra if t in self.inside.starts)

    def running(self, values: Values, run: Run) -> Nested[None]:
        """Carry out the call, or the loop."""
        self.fetch(values, run)
        inner = dict(self._constants)
        inner.update((t, values[key]) for t, key in zip(self.inputs, self.keys, strict=True) if t not in inner)
        for turn in range(self.turns):
            if turn:
                inner = {t: inner[result] for t, result in self.again.items()}
                for t, place in self.returns:
                    inner[t] = run.put(inner[t], place)
            for t, place in self._numbered:
                inner[t] = run.number(np.int32(turn) if t is self.extra[0] else np.True_, place)
            yield self.inside.running(inner, run)
        for t, result in zip(self.op.outputs, self.results, strict=False):
            values[t] = inner[result]
        for i in self.op.modified:
            values[self.op.inputs[i].origin] = inner[self.inputs[i]]
        for key in self.drops:
            del values[key]


class Steps:
    """What the host does for one graph, in order.

    Args:
        graph: the graph.
        choice: which calls become pieces, and where ops run.
        owned: the storages that nobody else holds at the start.
        kept: the storages whose values are needed at the end.
        place: where is what no step touches.
        is_whole: all is in that place.

    Attributes:
        owned: the storages that nobody else holds at the end.
        starts: where storages have to be at the start; whoever touches one first says so.
        at: where storages are at the end.
    """

    def __init__(
        self,
        graph: Graph,
        choice: Choice,
        owned: Iterable[Tensor],
        kept: Iterable[Tensor],
        place: int = 0,
        is_whole: bool = False,
    ) -> None:
        self._choice = choice
        self._made_of = storages(graph)
        self._kept = tuple(kept)
        self._place = place
        self._is_whole = is_whole
        self.owned = set(owned)
        self.starts: dict[Tensor, int] = {}
        self.at: dict[Tensor, int] = {}
        self._copies: defaultdict[Tensor, set[int]] = defaultdict(set)
        self.steps: list[Piece | Entry] = list(self._cut(graph))
        self._find_last_uses(set(self._kept))
        self.steps = list(self._grouped())

    def planned(self) -> Nested[Steps]:
        """These steps, with all that is inside of them."""
        for step in self.steps:
            if isinstance(step, Piece):
                written = {s for op in step.ops for i in op.modified for s in self._made_of[op.inputs[i]]}
                step.donated = tuple(t for t in step.reads if t in written & self.owned & {*step.makes})
                self.owned.update(step.makes)
                self._bring(step, {t: step.place for t in step.reads})
                step.keys = {t: (t, step.place) for t in step.reads if self.at[t] != step.place}
                self._leave(step, {t: self._choice.landing(t, step.place) for t in step.makes})
            else:
                yield self._enter(step)
        for t in self._kept:
            self._touch(t, self._place)
        return self

    def _cut(self, graph: Graph) -> Iterator[Piece | Entry]:
        """The pieces and entries: each call that is one, and the ops between, as far as they are in one place.

        What follows a call joins its piece, if the two follow each other elsewhere too: the update of the weights goes
        with the gradient, say.
        """
        runs: list[list[Op]] = [[]]  # an entry, or the ops between, or a call and what follows it
        place = self._place_of
        for op in graph.ops:
            if self._choice.is_entered(op):
                runs += [[op], []]
            elif self._choice.is_piece(op):
                runs.append([op])
            elif op.kind.put is None:  # a view is made when somebody looks through it
                if runs[-1] and place(runs[-1][0]) != place(op):
                    runs.append([])
                runs[-1].append(op)
        codes = [structure_of(tuple(self._choice.encoded(run).code)) for run in runs]
        count = Counter(codes)
        for run, code in zip(runs, codes, strict=True):
            if run and self._choice.is_entered(run[0]):
                yield self._entry(run[0])
            elif len(run) > 1 and count[code] == 1 and self._choice.is_piece(run[0]):
                yield self._piece(run[:1])
                yield self._piece(run[1:])
            elif run:
                yield self._piece(run)

    def _entry(self, op: Op) -> Entry:
        reads = dict.fromkeys(t.origin for t in op.inputs if not isinstance(t, Constant))
        written = [op.inputs[i].origin for i in sorted(op.modified)]
        (graph,) = op.called_graphs
        is_loop = op.kind is loop_kind
        inputs, outputs = (EXTRA_INPUTS, EXTRA_OUTPUTS) if is_loop else (0, 0)
        results = tuple(t.origin for t in graph.outputs[outputs:])
        return Entry(
            tuple(reads),
            (*op.outputs, *written),
            place=self._place_of(op),
            op=op,
            turns=op.attributes["repeat_count"] if is_loop else 1,
            inputs=graph.inputs[inputs:],
            results=results,
            extra=graph.inputs[:inputs],
            again=dict(zip(graph.inputs[inputs:], graph.inputs[inputs:], strict=True))
            | (dict(zip(graph.inputs[inputs:], results, strict=False)) if is_loop else {}),
        )

    def _piece(self, ops: Sequence[Op]) -> Piece:
        encoding = self._choice.encoded(ops)
        made = dict.fromkeys(t for op in ops for t in op.outputs if t.origin is t)
        made |= dict.fromkeys(s for op in ops for i in sorted(op.modified) for s in self._made_of[op.inputs[i]])
        place = self._place_of(ops[0])
        reads = tuple(t for t in encoding.roots if not isinstance(t, Constant))
        return Piece(reads, tuple(made), place=place, ops=tuple(ops), encoding=encoding)

    def _find_last_uses(self, needed: set[Tensor]) -> None:
        """What each step makes, and what nobody needs after it.

        Pieces of one structure all make what any of them has to, so that they are compiled once.
        """
        asked: dict[Structure, set[int]] = defaultdict(set)
        for step in reversed(self.steps):
            if isinstance(step, Piece):
                asked[step.form].update(step.encoding.numbers[t] for t in step.makes if t in needed)
            step.frees = tuple(dict.fromkeys(t for t in (*step.reads, *step.makes) if t not in needed))
            needed -= set(step.makes) - set(step.reads)
            needed |= set(step.reads)
        for step in self.steps:
            if isinstance(step, Piece):  # an entry makes all results
                step.makes = tuple(t for t in step.makes if step.encoding.numbers[t] in asked[step.form])
                step.frees = tuple(t for t in step.frees if t in step.reads or t in step.makes)

    def _grouped(self) -> Iterator[Piece | Entry]:
        """The steps, with calls that are alike and follow each other taken together, some at a time.

        All that the pieces make is made by the group too, needed or not, so that programs share it.
        """

        def form(step: Piece | Entry) -> Any:
            if isinstance(step, Piece) and self._choice.is_piece(step.ops[0]):
                return (step.form, step.place)
            return id(step)  # like no other

        for _, steps in groupby(self.steps, form):
            alike = list(steps)
            grouped = len(alike) // TOGETHER * TOGETHER if len(alike) >= 2 * TOGETHER else 0
            for first in range(0, grouped, TOGETHER):
                yield self._group(alike[first : first + TOGETHER])
            yield from alike[grouped:]

    def _group(self, pieces: Sequence[Any]) -> Piece:
        """Pieces that follow each other, as one."""
        piece = self._piece([op for piece in pieces for op in piece.ops])
        piece.makes = tuple(dict.fromkeys(t for each in pieces for t in each.makes))
        piece.frees = tuple(dict.fromkeys(t for each in pieces for t in each.frees))
        return piece

    # Places

    def _place_of(self, op: Op) -> int:
        """Where an op runs."""
        return self._place if self._is_whole else self._choice.place(op)

    def _touch(self, t: Tensor, place: int) -> int:
        """Where a storage is; in this place, if nothing has been said of it yet."""
        if t not in self.at:
            self.at[t] = self.starts[t] = place
        return self.at[t]

    def _bring(self, step: Step, wanted: Mapping[Tensor, int]) -> None:
        """Have a step find storages where it wants them."""
        missing = [(t, p) for t, p in wanted.items() if self._touch(t, p) != p and p not in self._copies[t]]
        for t, p in missing:
            self._copies[t].add(p)
        step.fetches += tuple(missing)

    def _leave(self, step: Step, ends: dict[Tensor, int]) -> None:
        """Note where what a step makes is afterwards. Copies of what it overwrites are of no use any more."""
        step.ends = ends
        self.at.update(ends)
        stale = [(t, p) for t in dict.fromkeys((*ends, *step.frees)) for p in sorted(self._copies.pop(t, ()))]
        step.drops = (*step.frees, *stale)

    # Entries

    def _enter(self, step: Entry) -> Nested[None]:
        """Plan the graph of an entry. Two storages may hold one array afterwards: neither is then owned."""
        op: Op = step.op
        (graph,) = op.called_graphs
        origins = [t.origin for t in op.inputs]
        given_up = {*step.frees, *(origins[i] for i in op.modified)}
        owned = {
            t
            for t, origin in zip(step.inputs, origins, strict=True)
            if origin in self.owned & given_up and origins.count(origin) == 1
        }
        results = list(zip(op.outputs, step.results, strict=False))
        results += [(origins[i], step.inputs[i]) for i in sorted(op.modified)]
        kept = {inner for _, inner in results}
        if step.turns > 1:
            owned &= {t for i, t in enumerate(step.inputs) if step.again[t] is not t or i in op.modified}
            owned -= self._choice.lost[op]
            kept.update(step.again.values())
        while True:
            is_whole = self._is_whole or not self._choice.is_on_several(op)
            step.inside = yield Steps(graph, self._choice, owned, kept, step.place, is_whole).planned()
            passed = Counter(step.again.values())
            lost = {t for t in owned if passed[step.again[t]] > 1 or step.again[t] not in step.inside.owned}
            if step.turns == 1 or not lost:
                break
            self._choice.lost[op] |= lost
            owned -= lost
        self._bring_to(step, origins)
        returned = Counter(inner for _, inner in results)
        for t, origin in zip(step.inputs, origins, strict=True):
            if returned[t] and t not in step.inside.owned:
                self.owned.discard(origin)
        for t, inner in results:
            if returned[inner] == 1 and inner in step.inside.owned:
                self.owned.add(t)
            else:
                self.owned.discard(t)
        self._leave(step, {t: step.inside.at[inner] for t, inner in results})

    def _bring_to(self, step: Entry, origins: Sequence[Tensor]) -> None:
        """Have the steps of an entry find what is passed to them where they need it, in each turn."""
        starts, at = step.inside.starts, step.inside.at
        keys: list[Key] = []
        for t, origin in zip(step.inputs, origins, strict=True):
            place = starts.get(t)
            if isinstance(origin, Constant) or place is None:
                keys.append(origin)
                continue
            self._bring(step, {origin: place})
            keys.append(origin if self.at[origin] == place else (origin, place))
        step.keys = tuple(keys)
        if step.turns > 1:
            step.returns = tuple((t, starts[t]) for t in step.again if t in starts and at[step.again[t]] != starts[t])

    def all(self) -> Iterator[tuple[Piece | Entry, int]]:
        """All steps, those inside of entries too, each with how often it is done."""
        waiting = [(step, 1) for step in reversed(self.steps)]
        while waiting:
            step, times = waiting.pop()
            yield step, times
            if isinstance(step, Entry):
                waiting += [(inner, times * step.turns) for inner in reversed(step.inside.steps)]

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in the order in which they first run."""
        return tuple(step for step, _ in self.all() if isinstance(step, Piece))

    def homes(self) -> dict[Channel, int]:
        """Where each stream and buffer is: with the piece that uses it first."""
        homes: dict[Channel, int] = {}
        for piece in self.pieces():
            for c in piece.channels:
                homes.setdefault(c, piece.place)
        return homes

    def is_worthwhile(self) -> bool:
        """Whether the pieces are large enough to be in several places on CPUs."""
        pieces = [(step, times) for step, times in self.all() if isinstance(step, Piece)]
        copies = sum(len(step.fetches) * times for step, times in self.all())
        copies += sum(sum(p != step.place for p in step.ends.values()) * times for step, times in pieces)
        numbers = sum(self._choice.numbers(step.ops) * times for step, times in pieces)
        return numbers >= WORTHWHILE * (copies + sum(times for _, times in pieces))

    def running(self, values: Values, run: Run) -> Nested[None]:
        """Do the steps."""
        for step in self.steps:
            if isinstance(step, Piece):
                step(values, run)
            else:
                yield step.running(values, run)

    def curve(self, copies: int) -> Nested[list[tuple[Piece, int, int]]]:
        """The pieces in order, each with bytes that are in use in its place while it runs, besides what goes into the
        steps: of values that were made before, and of what it makes and needs by itself. `copies` are there of each
        value."""
        alive: dict[Tensor, tuple[int, int]] = {}
        curve: list[tuple[Piece, int, int]] = []

        def held(place: int) -> int:
            return sum(size for p, size in alive.values() if p == place)

        for step in self.steps:
            made = {t: copies * t.nelms * t.dtype.itemsize for t in step.makes if t not in step.reads}
            if isinstance(step, Piece):
                needed = step.structure.executable.memory_analysis().temp_size_in_bytes
                curve.append((step, held(step.place), sum(made.values()) + needed))
            else:  # what an entry makes, its steps make
                inner = yield step.inside.curve(copies)
                curve += [(piece, held(piece.place) + before, inside) for piece, before, inside in inner]
            alive |= {t: (step.ends[t], size) for t, size in made.items()}
            for t in step.frees:
                alive.pop(t, None)
        return curve


class Plan:
    """A program that the host carries out: `(changing, constant, feeds) -> (changing, fetches)`.

    Fetched are the transfers of the output streams; then, where anything is checked, which check failed: an array for
    each place.

    Args:
        steps: what the host does.
        changed, read: what holds the variables that the program changes, and those that it only reads.
        buffers: the remote buffers that it uses, and where; their arrays go in and come out after those of `changed`.
        inputs, outputs: the streams that are fed and fetched.
        channels: by the places where they are: the streams, and what failed.
        targets: what to compile for, by the places.
        ends: for each place with streams two compiled JAX functions: what makes the first state of its channels of the
            feeds, where `None` in place of the transfers of a feed means the feed itself; and what makes the fetches of
            the last state.
    """

    def __init__(
        self,
        steps: Steps,
        changed: Sequence[Tensor],
        read: Sequence[Tensor],
        buffers: Mapping[RemoteBuffer, int],
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        channels: Mapping[int, Sequence[Stream | Failure]],
        targets: Mapping[int, Target],
        ends: Mapping[int, tuple[Any, Any]],
    ) -> None:
        self._steps = steps
        self._variables = (*changed, *read)
        self._changed = tuple((v, steps.starts[v], steps.at[v]) for v in changed)
        self._buffers = buffers
        self._inputs, self._outputs = inputs, outputs
        self._channels = channels
        self._where = {c: place for place, cs in channels.items() for c in cs} | dict(buffers)
        self._targets = targets
        self._ends = ends
        known = set(self._variables)
        for step in steps.steps:
            for t in step.reads:
                if t not in known:
                    raise no_value(t)
            known.update(step.makes)
        users: defaultdict[Channel, set[int]] = defaultdict(set)
        for piece in self.pieces:
            for c in piece.channels:
                users[c].add(piece.place)
        self._shared = {c for c, places in users.items() if len(places) > 1 and c is not FAILURE}
        for piece in self.pieces:
            piece.shared = tuple(c for c in piece.channels if c in self._shared)
        for step, _ in steps.all():
            step.compile(targets)

    def __call__(
        self,
        changing: Sequence[Array],
        constant: Sequence[Array],
        feeds: Sequence[Array],
        recorder: Recorder | None = None,
    ) -> Any:
        """Run the program. A recorder calls the executables in place of the plan."""
        count = len(self._changed)
        values = dict(zip(self._variables, (*changing[:count], *constant), strict=True))
        channels: dict[int, Channels] = {}
        run = Run(self._targets, self._where, channels, recorder)
        given: dict[Channel, Array] = dict(zip(self._inputs, feeds, strict=True))
        for place in self._targets:
            channels[place] = Channels(self._begun(place, given, run))
        for (buffer, place), slots in zip(self._buffers.items(), changing[count:], strict=True):
            channels[place].set_slots(buffer, slots)
        done(self._steps.running(values, run))
        fetches, failures = self._fetched(run)
        changed = [values[v] if start == end else run.put(values[v], start) for v, start, end in self._changed]
        for buffer, place in self._buffers.items():
            changed.append(run.channels(place, self._shared & {buffer}).slots(buffer))
        return tuple(changed), (*(fetches[s] for s in self._outputs), *failures)

    def _begun(self, place: int, given: Mapping[Channel, Array], run: Run) -> dict[Channel, Any]:
        """The channels of a place at the start."""
        if place not in self._ends:
            return {}
        here = self._channels[place]
        begin, _ = self._ends[place]
        states = run.call(begin, lambda: "feeds", tuple(given[c] for c in here if c in given))
        return {
            c: (self._fed(given[c], place) if array is None else array, position)
            for c, (array, position) in zip(here, states, strict=True)
        }

    def _fed(self, feed: Array, place: int) -> Array:
        """A feed that is used as it is. Many pieces may read it, in turns of a loop, say."""
        return feed if len(self._targets) == 1 else jax.device_put(feed, self._targets[place].replicas.sharding())

    def _fetched(self, run: Run) -> tuple[dict[Channel, Array], list[Array]]:
        """The output streams, and for each place which check failed."""
        fetches: dict[Channel, Array] = {}
        failures: list[Array] = []
        for place, (_, end) in self._ends.items():
            here = [c for c in self._channels[place] if not isinstance(c, HostToDeviceStream)]
            channels = run.channels(place, self._shared.intersection(here))
            found = run.call(end, lambda: "fetches", [channels.transfers(c) for c in here])
            streams = [c for c in here if c is not FAILURE]
            fetches |= zip(streams, found[: len(streams)], strict=True)
            failures += found[len(streams) :]
        return fetches, failures

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in the order in which they first run."""
        return self._steps.pieces()

    @property
    def runs(self) -> Counter[Structure]:
        """How often a run of the program runs pieces of each structure."""
        runs: Counter[Structure] = Counter()
        for step, times in self._steps.all():
            if isinstance(step, Piece):
                runs[step.structure] += times
        return runs

    @property
    def structures(self) -> tuple[Structure, ...]:
        """What the pieces are, each once."""
        return tuple(dict.fromkeys(piece.structure for piece in self.pieces))

    def text(self) -> str:
        """What was compiled, each piece once."""
        return "\n".join(structure.text() for structure in self.structures)

    def curve(self) -> list[tuple[Piece, int, int]]:
        """The pieces in order, each with the bytes that are in use on its device while it runs, besides the variables
        and the feeds: of values that were made before, and of what it makes and needs by itself."""
        copies = next(iter(self._targets.values())).replicas.per_device
        return done(self._steps.curve(copies))

    def temporaries(self) -> int:
        """Bytes that one run needs at most on one device, besides the variables and the feeds."""
        return max((held + inside for _, held, inside in self.curve()), default=0)
