"""What a finished program does that it can hardly mean: updates that are lost, masks that stay, replicas that part.

Each graph is looked at once, callees first. What running it does is noted in terms of its inputs: which inputs, and
what else, an output depends on, as a set of bits. A caller puts the bits of what it binds in place of those of the
inputs. Nothing is computed on values, so where it cannot be known whether a program is right, it counts as right.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from popxl.analysis.inference import infer
from popxl.analysis.pieces import is_linear
from popxl.analysis.placement import crossing_updates
from popxl.analysis.replication import Report
from popxl.base.source import SourceLocation, warn_at
from popxl.context import user_frame
from popxl.core.aliasing import callees_first, storages
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import is_call, is_loop
from popxl.errors import (
    ContradictedStatementWarning,
    CrossingUpdateWarning,
    DriftingVariableWarning,
    LostUpdateWarning,
    PopxlWarning,
    RemoteSlotWarning,
    RepeatedSeedWarning,
)
from popxl.graph import Graph
from popxl.remote_buffer import RemoteBuffer

if TYPE_CHECKING:
    from popxl.ir import Ir

# What a value can depend on besides the inputs of its graph. Bits up to `_INPUTS` are for what replicas do not share.
_PER_RUN = 1  # something that is not the same in the next run
_INPUTS = 64
_UNKNOWN = _PER_RUN


def run_lints(main: Graph) -> None:
    """Warn about program lines that are probably mistakes. Needs a few passes over the ops.

    Whoever means it switches the warning off: see `popxl.errors.PopxlWarning`.
    """
    program = _Program(main)
    told: _Reported = defaultdict(dict)
    for run in program.runs.values():
        for op, t in run.lost:
            told[_LOST, op.source][f"`{t.path}` in {run.graph.title}"] = None
        for op, t in run.not_stored:
            told[_NOT_STORED, op.source][f"`{t.path}`"] = None
        for op, t in run.unused_updates:
            told[_NOT_KEPT, op.source][f"`{t.path}`"] = None
        for op in _named_anew(run.graph):
            told[_NAMED_ANEW, op.source][f"`{op.inputs[0].path}`"] = None
    for op in program.repeated():
        told[_REPEATED, op.source][op.graph.title] = None
    if main.ir.replication_factor > 1:
        report = infer(main.ir)
        for v, op, along in program.drifting(report, report.parted):
            told[_drifting(along), op.source][f"`{v.name}`"] = None
        for each in report.findings:
            if each.certain:  # which says what is contradicted
                text = each.message.replace("{", "{{").replace("}", "}}").removesuffix(".")
                told[Lint(ContradictedStatementWarning, f"{text} ({{line}})."), each.op.source][""] = None
    for found_in, doubt in _misplaced(main):
        told[doubt, SourceLocation.of(user_frame())][found_in] = None
    _warn(told)


def drifting(ir: Ir, report: Report) -> Iterator[tuple[bool, Variable, Op, tuple[str, ...], str]]:
    """Variables that drift apart on replicas that share them: whether that is certain, the variable, the last op to
    change it, the axes, and a text."""
    if report.parted or report.unsettled:
        program = _Program(ir.main_graph)
        for parted in (report.parted, report.unsettled):
            for v, op, axes in program.drifting(report, parted):
                text = _drifting(axes).text.replace(" ({line})", "").format(names=f"`{v.name}`")
                yield parted is report.parted, v, op, axes, text


def warn_of_crossing_updates(main: Graph) -> None:
    """Warn about variables that are read on one IPU and updated on another, where IPUs are devices."""
    told: _Reported = defaultdict(dict)
    for v, op in crossing_updates(main):
        told[_CROSSING, op.source][f"`{v.name}`"] = None
    _warn(told)


def _warn(told: _Reported) -> None:
    for (doubt, source), found in told.items():
        names = ", ".join([*found][:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        line = f"`{source.text}`, {source}" if source.text else str(source)
        warn_at(source, doubt.text.format(names=names, line=line), doubt.category)


class Lint(NamedTuple):
    category: type[PopxlWarning]
    text: str


_Reported = dict[tuple[Lint, SourceLocation], dict[str, None]]
"""By doubt and line, the names of what it is about."""


_LOST = Lint(
    LostUpdateWarning,
    "The change of {names} is lost ({line}): the graph takes it by value, and nothing reads it afterwards. Take it "
    "by reference: annotate the parameter with `popxl.TensorByRef`, or pass `by_ref=True`.",
)
_NOT_STORED = Lint(
    LostUpdateWarning,
    "What was loaded from a remote buffer, {names}, is changed ({line}), and the buffer keeps what it had: nothing "
    "reads or stores it afterwards. Store it, with `ops.remote_store` or a graph that does.",
)
_NOT_KEPT = Lint(
    LostUpdateWarning,
    "The change of {names} is lost ({line}): no variable keeps it, and nothing reads it afterwards. Change the "
    "variable itself, or its piece if it is in pieces; or write to it what was computed, with "
    "`ops.var_updates.copy_var_update_(variable, ...)`.",
)
_SAME_SLOT = Lint(
    RemoteSlotWarning,
    "Variables have the same slot of a remote buffer: {names}. One value fills it, and those of the others are lost. "
    "Give each a slot of its own: `offset`, or `entry` of `init_remote`.",
)
_NO_SLOT = Lint(
    RemoteSlotWarning,
    "Variables are in slots that their remote buffers do not have: {names}. Their values never reach the device. Make "
    "`entries` of the buffer larger.",
)
_NAMED_ANEW = Lint(
    LostUpdateWarning,
    "{names} stays as it is, and nothing reads what was computed ({line}): of these operators only `+=` works in "
    "place. Others make a new tensor, for the name on the left alone. Write `x += -y` for `x -= y`; or say what to "
    "write, with `ops.var_updates.copy_var_update_(x, ...)`.",
)
_REPEATED = Lint(
    RepeatedSeedWarning,
    "A dropout in {names} drops the same elements in every run ({line}): its seed comes from constants and from "
    "variables that the program does not change. Change the seed in each run (`seed += 1`), or load it from a stream.",
)
_CROSSING = Lint(
    CrossingUpdateWarning,
    "{names} is read on one IPU and changed on another ({line}), so that each run copies it there and back. Make the "
    "change within `with popxl.ipu(n):` of the IPU that reads it; the optimisers of popxl_addons do so by themselves.",
)


def _drifting(axes: tuple[str, ...]) -> Lint:
    """The lint of variables that drift apart along axes."""
    named = [name for name in axes if name.isidentifier() and name != "replicas"]
    group = repr(named[0]) if len(named) == 1 else repr(tuple(named))
    along, over = (f" along {group}", f"(..., group={group})") if named else ("", "")
    return Lint(
        DriftingVariableWarning,
        f"Replicas share {{names}}, and each changes it by a value of its own{along} ({{line}}), so that it drifts "
        f"apart. Reduce that value first, with `ops.collectives.replicated_all_reduce{over}`; or give each replica its "
        "own variable, with `replica_grouping=ir.replica_grouping(group_size=1)`.",
    )


def _misplaced(main: Graph) -> Iterator[tuple[str, Lint]]:
    """Remote variables without a slot of their own."""
    slots: dict[tuple[RemoteBuffer, int], list[str]] = defaultdict(list)
    for v in main.variables:
        buffer, entry = v.location_info.buffer, v.location_info.entry
        if buffer is not None:
            slots[buffer, entry].append(f"`{v.name}`")
    for (buffer, entry), names in slots.items():
        if entry >= buffer.entries:
            yield f"{', '.join(names)} (slot {entry} of {buffer!r})", _NO_SLOT
        elif len(names) > 1:
            yield f"{', '.join(names)} (slot {entry} of {buffer!r})", _SAME_SLOT


_OPERATOR = re.compile(r"(?:\*\*|[-*/@%&|])=(?!=)")
"""`x -= y` and the like: an op does not know which of `x -= y` and `x - y` it was, so its line is asked."""


def _named_anew(graph: Graph) -> Iterator[Op]:
    """Unread results of `x -= y` and similar ops, which create a new `x`."""
    if graph.gradient_of is not None:  # its ops are told by lines of the forward graph
        return
    read = {*graph.outputs}.union(*(op.inputs for op in graph.ops))
    for op in graph.ops:
        unread = op.outputs and op.inputs and read.isdisjoint(op.outputs)
        if unread and not (op.modified or op.kind.effect or op.called_graphs) and _OPERATOR.search(op.source.text):
            yield op


@dataclass
class _Run:
    """Effects of one graph run, in terms of graph inputs or main-graph variables.

    A set of bits says what a value depends on: from `_INPUTS` on, one for each of these.

    Attributes:
        held: what it is given, in order.
        outputs: what each output depends on.
        same: whose numbers the output has, only scaled, moved, converted or added up.
        contents: what the content of each of `held` depends on afterwards.
        copied: whose numbers it has then.
        writers: the op that changed it last; of a called graph, if that changed it.
        read: those whose first content is read otherwise than to be changed in place, or to leave the program.
        reduced: those that replicas combine, as they are.
        masks: ops that drop elements, and what their seed depends on.
        lost: inputs that are changed for nobody, with the op.
        loaded: the outputs that were loaded from a remote buffer, by number.
        not_stored: those that are changed for nobody, with the op.
        not_kept: constants and what is computed that are changed for nobody, with the op.
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
    masks: set[tuple[Op, int]] = field(default_factory=set)
    lost: list[tuple[Op, Tensor]] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)
    not_stored: list[tuple[Op, Tensor]] = field(default_factory=list)
    unused_updates: list[tuple[Op, Tensor]] = field(default_factory=list)


