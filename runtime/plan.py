"""A program as a plan: pieces that are compiled once each, and run one after the other by the host, without waiting.

A graph that is called often is a piece; so are the ops between such calls. Pieces of equal structure share one
executable, so that compile time does not grow with the number of calls, and programs that call the same graph share
it too. What a piece overwrites is donated to it. The other way, one program whose calls XLA keeps, is in
`runtime.program`, which chooses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from time import perf_counter
from typing import Any

import jax
import numpy as np

from popxl.aliasing import storages
from popxl.fp8_utils import to_device
from popxl.graph import Graph
from popxl.nesting import Nested, done
from popxl.op import Op
from popxl.ops.call import call_kind
from popxl.options import SessionOptions
from popxl.printing import summary
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import HostToDeviceStream, Stream
from popxl.tensor import Constant, Tensor
from runtime import remote
from runtime.effects import Channel, Channels, Failure, channels_of_ops
from runtime.lower import Lowering, no_value, view_of
from runtime.replicas import Replicas
from runtime.structure import Encoding, Structure, Structures, encoded, structure_of

Array = Any
Values = dict[Tensor, Array]

SMALLEST = 16
"""A graph of fewer ops is not worth a dispatch of its own: it is part of the piece that calls it."""

TOGETHER = 4
"""Calls that are alike and follow each other are one piece, so many at a time: the more, the less often XLA has to wait
for the end of one before it begins the next; the fewer, the less there is to compile."""

REPEATED = 2000
"""A program is planned if XLA would otherwise compile this many ops that it has compiled already."""


class Choice:
    """Which calls of a program become pieces: those of graphs that are called twice or more, and are large enough.

    Args:
        main: the graph that the program runs.
        smallest: how many ops are enough.
    """

    def __init__(self, main: Graph, smallest: int = SMALLEST) -> None:
        self._structures = Structures(main)
        calls = self._structures.calls(main)
        sizes = {self._structures.of(graph): self._structures.size(graph) for graph in _called(main)}
        self._pieces = {s for s, count in calls.items() if count > 1 and sizes[s] >= smallest}
        self.repeated = sum((calls[s] - 1) * sizes[s] for s in self._pieces)

    def is_worth_it(self) -> bool:
        """Whether a plan pays."""
        return self.repeated >= REPEATED

    def is_piece(self, op: Op) -> bool:
        """Whether an op is a call that is a piece of its own."""
        return op.kind is call_kind and self._structures.of(op.called_graphs[0]) in self._pieces

    def is_entered(self, op: Op) -> bool:
        """Whether an op is a call that the host carries out step by step, because there are pieces in its graph."""
        if op.kind is not call_kind or self.is_piece(op):
            return False
        (graph,) = op.called_graphs
        whole = all(view_of(t.origin) is None for t in (*op.inputs, *graph.outputs))
        made = not any(isinstance(t.origin, Constant) for t in graph.outputs)
        inside = not self._pieces.isdisjoint(self._structures.calls(graph))
        return inside and whole and made and len(op.inputs) == len(graph.inputs)

    def encoded(self, ops: Iterable[Op]) -> Encoding:
        """Ops, written down."""
        return encoded(ops, self._structures)


def _called(main: Graph) -> Iterator[Graph]:
    """The graphs that calls lead to, each once."""
    seen: set[Graph] = set()
    waiting = [main]
    while waiting:
        for op in waiting.pop().ops:
            if op.kind is call_kind and op.called_graphs[0] not in seen:
                seen.add(op.called_graphs[0])
                waiting.append(op.called_graphs[0])
                yield op.called_graphs[0]


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
        return (*replicas, self.slots, self.options.throwIfLog2ScaleTensorNotInRange, self.transfers, self.wide)


# Steps --------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Something that the host does.

    Attributes:
        reads: the storages that it reads, the ones that it overwrites among them.
        makes: the storages that have a new value afterwards.
        frees: the storages that nobody needs afterwards.
    """

    reads: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]
    frees: tuple[Tensor, ...] = ()


@dataclass
class Piece(Step):
    """Ops that are compiled together, and run at once.

    Attributes:
        ops: what is run.
        encoding: the ops, written down.
        donated: the storages that the ops overwrite, whose new value somebody needs, and that nobody else holds.
        seconds: how long it took to compile it; 0, if something of the same structure had been compiled before.
    """

    ops: tuple[Op, ...] = ()
    encoding: Any = None
    donated: tuple[Tensor, ...] = ()
    seconds: float = 0.0

    @property
    def form(self) -> Structure:
        """The structure of the ops alone."""
        return structure_of(tuple(self.encoding.code))

    @property
    def name(self) -> str:
        """What is run, in a few words."""
        return summary(self.ops)

    def found(self, target: Target) -> Structure:
        """What the piece is: its ops, what of them is donated and needed, and what they are compiled for."""
        number = self.encoding.numbers
        results = (tuple(number[t] for t in self.donated), tuple(number[t] for t in self.makes))
        return structure_of((*self.encoding.code, results, target.key()))

    def compile(self, target: Target) -> None:
        """Compile the ops, unless ops of the same structure have been compiled before."""
        self.channels = channels_of_ops(self.ops)
        self.feeds = tuple(c for c in self.channels if isinstance(c, HostToDeviceStream))
        self.kept = tuple(t for t in self.reads if t not in self.donated)
        self.structure = self.found(target)
        if self.structure.executable is None:
            start = perf_counter()
            lowering = Lowering(self.ops, target.options, replicas=target.replicas)

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

    def __call__(self, values: Values, channels: Channels, recorder: Any = None) -> None:
        """Run the ops."""
        executable = self.structure.executable
        made, positions = (executable if recorder is None else partial(recorder, self.name, executable))(
            [values[t] for t in self.donated],
            [values[t] for t in self.kept],
            [channels.transfers(c) for c in self.feeds],
            channels.positions(self.channels),
        )
        channels.move(self.channels, positions)
        values.update(zip(self.makes, made, strict=True))
        for t in self.frees:
            del values[t]


