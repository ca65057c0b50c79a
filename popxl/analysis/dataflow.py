"""Effects of a run of each graph: the inputs that values depend on; the inputs that are read, changed and reduced.

Each graph is analysed once, callees first. Results are bit sets over the graph's inputs; a caller replaces these bits
by the bits of the tensors that it binds. No values are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from operator import or_
from typing import Literal

from popxl.analysis.replicas.op_effects import is_linear
from popxl.core.aliasing import storages
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call, is_loop
from popxl.graph import Graph
from popxl.remote_buffer import RemoteBuffer

# Dependencies of a value besides the inputs of its graph. Bits up to `INPUTS` are for values that replicas do not
# share.
PER_RUN = 1  # something that is not the same in the next run
INPUTS = 64
UNKNOWN_VALUE = PER_RUN

UnreadChange = Literal["input", "loaded", "local"]
"""Change of an input passed by value, of a copy of a remote buffer's slot, or of a constant or computed value."""


@dataclass
class GraphEffects:
    """Effects of one graph run, in terms of graph inputs or main-graph variables.

    A bit set holds the dependencies of a value: from `INPUTS` on, one bit for each element of `held`.

    Attributes:
        held: inputs and variables of the graph, in order.
        outputs: dependencies of each output.
        same: sources of each output's numbers, if they are only scaled, moved, converted or added up.
        contents: dependencies of the content of each of `held` after the run.
        copied: sources of that content's numbers, as for `same`.
        writers: the op that changed it last; of a called graph, if that changed it.
        read: elements of `held` whose first content is read for more than an in-place change or an output of the
            program.
        reduced: elements of `held` that replicas combine unchanged.
        gathered: elements of `held` whose shards replicas gather unchanged.
        masks: ops that drop elements, with the dependencies of their seed.
        loaded: the outputs that were loaded from a remote buffer, by number.
        unread_changes: changes that nothing reads, stores or keeps, with the op and the tensor.
    """

    graph: Graph
    held: Sequence[Tensor]
    outputs: list[int] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    writers: list[Op | None] = field(default_factory=list)
    read: int = 0
    reduced: int = 0
    gathered: int = 0
    masks: set[tuple[Op, int]] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    unread_changes: list[tuple[UnreadChange, Op, Tensor]] = field(default_factory=list)


def bind_inputs(bits: int, given: Sequence[int]) -> int:
    """Dependencies with input bits replaced by the dependencies of bound values."""
    if not bits:
        return 0
    inputs, found = bits >> INPUTS, bits & ((1 << INPUTS) - 1)
    if inputs >> len(given):  # nothing is bound to some of them
        found |= UNKNOWN_VALUE
    is_set = f"{inputs:b}"[::-1].encode().translate(_DIGITS)  # many times as fast as a loop over hundreds of bits
    return reduce(or_, compress(given, is_set), found)


_DIGITS = bytes.maketrans(b"01", bytes([0, 1]))


def _input_numbers(bits: int) -> Iterator[int]:
    """Input numbers encoded in a bit set."""
    inputs = bits >> INPUTS
    while inputs:
        lowest = inputs & -inputs
        yield lowest.bit_length() - 1
        inputs ^= lowest