class _Program:
    """All graphs of a program, and lints that concern the whole program."""

    def __init__(self, main: Graph) -> None:
        self.main = main
        # Of a value in a remote buffer, or in pieces, it is not known what it is.
        self.variables = [v for v in main.variables if v.piece is None and not v.location_info.isRemote()]
        self.runs: dict[Graph, _Run] = {}
        for graph in callees_first(main):
            held = self.variables if graph is main else graph.inputs
            self.runs[graph] = _Walk(graph, held, self.runs).run
        self.run = self.runs[main]
        # What variables are before a run.
        self.first = [0 if writer is None else _PER_RUN for writer in self.run.writers]

    def repeated(self) -> Iterator[Op]:
        """Dropout ops that repeat their mask in every run of a stateful program."""
        if any(self.run.writers):
            for op, seed in sorted(self.run.masks, key=lambda mask: mask[0].id):
                again = op.graph.gradient_of is not None  # draws what was drawn
                if not again and not _bind(seed, self.first) & _PER_RUN:
                    yield op

    def drifting(
        self, report: Report, parted: Mapping[Variable, tuple[int, ...]]
    ) -> Iterator[tuple[Variable, Op, tuple[str, ...]]]:
        """Variables that drift apart on replicas sharing them, with the last op to change each, and the axes.

        Not those whose numbers are reduced, such as sums over micro-batches, nor those that nothing reads before they
        are written, nor means over micro-batches, which begin anew in each run.

        Args:
            report: the types of the program.
            parted: variables that a run leaves different, with the axes: those of the report.
        """
        if report.mesh is None or not parted:
            return
        shared = [v for v in self.main.variables if not v.location_info.isRemote()]
        run = _Walk(self.main, [v if v.piece is None else v.piece for v in shared], self.runs).run
        for i, (v, writer) in enumerate(zip(shared, run.writers, strict=True)):
            bit = 1 << (_INPUTS + i)
            meant = v.replica_grouping.group_size == 1 or v.retrieval_mode == "all_replicas"
            restarts = writer is not None and writer.kind.overwrites is not None and writer.kind.overwrites.restarts
            if v in parted and writer and not (meant or restarts) and run.read & bit and not run.reduced & bit:
                yield v, writer, tuple(report.mesh.names[axis] for axis in parted[v])