@dataclass
class Entry(Step):
    """A call that the host carries out step by step.

    Attributes:
        op: the call.
        inside: the steps.
    """

    op: Any = None
    inside: Any = None

    def compile(self, target: Target) -> None:
        """Put the constants that are passed to where the steps run."""
        self._constants = {
            t: target.replicas.put(to_device(t.data, t.dtype)) for t in self.op.inputs if isinstance(t, Constant)
        }

    def running(self, values: Values, channels: Channels, recorder: Any) -> Nested[None]:
        """Carry out the call."""
        (graph,) = self.op.called_graphs
        given = [self._constants[t] if t in self._constants else values[t.origin] for t in self.op.inputs]
        inner = dict(zip(graph.inputs, given, strict=True))
        del given
        yield self.inside.running(inner, channels, recorder)
        for t, result in zip(self.op.outputs, graph.outputs, strict=False):
            values[t] = inner[result.origin]
        for i in self.op.modified:
            values[self.op.inputs[i].origin] = inner[graph.inputs[i]]
        for t in self.frees:
            del values[t]


class Steps:
    """What the host does for one graph, in order.

    Args:
        graph: the graph.
        choice: which calls become pieces.
        owned: the storages that nobody else holds at the start.
        kept: the storages whose values are needed at the end.

    Attributes:
        owned: the storages that nobody else holds at the end.
    """

    def __init__(self, graph: Graph, choice: Choice, owned: Iterable[Tensor], kept: Iterable[Tensor]) -> None:
        self._choice = choice
        self._made_of = storages(graph)
        self.owned = set(owned)
        self.steps: list[Piece | Entry] = list(self._cut(graph))
        self._find_last_uses(set(kept))
        self.steps = list(self._grouped())

    def planned(self) -> Nested[Steps]:
        """These steps, with all that is inside of them."""
        for step in self.steps:
            if isinstance(step, Piece):
                written = {s for op in step.ops for i in op.modified for s in self._made_of[op.inputs[i]]}
                step.donated = tuple(t for t in step.reads if t in written & self.owned & {*step.makes})
                self.owned.update(step.makes)
            else:
                yield self._enter(step)
        return self

    def _cut(self, graph: Graph) -> Iterator[Piece | Entry]:
        """The pieces and entries: each call that is one, and the ops between.

        What follows a call joins its piece, if the two follow each other elsewhere too: the update of the weights goes
        with the gradient, say.
        """
        runs: list[list[Op]] = [[]]  # an entry, or the ops between, or a call and what follows it
        for op in graph.ops:
            if self._choice.is_entered(op):
                runs += [[op], []]
            elif self._choice.is_piece(op):
                runs.append([op])
            elif op.kind.put is None:  # a view is made when somebody looks through it
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
        return Entry(tuple(reads), (*op.outputs, *written), op=op)

    def _piece(self, ops: Sequence[Op]) -> Piece:
        encoding = self._choice.encoded(ops)
        made = dict.fromkeys(t for op in ops for t in op.outputs if t.origin is t)
        made |= dict.fromkeys(s for op in ops for i in sorted(op.modified) for s in self._made_of[op.inputs[i]])
        return Piece(tuple(encoding.roots), tuple(made), ops=tuple(ops), encoding=encoding)

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
                return step.form
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

    def _enter(self, step: Entry) -> Nested[None]:
        """Plan the graph of an entry. Two storages may hold one array afterwards: neither is then owned."""
        op: Op = step.op
        (graph,) = op.called_graphs
        origins = [t.origin for t in op.inputs]
        given_up = {*step.frees, *(origins[i] for i in op.modified)}
        owned = {
            t
            for t, origin in zip(graph.inputs, origins, strict=True)
            if origin in self.owned & given_up and origins.count(origin) == 1
        }
        results = [(t, result.origin) for t, result in zip(op.outputs, graph.outputs, strict=False)]
        results += [(origins[i], graph.inputs[i]) for i in sorted(op.modified)]
        step.inside = yield Steps(graph, self._choice, owned, {inner for _, inner in results}).planned()
        returned = Counter(inner for _, inner in results)
        for t, origin in zip(graph.inputs, origins, strict=True):
            if returned[t] and t not in step.inside.owned:
                self.owned.discard(origin)
        for t, inner in results:
            if returned[inner] == 1 and inner in step.inside.owned:
                self.owned.add(t)
            else:
                self.owned.discard(t)

    def all(self) -> Iterator[Piece | Entry]:
        """All steps, those inside of entries too."""
        waiting = self.steps[::-1]
        while waiting:
            step = waiting.pop()
            yield step
            if isinstance(step, Entry):
                waiting += reversed(step.inside.steps)

    def running(self, values: Values, channels: Channels, recorder: Any) -> Nested[None]:
        """Do the steps."""
        for step in self.steps:
            if isinstance(step, Piece):
                step(values, channels, recorder)
            else:
                yield step.running(values, channels, recorder)

    def curve(self, copies: int) -> Nested[list[tuple[Piece, int, int]]]:
        """The pieces in order, each with bytes that are in use while it runs, besides what goes into the steps: of
        values that were made before, and of what it makes and needs by itself. `copies` are there of each value."""
        alive: dict[Tensor, int] = {}
        curve: list[tuple[Piece, int, int]] = []
        for step in self.steps:
            held = sum(alive.values())
            made = {t: copies * t.nelms * t.dtype.itemsize for t in step.makes if t not in step.reads}
            if isinstance(step, Piece):
                needed = step.structure.executable.memory_analysis().temp_size_in_bytes
                curve.append((step, held, sum(made.values()) + needed))
            else:  # what an entry makes, its steps make
                curve += [(piece, held + before, inside) for piece, before, inside in (yield step.inside.curve(copies))]
            alive |= made
            for t in step.frees:
                alive.pop(t, None)
        return curve


