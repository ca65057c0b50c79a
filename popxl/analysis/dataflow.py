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
from typing import Literal, NamedTuple

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


class Flow(NamedTuple):
    """Origins of a value, as two bit sets.

    From `INPUTS` on, a bit set has one bit for each input or variable of the graph.

    Attributes:
        depends: all that the value depends on.
        sources: sources of its numbers, if they are only scaled, moved, converted or added up; in programs with
            replicas.
    """

    depends: int = 0
    sources: int = 0

    def __or__(self, other: Flow) -> Flow:
        return Flow(self.depends | other.depends, self.sources | other.sources)


@dataclass
class GraphEffects:
    """Effects of one graph run, in terms of graph inputs or main-graph variables.

    Attributes:
        outputs: origins of each output.
        contents: origins of the final content of each input or variable.
        writers: the last op that changes it, in called graphs too.
        initial_reads: inputs and variables whose initial content is read, other than by in-place changes and program
            outputs.
        reduced: inputs and variables that replicas reduce unchanged.
        gathered: inputs and variables whose shards replicas gather unchanged.
        masks: ops that drop elements, with the dependencies of their seed.
        loaded: indices of the outputs that are loaded from a remote buffer.
        unread_changes: changes without a reader, with the op and the tensor.
    """

    graph: Graph
    outputs: list[Flow] = field(default_factory=list)
    contents: list[Flow] = field(default_factory=list)
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


