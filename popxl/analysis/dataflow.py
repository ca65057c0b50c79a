"""Data-flow summary of each graph: dependencies of values on inputs; inputs that are read, changed and reduced.

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

    A bit set holds the dependencies of a value: from `INPUTS` on, one bit for each element of `storages`.

    Attributes:
        storages: inputs and variables of the graph, in order.
        outputs: dependencies of each output.
        sources: sources of each output's numbers, if they are only scaled, moved, converted or added up.
        contents: dependencies of the final content of each storage.
        content_sources: sources of its final numbers, as `sources`.
        writers: the last op that changes it, in called graphs too.
        initial_reads: storages whose initial content is read, other than by in-place changes and program outputs.
        reduced: storages that replicas reduce unchanged.
        gathered: storages whose shards replicas gather unchanged.
        masks: ops that drop elements, with the dependencies of their seed.
        loaded: indices of the outputs that are loaded from a remote buffer.
        unread_changes: changes without a reader, with the op and the tensor.
    """

    graph: Graph
    storages: Sequence[Tensor]
    outputs: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    content_sources: list[int] = field(default_factory=list)
    writers: list[Op | None] = field(default_factory=list)
    initial_reads: int = 0
    reduced: int = 0
    gathered: int = 0
    masks: set[tuple[Op, int]] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    unread_changes: list[tuple[UnreadChange, Op, Tensor]] = field(default_factory=list)