class EffectsPass:
    """One pass through the ops of a graph, callees first."""

    def __init__(self, graph: Graph, held: Sequence[Tensor], runs: dict[Graph, GraphEffects]) -> None:
        self.runs = runs
        self.run = run = GraphEffects(graph, held)
        self.made_of = storages(graph.ops)
        self.number = {t: i for i, t in enumerate(held)}
        self.content: dict[Tensor, int] = {t: 1 << (INPUTS + i) for t, i in self.number.items()}
        self.same = dict(self.content) if graph.ir.replication_factor > 1 else {}  # for programs with replicas
        self.writer: dict[Tensor, Op] = {}
        self.last: dict[Tensor, tuple[Op, bool]] = {}  # the op that touched a storage last, and whether it changed it
        self.loaded: dict[Tensor, None] = {}  # copies of slots of remote buffers
        for op in graph.ops:
            if op.called_graphs:
                self.call(op)
            else:
                for part in op.parts:
                    self.plain(part)
        run.outputs = [self.dependence(t) for t in graph.outputs]
        run.same = [self.copies(t) for t in graph.outputs]
        run.contents = [self.content[t] for t in held]
        run.copied = [self.same.get(t, 0) for t in held]
        run.writers = [self.writer.get(t) for t in held]
        run.loaded = {i for i, t in enumerate(graph.outputs) if t in self.loaded}
        run.unread_changes = [*self.unread_changes()]

    def stored(self, t: Tensor) -> tuple[Tensor, ...]:
        """Tensors that back a tensor's storage."""
        return self.made_of.get(t, (t,))

    def dependence(self, t: Tensor) -> int:
        """What a tensor depends on."""
        found = 0
        for s in self.stored(t):
            found |= self.content.get(s, 0 if s.producer is not None or isinstance(s, Constant) else UNKNOWN_VALUE)
        return found

    def copies(self, t: Tensor) -> int:
        """Whose numbers a tensor has."""
        found = 0
        for s in self.stored(t):
            found |= self.same.get(s, 0)
        return found

    def reads(self, t: Tensor) -> None:
        """Note that what a tensor holds first is read."""
        for s in self.stored(t):
            i = self.number.get(s)
            if i is not None:
                self.run.read |= self.content[s] & 1 << (INPUTS + i)

    def makes(self, op: Op, bits: int, same: int) -> None:
        """Results of an op with storage separate from its operands."""
        for t in op.outputs:
            if self.stored(t) == (t,):
                self.content[t], self.same[t] = bits, same

    def writes(self, t: Tensor, bits: int, same: int, writer: Op, forgets: bool) -> None:
        """Record an in-place change of a tensor."""
        for s in self.stored(t):
            self.content[s] = bits if forgets and s is t.origin else self.content.get(s, 0) | bits
            self.same[s] = self.same.get(s, 0) | same
            self.writer[s] = writer

    def touches(self, op: Op, changed: Iterable[int]) -> None:
        """Record the operands that an op reads and changes."""
        for i, t in enumerate(op.inputs):
            for s in self.stored(t):
                self.last[s] = (op, i in changed)

    def plain(self, op: Op) -> None:
        """Process an op without called graphs."""
        kind = op.kind
        if kind.view is not None:  # a view is made when a reader looks through it
            return
        self.touches(op, op.modified)
        forgets = kind.overwrites is not None and kind.overwrites.forgets(op.attributes)
        alike = [t for t in op.inputs if t.nelms > 1] or op.inputs  # scalars only scale larger operands
        bits = same = 0
        for i, t in enumerate(op.inputs):
            bits |= 0 if forgets and i in op.modified else self.dependence(t)
        for t in alike:
            same |= self.copies(t)
        if kind.exchange:
            stream = op.attributes.get("stream")
            bits |= UNKNOWN_VALUE if stream is None else PER_RUN
        combines = kind.between_replicas and op.attributes.get("group_size") != 1
        own = "op" in op.attributes and kind.exchanged(op.attributes) == "own"  # declared the same
        if combines and "op" not in op.attributes and op.inputs and op.inputs[0].meta_shape:
            self.run.gathered |= same
        elif combines and not own:
            self.run.reduced |= same
        if kind.drops is not None and op.attributes[kind.drops.ratio]:
            self.run.masks.add((op, self.dependence(op.inputs[op.operand_names().index(kind.drops.seed)])))
        for i, t in enumerate(op.inputs):
            if i in op.modified:
                self.writes(t, bits, same, op, forgets)
            elif not kind.effect:
                self.reads(t)
        if isinstance(op.attributes.get(kind.exchange), RemoteBuffer):
            self.loaded |= dict.fromkeys(op.outputs)
        as_many = {t.nelms for t in op.outputs} in ({t.nelms for t in alike}, {sum(t.nelms for t in alike)})
        self.makes(op, bits, same if same and as_many and is_linear(op) else 0)

    def call(self, op: Op) -> None:
        """An op that runs graphs."""
        given = [self.dependence(t) for t in op.inputs]
        same = [self.copies(t) for t in op.inputs]
        if is_call(op):
            run = self.runs[op.called_graphs[0]]
            self.enter(op, run, 0, given, same)
            self.touches(op, [i for i in op.modified if run.writers[i] is not None])
            self.loaded |= {op.outputs[i]: None for i in sorted(run.loaded)}
            results = [
                (bind_inputs(b, given), bind_inputs(s, same)) for b, s in zip(run.outputs, run.same, strict=True)
            ]
            contents = {i: (bind_inputs(run.contents[i], given), bind_inputs(run.copied[i], same)) for i in op.modified}
            for i, (bits, copied) in contents.items():
                if (writer := run.writers[i]) is not None:
                    self.writes(op.inputs[i], bits, copied, writer, forgets=True)
        elif is_loop(op):
            results = self.loop(op, given, same)
        else:
            self.touches(op, ())
            self.reads(op.inputs[0])
            results = [(given[0], 0)] * len(op.outputs)
            for branch in op.runs:
                run, first = self.runs[branch.graph], branch.first
                last = first + len(branch.inputs)
                self.enter(op, run, first, given[first:last], same[first:last])
                results = [
                    (b | bind_inputs(bits, given[first:last]), s | bind_inputs(copied, same[first:last]))
                    for (b, s), bits, copied in zip(results, run.outputs, run.same, strict=False)
                ]
        for t, (bits, copied) in zip(op.outputs, results, strict=False):
            self.content[t], self.same[t] = bits, copied

    def enter(self, op: Op, run: GraphEffects, first: int, given: Sequence[int], same: Sequence[int]) -> None:
        """Apply the effects of a called graph, whose inputs start at op input `first`."""
        for i in _input_numbers(run.read):
            if 0 <= i + first < len(op.inputs):
                self.reads(op.inputs[i + first])
        self.run.reduced |= bind_inputs(run.reduced, same) & ~UNKNOWN_VALUE
        self.run.gathered |= bind_inputs(run.gathered, same) & ~UNKNOWN_VALUE
        self.run.masks |= {(mask, bind_inputs(seed, given)) for mask, seed in run.masks}

    def loop(self, op: Op, given: list[int], same: list[int]) -> list[tuple[int, int]]:
        """Process a loop until its effects converge. Returns the dependencies of its results."""
        (loop,) = op.runs
        run, carried = self.runs[loop.graph], loop.carried
        own_inputs, own_outputs = loop.trait.own_inputs, loop.trait.own_outputs
        written = [i for i in op.modified if run.writers[i + own_inputs] is not None]
        self.touches(op, written)
        if not loop.iterations:
            return [*zip(given[:carried], same[:carried], strict=True)] + [(0, 0)] * (len(op.outputs) - carried)
        bound, copied = [PER_RUN] * own_inputs + given, [0] * own_inputs + same
        while True:
            before = (bound, copied)
            bound, copied = [*bound], [*copied]
            for k in range(carried):
                # Each iteration may bind another one, so a seed is not constant: a whole training may be one run.
                bound[own_inputs + k] |= bind_inputs(run.outputs[own_outputs + k], before[0]) | PER_RUN
                copied[own_inputs + k] |= bind_inputs(run.same[own_outputs + k], before[1])
            for i in written:
                bound[i + own_inputs] |= bind_inputs(run.contents[i + own_inputs], before[0]) | PER_RUN
                copied[i + own_inputs] |= bind_inputs(run.copied[i + own_inputs], before[1])
            if (bound, copied) == before:
                break
        self.enter(op, run, -own_inputs, bound, copied)
        for i in written:
            at = i + own_inputs
            self.writes(op.inputs[i], bound[at], copied[at], run.writers[at] or op, forgets=True)
        results = [*zip(bound, copied, strict=True)][own_inputs : own_inputs + carried]
        stacked = zip(run.outputs[own_outputs + carried :], run.same[own_outputs + carried :], strict=True)
        return results + [(bind_inputs(b, bound), bind_inputs(s, copied)) for b, s in stacked]

    def unread_changes(self) -> Iterator[tuple[UnreadChange, Op, Tensor]]:
        """Last changes of storages that nothing reads, stores or keeps.

        Local values exclude those of called graphs, which may keep a value for themselves, such as the number of a
        slot.
        """
        graph = self.run.graph
        kept = {s for t in graph.outputs for s in self.stored(t)}
        kept |= {t for v in graph.variables for t in (v, v.piece) if t is not None}
        for t, (op, changed) in self.last.items():
            if not changed or t in kept:
                continue
            if t in self.loaded:
                yield "loaded", op, t
            elif t in self.number:
                behind = len(graph.inputs) - self.number[t]
                is_passed_on = any(len(site.inputs) - behind in site.modified for site in graph.call_sites)
                if graph.call_sites and not t.by_ref and not is_passed_on:
                    yield "input", op, t
            elif not op.called_graphs and graph.gradient_of is None:
                yield "local", op, t