class _Binding:
    """Values that are bound to the inputs of a called graph, in order, with their origins in the caller."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self.depends, self.sources = [flow.depends for flow in flows], [flow.sources for flow in flows]

    def flow(self, inner: Flow) -> Flow:
        """Origins in the caller of a value with these origins in the graph."""
        return Flow(bind_inputs(inner.depends, self.depends), bind_inputs(inner.sources, self.sources))


def _unwritten(t: Tensor) -> Flow:
    """Origins of a storage that is neither an input nor written by any op."""
    return Flow() if t.producer is not None or isinstance(t, Constant) else Flow(UNKNOWN_VALUE)


class EffectsPass:
    """One pass through the ops of a graph, callees first."""

    def __init__(self, graph: Graph, variables: Sequence[Tensor], runs: dict[Graph, GraphEffects]) -> None:
        self.runs = runs
        self.run = run = GraphEffects(graph)
        self.storages_of = storages(graph.ops)
        self.number = {t: i for i, t in enumerate(variables)}
        bits = {t: 1 << (INPUTS + i) for t, i in self.number.items()}
        has_replicas = graph.ir.replication_factor > 1
        self.content = {t: Flow(bit, bit if has_replicas else 0) for t, bit in bits.items()}
        self.writer: dict[Tensor, Op] = {}
        self.last: dict[Tensor, tuple[Op, bool]] = {}  # last op on a storage, with a flag for a change
        self.loaded: dict[Tensor, None] = {}  # copies of slots of remote buffers
        for op in graph.ops:
            if op.called_graphs:
                self.call(op)
            else:
                for part in op.parts:
                    self.plain(part)
        run.outputs = [self.flow(t) for t in graph.outputs]
        run.contents = [self.content[t] for t in variables]
        run.writers = [self.writer.get(t) for t in variables]
        run.loaded = {i for i, t in enumerate(graph.outputs) if t in self.loaded}
        run.unread_changes = [*self.unread_changes()]

    def stored(self, t: Tensor) -> tuple[Tensor, ...]:
        """Tensors that back a tensor's storage."""
        return self.storages_of.get(t, (t,))

    def flow(self, t: Tensor) -> Flow:
        """Origins of a tensor."""
        flows = [self.content[s] if s in self.content else _unwritten(s) for s in self.stored(t)]
        return flows[0] if len(flows) == 1 else reduce(or_, flows, Flow())

    def record_read(self, t: Tensor) -> None:
        """Record a read of a tensor's initial content."""
        for s in self.stored(t):
            i = self.number.get(s)
            if i is not None:
                self.run.initial_reads |= self.content[s].depends & 1 << (INPUTS + i)

    def record_write(self, t: Tensor, flow: Flow, writer: Op, overwrites: bool) -> None:
        """Record an in-place change of a tensor."""
        for s in self.stored(t):
            before = self.content.get(s, Flow())
            kept = 0 if overwrites and s is t.origin else before.depends
            self.content[s] = Flow(kept | flow.depends, before.sources | flow.sources)
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
        flows = {t: self.flow(t) for t in op.inputs}
        used = [t for i, t in enumerate(op.inputs) if not (overwrites and i in op.modified)]
        bits = reduce(or_, [flows[t].depends for t in used], 0)
        sources = reduce(or_, [flows[t].sources for t in full_size], 0)
        if kind.exchange:
            bits |= UNKNOWN_VALUE if op.attributes.get("stream") is None else PER_RUN
        if kind.between_replicas and op.attributes.get("group_size") != 1:
            self.record_collective(op, sources)
        if kind.drops is not None and op.attributes[kind.drops.ratio]:
            self.run.masks.add((op, flows[op.inputs[op.operand_names().index(kind.drops.seed)]].depends))
        for i, t in enumerate(op.inputs):
            if i in op.modified:
                self.record_write(t, Flow(bits, sources), op, overwrites)
            elif not kind.effect:
                self.record_read(t)
        if isinstance(op.attributes.get(kind.exchange), RemoteBuffer):
            self.loaded |= dict.fromkeys(op.outputs)
        keeps_size = {t.nelms for t in op.outputs} in ({t.nelms for t in full_size}, {sum(t.nelms for t in full_size)})
        results = Flow(bits, sources if sources and keeps_size and is_linear(op) else 0)
        self.content |= {t: results for t in op.outputs if self.stored(t) == (t,)}  # without aliases of operands

    def record_collective(self, op: Op, sources: int) -> None:
        """Record what replicas gather or reduce."""
        if "op" not in op.attributes and op.inputs and op.inputs[0].meta_shape:
            self.run.gathered |= sources
        elif "op" not in op.attributes or op.kind.exchanged(op.attributes) != "own":  # the latter: declared the same
            self.run.reduced |= sources

    def call(self, op: Op) -> None:
        """Process an op with called graphs."""
        flows = [self.flow(t) for t in op.inputs]
        if is_call(op):
            run, binding = self.runs[op.called_graphs[0]], _Binding(flows)
            self.enter(op, run, 0, binding)
            self.record_touch(op, [i for i in op.modified if run.writers[i] is not None])
            self.loaded |= {op.outputs[i]: None for i in sorted(run.loaded)}
            results = list(map(binding.flow, run.outputs))
            for i in op.modified:
                if (writer := run.writers[i]) is not None:
                    self.record_write(op.inputs[i], binding.flow(run.contents[i]), writer, overwrites=True)
        elif is_loop(op):
            results = self.loop(op, flows)
        else:
            self.record_touch(op, ())
            self.record_read(op.inputs[0])
            results = [Flow(flows[0].depends)] * len(op.outputs)
            for branch in op.runs:
                run = self.runs[branch.graph]
                binding = _Binding(flows[branch.first : branch.first + len(branch.inputs)])
                self.enter(op, run, branch.first, binding)
                results = [flow | binding.flow(inner) for flow, inner in zip(results, run.outputs, strict=False)]
        self.content |= zip(op.outputs, results, strict=False)

    def enter(self, op: Op, run: GraphEffects, first: int, binding: _Binding) -> None:
        """Apply the effects of a called graph, whose inputs start at op input `first`."""
        for i in _input_numbers(run.initial_reads):
            if 0 <= i + first < len(op.inputs):
                self.record_read(op.inputs[i + first])
        self.run.reduced |= bind_inputs(run.reduced, binding.sources) & ~UNKNOWN_VALUE
        self.run.gathered |= bind_inputs(run.gathered, binding.sources) & ~UNKNOWN_VALUE
        self.run.masks |= {(mask, bind_inputs(seed, binding.depends)) for mask, seed in run.masks}

    def loop(self, op: Op, flows: list[Flow]) -> list[Flow]:
        """Process a loop until its effects converge. Returns the origins of its results."""
        (loop,) = op.runs
        run, carried = self.runs[loop.graph], loop.carried
        own_inputs, own_outputs = loop.trait.own_inputs, loop.trait.own_outputs
        updated = [i for i in op.modified if run.writers[i + own_inputs] is not None]
        self.record_touch(op, updated)
        if not loop.iterations:
            return flows[:carried] + [Flow()] * (len(op.outputs) - carried)
        # Each iteration may bind another one, so a seed is not constant: a whole training may be one run.
        after = [(own_inputs + k, run.outputs[own_outputs + k]) for k in range(carried)]
        after += [(own_inputs + i, run.contents[own_inputs + i]) for i in updated]
        bound = [Flow(PER_RUN)] * own_inputs + flows
        while True:
            previous, binding = bound, _Binding(bound)
            bound = [*bound]
            for position, flow in after:
                bound[position] |= binding.flow(flow) | Flow(PER_RUN)
            if bound == previous:
                break
        self.enter(op, run, -own_inputs, binding)
        for i in updated:
            position = own_inputs + i
            self.record_write(op.inputs[i], bound[position], run.writers[position] or op, overwrites=True)
        stacked = run.outputs[own_outputs + carried :]
        return bound[own_inputs : own_inputs + carried] + list(map(binding.flow, stacked))

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