def bind_inputs(bits: int, bound: Sequence[int]) -> int:
    """Dependencies with input bits replaced by the dependencies of bound values."""
    if not bits:
        return 0
    inputs, bits_found = bits >> INPUTS, bits & ((1 << INPUTS) - 1)
    if inputs >> len(bound):  # some are unbound
        bits_found |= UNKNOWN_VALUE
    is_set = f"{inputs:b}"[::-1].encode().translate(_DIGITS)  # many times as fast as a loop over hundreds of bits
    return reduce(or_, compress(bound, is_set), bits_found)


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

    def __init__(self, graph: Graph, variables: Sequence[Tensor], runs: dict[Graph, GraphEffects]) -> None:
        self.runs = runs
        self.run = run = GraphEffects(graph, variables)
        self.storages_of = storages(graph.ops)
        self.number = {t: i for i, t in enumerate(variables)}
        self.content: dict[Tensor, int] = {t: 1 << (INPUTS + i) for t, i in self.number.items()}
        self.sources = dict(self.content) if graph.ir.replication_factor > 1 else {}  # for programs with replicas
        self.writer: dict[Tensor, Op] = {}
        self.last: dict[Tensor, tuple[Op, bool]] = {}  # last op on a storage, with a flag for a change
        self.loaded: dict[Tensor, None] = {}  # copies of slots of remote buffers
        for op in graph.ops:
            if op.called_graphs:
                self.call(op)
            else:
                for part in op.parts:
                    self.plain(part)
        run.outputs = [self.dependence(t) for t in graph.outputs]
        run.sources = [self.sources_of(t) for t in graph.outputs]
        run.contents = [self.content[t] for t in variables]
        run.content_sources = [self.sources.get(t, 0) for t in variables]
        run.writers = [self.writer.get(t) for t in variables]
        run.loaded = {i for i, t in enumerate(graph.outputs) if t in self.loaded}
        run.unread_changes = [*self.unread_changes()]

    def stored(self, t: Tensor) -> tuple[Tensor, ...]:
        """Tensors that back a tensor's storage."""
        return self.storages_of.get(t, (t,))

    def dependence(self, t: Tensor) -> int:
        """Dependencies of a tensor."""
        bits = 0
        for s in self.stored(t):
            bits |= self.content.get(s, 0 if s.producer is not None or isinstance(s, Constant) else UNKNOWN_VALUE)
        return bits

    def sources_of(self, t: Tensor) -> int:
        """Sources of a tensor's numbers."""
        bits = 0
        for s in self.stored(t):
            bits |= self.sources.get(s, 0)
        return bits

    def record_read(self, t: Tensor) -> None:
        """Record a read of a tensor's initial content."""
        for s in self.stored(t):
            i = self.number.get(s)
            if i is not None:
                self.run.initial_reads |= self.content[s] & 1 << (INPUTS + i)

    def record_results(self, op: Op, bits: int, sources: int) -> None:
        """Record the results of an op, apart from those that alias operands."""
        for t in op.outputs:
            if self.stored(t) == (t,):
                self.content[t], self.sources[t] = bits, sources

    def record_write(self, t: Tensor, bits: int, sources: int, writer: Op, overwrites: bool) -> None:
        """Record an in-place change of a tensor."""
        for s in self.stored(t):
            self.content[s] = bits if overwrites and s is t.origin else self.content.get(s, 0) | bits
            self.sources[s] = self.sources.get(s, 0) | sources
            self.writer[s] = writer

    def record_touch(self, op: Op, changed: Iterable[int]) -> None:
        """Record the operands that an op reads and changes."""
        for i, t in enumerate(op.inputs):
            for s in self.stored(t):
                self.last[s] = (op, i in changed)

    def plain(self, op: Op) -> None:
        """Process an op without called graphs."""
        kind = op.kind
        if kind.view is not None:  # readers resolve views
            return
        self.record_touch(op, op.modified)
        overwrites = kind.overwrites is not None and kind.overwrites.forgets(op.attributes)
        full_size = [t for t in op.inputs if t.nelms > 1] or op.inputs  # scalars only scale larger operands
        bits = sources = 0
        for i, t in enumerate(op.inputs):
            bits |= 0 if overwrites and i in op.modified else self.dependence(t)
        for t in full_size:
            sources |= self.sources_of(t)
        if kind.exchange:
            stream = op.attributes.get("stream")
            bits |= UNKNOWN_VALUE if stream is None else PER_RUN
        combines = kind.between_replicas and op.attributes.get("group_size") != 1
        is_unmixed = "op" in op.attributes and kind.exchanged(op.attributes) == "own"  # declared the same
        if combines and "op" not in op.attributes and op.inputs and op.inputs[0].meta_shape:
            self.run.gathered |= sources
        elif combines and not is_unmixed:
            self.run.reduced |= sources
        if kind.drops is not None and op.attributes[kind.drops.ratio]:
            self.run.masks.add((op, self.dependence(op.inputs[op.operand_names().index(kind.drops.seed)])))
        for i, t in enumerate(op.inputs):
            if i in op.modified:
                self.record_write(t, bits, sources, op, overwrites)
            elif not kind.effect:
                self.record_read(t)
        if isinstance(op.attributes.get(kind.exchange), RemoteBuffer):
            self.loaded |= dict.fromkeys(op.outputs)
        keeps_size = {t.nelms for t in op.outputs} in ({t.nelms for t in full_size}, {sum(t.nelms for t in full_size)})
        self.record_results(op, bits, sources if sources and keeps_size and is_linear(op) else 0)

    def call(self, op: Op) -> None:
        """Process an op with called graphs."""
        dependencies = [self.dependence(t) for t in op.inputs]
        sources = [self.sources_of(t) for t in op.inputs]
        if is_call(op):
            run = self.runs[op.called_graphs[0]]
            self.enter(op, run, 0, dependencies, sources)
            self.record_touch(op, [i for i in op.modified if run.writers[i] is not None])
            self.loaded |= {op.outputs[i]: None for i in sorted(run.loaded)}
            results = [
                (bind_inputs(b, dependencies), bind_inputs(s, sources))
                for b, s in zip(run.outputs, run.sources, strict=True)
            ]
            contents = {
                i: (bind_inputs(run.contents[i], dependencies), bind_inputs(run.content_sources[i], sources))
                for i in op.modified
            }
            for i, (bits, copied) in contents.items():
                if (writer := run.writers[i]) is not None:
                    self.record_write(op.inputs[i], bits, copied, writer, overwrites=True)
        elif is_loop(op):
            results = self.loop(op, dependencies, sources)
        else:
            self.record_touch(op, ())
            self.record_read(op.inputs[0])
            results = [(dependencies[0], 0)] * len(op.outputs)
            for branch in op.runs:
                run, first = self.runs[branch.graph], branch.first
                last = first + len(branch.inputs)
                self.enter(op, run, first, dependencies[first:last], sources[first:last])
                results = [
                    (b | bind_inputs(bits, dependencies[first:last]), s | bind_inputs(copied, sources[first:last]))
                    for (b, s), bits, copied in zip(results, run.outputs, run.sources, strict=False)
                ]
        for t, (bits, copied) in zip(op.outputs, results, strict=False):
            self.content[t], self.sources[t] = bits, copied

    def enter(self, op: Op, run: GraphEffects, first: int, dependencies: Sequence[int], sources: Sequence[int]) -> None:
        """Apply the effects of a called graph, whose inputs start at op input `first`."""
        for i in _input_numbers(run.initial_reads):
            if 0 <= i + first < len(op.inputs):
                self.record_read(op.inputs[i + first])
        self.run.reduced |= bind_inputs(run.reduced, sources) & ~UNKNOWN_VALUE
        self.run.gathered |= bind_inputs(run.gathered, sources) & ~UNKNOWN_VALUE
        self.run.masks |= {(mask, bind_inputs(seed, dependencies)) for mask, seed in run.masks}

    def loop(self, op: Op, dependencies: list[int], sources: list[int]) -> list[tuple[int, int]]:
        """Process a loop until its effects converge. Returns the dependencies of its results."""
        (loop,) = op.runs
        run, carried = self.runs[loop.graph], loop.carried
        own_inputs, own_outputs = loop.trait.own_inputs, loop.trait.own_outputs
        updated = [i for i in op.modified if run.writers[i + own_inputs] is not None]
        self.record_touch(op, updated)
        if not loop.iterations:
            return [*zip(dependencies[:carried], sources[:carried], strict=True)] + [(0, 0)] * (
                len(op.outputs) - carried
            )
        bound, copied = [PER_RUN] * own_inputs + dependencies, [0] * own_inputs + sources
        while True:
            previous = (bound, copied)
            bound, copied = [*bound], [*copied]
            for k in range(carried):
                # Each iteration may bind another one, so a seed is not constant: a whole training may be one run.
                bound[own_inputs + k] |= bind_inputs(run.outputs[own_outputs + k], previous[0]) | PER_RUN
                copied[own_inputs + k] |= bind_inputs(run.sources[own_outputs + k], previous[1])
            for i in updated:
                bound[i + own_inputs] |= bind_inputs(run.contents[i + own_inputs], previous[0]) | PER_RUN
                copied[i + own_inputs] |= bind_inputs(run.content_sources[i + own_inputs], previous[1])
            if (bound, copied) == previous:
                break
        self.enter(op, run, -own_inputs, bound, copied)
        for i in updated:
            position = i + own_inputs
            self.record_write(
                op.inputs[i], bound[position], copied[position], run.writers[position] or op, overwrites=True
            )
        results = [*zip(bound, copied, strict=True)][own_inputs : own_inputs + carried]
        stacked = zip(run.outputs[own_outputs + carried :], run.sources[own_outputs + carried :], strict=True)
        return results + [(bind_inputs(b, bound), bind_inputs(s, copied)) for b, s in stacked]

    def unread_changes(self) -> Iterator[tuple[UnreadChange, Op, Tensor]]:
        """Last changes of storages without a reader.

        Local values exclude those of called graphs, which may change a value for their own use, such as a slot number.
        """
        graph = self.run.graph
        live = {s for t in graph.outputs for s in self.stored(t)}
        live |= {t for v in graph.variables for t in (v, v.piece) if t is not None}
        for t, (op, changed) in self.last.items():
            if not changed or t in live:
                continue
            if t in self.loaded:
                yield "loaded", op, t
            elif t in self.number:
                from_end = len(graph.inputs) - self.number[t]
                is_returned_by_caller = any(len(site.inputs) - from_end in site.modified for site in graph.call_sites)
                if graph.call_sites and not t.by_ref and not is_returned_by_caller:
                    yield "input", op, t
            elif not op.called_graphs and graph.gradient_of is None:
                yield "local", op, t