def _bind(bits: int, given: Sequence[int]) -> int:
    """Dependencies with input bits replaced by the dependencies of bound values."""
    found = bits & ((1 << _INPUTS) - 1)
    for i in _positions(bits):
        found |= given[i] if i < len(given) else _UNKNOWN
    return found


def _positions(bits: int) -> Iterator[int]:
    """Input numbers encoded in a bit set."""
    inputs = bits >> _INPUTS
    while inputs:
        lowest = inputs & -inputs
        yield lowest.bit_length() - 1
        inputs ^= lowest


class _Walk:
    """One pass through the ops of a graph, callees first.

    Args:
        graph: the graph.
        held: what it is given.
        runs: what is known of the graphs that it calls.
    """

    def __init__(self, graph: Graph, held: Sequence[Tensor], runs: dict[Graph, _Run]) -> None:
        self.runs = runs
        self.run = run = _Run(graph, held)
        self.made_of = storages(graph.ops)
        self.number = {t: i for i, t in enumerate(held)}
        self.content: dict[Tensor, int] = {t: 1 << (_INPUTS + i) for t, i in self.number.items()}
        self.same = dict(self.content) if graph.ir.replication_factor > 1 else {}  # it is asked about replicas only
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
        run.not_stored = [*self.not_stored()]
        run.unused_updates = [*self.unused_updates()]
        if graph.call_sites:
            run.lost = [*self.lost()]

    def stored(self, t: Tensor) -> tuple[Tensor, ...]:
        """Tensors that back a tensor's storage."""
        return self.made_of.get(t, (t,))

    def dependence(self, t: Tensor) -> int:
        """What a tensor depends on."""
        found = 0
        for s in self.stored(t):
            found |= self.content.get(s, 0 if s.producer is not None or isinstance(s, Constant) else _UNKNOWN)
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
                self.run.read |= self.content[s] & 1 << (_INPUTS + i)

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
        if kind.view is not None:  # a view is made when somebody looks through it
            return
        self.touches(op, op.modified)
        forgets = kind.overwrites is not None and kind.overwrites.forgets(op.attributes)
        alike = [t for t in op.inputs if t.nelms > 1] or op.inputs  # numbers scale what has many elements
        bits = same = 0
        for i, t in enumerate(op.inputs):
            bits |= 0 if forgets and i in op.modified else self.dependence(t)
        for t in alike:
            same |= self.copies(t)
        if kind.exchange:
            stream = op.attributes.get("stream")
            bits |= _UNKNOWN if stream is None else _PER_RUN
        combines = kind.between_replicas and op.attributes.get("group_size") != 1
        if combines and not ("op" in op.attributes and kind.exchanged(op.attributes) == "own"):  # declared the same
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
            contents = [(_bind(b, given), _bind(s, same)) for b, s in zip(run.contents, run.copied, strict=True)]
            results = [(_bind(b, given), _bind(s, same)) for b, s in zip(run.outputs, run.same, strict=True)]
            for i in op.modified:
                if (writer := run.writers[i]) is not None:
                    self.writes(op.inputs[i], *contents[i], writer, forgets=True)
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
                    (b | _bind(bits, given[first:last]), s | _bind(copied, same[first:last]))
                    for (b, s), bits, copied in zip(results, run.outputs, run.same, strict=False)
                ]
        for t, (bits, copied) in zip(op.outputs, results, strict=False):
            self.content[t], self.same[t] = bits, copied

    def enter(self, op: Op, run: _Run, first: int, given: Sequence[int], same: Sequence[int]) -> None:
        """Apply the effects of a called graph, whose inputs start at op input `first`."""
        for i in _positions(run.read):
            if 0 <= i + first < len(op.inputs):
                self.reads(op.inputs[i + first])
        self.run.reduced |= _bind(run.reduced, same) & ~_UNKNOWN
        self.run.masks |= {(mask, _bind(seed, given)) for mask, seed in run.masks}

    def loop(self, op: Op, given: list[int], same: list[int]) -> list[tuple[int, int]]:
        """Process a loop until its effects converge. Returns the dependencies of its results."""
        (loop,) = op.runs
        run, carried = self.runs[loop.graph], loop.carried
        own_inputs, own_outputs = loop.trait.own_inputs, loop.trait.own_outputs
        written = [i for i in op.modified if run.writers[i + own_inputs] is not None]
        self.touches(op, written)
        if not loop.iterations:
            return [*zip(given[:carried], same[:carried], strict=True)] + [(0, 0)] * (len(op.outputs) - carried)
        turn, copied = [_PER_RUN] * own_inputs + given, [0] * own_inputs + same
        while True:
            before = (turn, copied)
            turn, copied = [*turn], [*copied]
            for k in range(carried):
                # Each turn may get another one, so a seed is not the same for good: all of training may be one run.
                turn[own_inputs + k] |= _bind(run.outputs[own_outputs + k], before[0]) | _PER_RUN
                copied[own_inputs + k] |= _bind(run.same[own_outputs + k], before[1])
            for i in written:
                turn[i + own_inputs] |= _bind(run.contents[i + own_inputs], before[0]) | _PER_RUN
                copied[i + own_inputs] |= _bind(run.copied[i + own_inputs], before[1])
            if (turn, copied) == before:
                break
        self.enter(op, run, -own_inputs, turn, copied)
        for i in written:
            at = i + own_inputs
            self.writes(op.inputs[i], turn[at], copied[at], run.writers[at] or op, forgets=True)
        results = [*zip(turn, copied, strict=True)][own_inputs : own_inputs + carried]
        stacked = zip(run.outputs[own_outputs + carried :], run.same[own_outputs + carried :], strict=True)
        return results + [(_bind(b, turn), _bind(s, copied)) for b, s in stacked]

    def not_stored(self) -> Iterator[tuple[Op, Tensor]]:
        """Copies of slots whose last change goes unstored."""
        returned = {s for t in self.run.graph.outputs for s in self.stored(t)}
        for t in self.loaded:
            op, changed = self.last.get(t, (None, False))
            if op is not None and changed and t not in returned:
                yield op, t

    def unused_updates(self) -> Iterator[tuple[Op, Tensor]]:
        """Constants and local values whose last update in this graph goes unread.

        Not where graphs are called that do so: they may keep what only they need, such as the number of a slot.
        """
        if self.run.graph.gradient_of is not None:
            return
        kept = {s for t in self.run.graph.outputs for s in self.stored(t)}
        kept |= {t for v in self.run.graph.variables for t in (v, v.piece) if t is not None}
        for t, (op, changed) in self.last.items():
            if changed and not op.called_graphs and not (t in kept or t in self.number or t in self.loaded):
                yield op, t

    def lost(self) -> Iterator[tuple[Op, Tensor]]:
        """Inputs whose last change reaches no caller."""
        graph = self.run.graph
        returned = {s for t in graph.outputs for s in self.stored(t)}
        for i, t in enumerate(graph.inputs):
            op, changed = self.last.get(t, (None, False))
            if op is None or not changed or t.by_ref or t in returned:
                continue
            if all(i - len(graph.inputs) + len(site.inputs) not in site.modified for site in graph.call_sites):
                yield op, t