class Plan:
    """A program that the host carries out: `(changing, constant, feeds) -> (changing, fetches)`.

    Args:
        main: the graph that the program runs.
        choice: which calls become pieces.
        changed, read: what holds the variables that the program changes, and those that it only reads.
        buffers: the remote buffers that it uses; their arrays go in and come out after those of `changed`.
        channels: the streams that it uses.
        target: what to compile for.
        begin: the first state of the channels, made of the feeds: a JAX function, compiled. `None` in place of the
            transfers of a feed means the feed itself.
        end: the fetches, made of what is stored to: likewise.
    """

    def __init__(
        self,
        main: Graph,
        choice: Choice,
        changed: Sequence[Tensor],
        read: Sequence[Tensor],
        buffers: Sequence[RemoteBuffer],
        channels: Sequence[Channel],
        target: Target,
        begin: Callable[[Any], Any],
        end: Callable[[Any], Any],
    ) -> None:
        self._variables = (*changed, *read)
        self._changed = changed
        self._buffers = buffers
        self._channels = channels
        self._begin = begin
        self._end = end
        self._copies = target.replicas.per_device
        self._steps: Steps = done(Steps(main, choice, changed, changed).planned())
        known = set(self._variables)
        for step in self._steps.steps:
            for t in step.reads:
                if t not in known:
                    raise no_value(t)
            known.update(step.makes)
        for step in self._steps.all():
            step.compile(target)

    def __call__(
        self, changing: Sequence[Array], constant: Sequence[Array], feeds: Sequence[Array], recorder: Any = None
    ) -> Any:
        """Run the program. A recorder calls the executables in place of the plan: `(name, executable, *arguments)`."""
        begin, end = self._begin, self._end
        if recorder is not None:
            begin, end = partial(recorder, "feeds", begin), partial(recorder, "fetches", end)
        count = len(self._changed)
        values = dict(zip(self._variables, (*changing[:count], *constant), strict=True))
        streams = (c for c in self._channels if isinstance(c, HostToDeviceStream))
        given: dict[Channel, Array] = dict(zip(streams, feeds, strict=True))
        started = zip(self._channels, begin(feeds), strict=True)
        channels = Channels({c: (given[c] if array is None else array, position) for c, (array, position) in started})
        for buffer, slots in zip(self._buffers, changing[count:], strict=True):
            channels.set_slots(buffer, slots)
        done(self._steps.running(values, channels, recorder))
        changed = (*(values[v] for v in self._changed), *map(channels.slots, self._buffers))
        return changed, end(channels.results())

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in the order in which they run."""
        return tuple(step for step in self._steps.all() if isinstance(step, Piece))

    @property
    def structures(self) -> tuple[Structure, ...]:
        """What the pieces are, each once."""
        return tuple(dict.fromkeys(piece.structure for piece in self.pieces))

    def text(self) -> str:
        """What was compiled, each piece once."""
        return "\n".join(structure.text() for structure in self.structures)

    def curve(self) -> list[tuple[Piece, int, int]]:
        """The pieces in order, each with the bytes that are in use on a device while it runs, besides the variables and
        the feeds: of values that were made before, and of what it makes and needs by itself."""
        return done(self._steps.curve(self._copies))

    def temporaries(self) -> int:
        """Bytes that one run needs at most, besides the variables and the feeds."""
        return max((held + inside for _, held, inside in self.curve()), default=0)
