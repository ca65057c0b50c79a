"""What replicas have in common: for each value of a program, along each axis of its mesh, how replicas hold it.

A value is *replicated* along an axis if it is the same on all replicas that differ along it only; *sharded* if they
have pieces of one value, or what was made of such pieces; *partial* if the sum of what they have is the value; and
*varying* if each has its own. These are inferred by one pass over the ops, callees at their calls, each graph once for
what it is given. What an op does to them follows from its operands, except for contractions and ops between replicas,
whose traits say it. Nothing is computed on values: where it is not known what an op makes, it is *unknown*, and nothing
is found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from popxl.analysis.mesh import Mesh, mesh_of
from popxl.core.aliasing import lowered_ops, reachable, storages
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import Run, is_call, is_loop
from popxl.remote_buffer import RemoteBuffer

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph
    from popxl.ir import Ir


class Replication(IntEnum):
    """How replicas hold a value along an axis. What is made of two values is the larger of theirs, in general.

    Attributes:
        GIVEN: the same on all, by the text of the program: constants, and single numbers that the host feeds.
        REPLICATED: the same on all.
        SHARDED: pieces of one value, or what was made of them.
        PARTIAL: terms of a sum, which is the value.
        VARYING: each has its own.
        UNKNOWN: what an op does is not known.
    """

    GIVEN = 0
    REPLICATED = 1
    SHARDED = 2
    PARTIAL = 3
    VARYING = 4
    UNKNOWN = 5


GIVEN, REPLICATED, SHARDED, PARTIAL, VARYING, UNKNOWN = Replication

Along = tuple[Replication, int | None]
"""How a value is held along one axis. With pieces goes the dimension that they are along, where it is known: -1 for
pieces of a flattened value. With what is replicated or varying goes 1 if a reduction along the axis has gone into it:
what differs then may be meant, as the program has reduced what it wants to be the same; and 2, if that has summed what
was the same already."""

Held = tuple[Along, ...]
"""The same for each axis of the mesh: the type of a value."""

FLAT = -1
REPEATED = "repeated reduction"
_GIVEN: Along = (GIVEN, None)
_SAME: Along = (REPLICATED, None)
_REDUCED: Along = (REPLICATED, 1)
_REPEATED: Along = (REPLICATED, 2)
_BY_REDUCED = (_REDUCED, _REPEATED)
_OWN: Along = (VARYING, None)
_UNKNOWN: Along = (UNKNOWN, None)


@dataclass(frozen=True, eq=False)
class Finding:
    """Something that a program can hardly mean.

    Attributes:
        category: in short what it is, such as `"repeated reduction"`.
        certain: whether numbers are wrong on any reading of the program.
        op: the op that does it.
        tensor: the path of the tensor that it is about.
        axes: the names of the axes.
        message: what is wrong, and what to write.
    """

    category: str
    certain: bool
    op: Op
    tensor: str
    axes: tuple[str, ...]
    message: str

    @property
    def line(self) -> str:
        """The line of the program."""
        return str(self.op.source)

    def __str__(self) -> str:
        source = self.op.source
        text = f"`{source.text}`, {source}" if source.text else str(source)
        return f"{self.category}: {self.message} ({text})"


@dataclass(eq=False)
class Report:
    """The types of a program's values, and what was found.

    Attributes:
        mesh: the axes; `None` if the groups of the program do not form a mesh, so that nothing could be typed.
        findings: what the program can hardly mean, in the order of its lines.
        untyped: why values are unknown: the ops that make them, with the reason.
        graphs: for each graph, the types of what it is given, for each way in which it is called.
        types: for each tensor, its type: what it may be in any call.
        parted: variables that replicas share, or have in pieces, and that a run leaves different, with the positions
            of the axes.
        unsettled: the same, where something was reduced along these axes before they were changed.
        changed_alike: variables that replicas have of their own, and that all change by the same reduced values; with
            the op, and the positions of the axes.
        reductions: for each reduction, the type of what it takes.
        fed: the type of what the host feeds; empty if it feeds single numbers only.
    """

    mesh: Mesh | None
    findings: list[Finding] = field(default_factory=list)
    untyped: dict[Op, str] = field(default_factory=dict)
    graphs: dict[Graph, list[tuple[Held, ...]]] = field(default_factory=dict)
    types: dict[Tensor, Held] = field(default_factory=dict)
    parted: dict[Variable, tuple[int, ...]] = field(default_factory=dict)
    unsettled: dict[Variable, tuple[int, ...]] = field(default_factory=dict)
    changed_alike: dict[Variable, tuple[Op, tuple[int, ...]]] = field(default_factory=dict)
    reductions: dict[Op, Held] = field(default_factory=dict)
    fed: Held = ()

    def text(self, t: Tensor) -> str:
        """The type of a tensor, such as `{data: varying, tensor: sharded 1}`; empty where it is the same on all."""
        return "" if self.mesh is None or t not in self.types else type_text(self.mesh, self.types[t])

    def __str__(self) -> str:
        if self.mesh is None:
            return "The groups of replicas do not form a mesh: nothing could be checked."
        parts = [str(each) for each in self.findings] or ["Nothing was found."]
        parts += [f"not typed: {op.op_type}, {why} ({op.source})" for op, why in self.untyped.items()]
        for graph in self.graphs:
            held = graph.variables if not graph.id else graph.inputs
            rows = [("in ", t) for t in held] + [("out", t) for t in graph.outputs]
            shown = [f"    {way} {t.path}: {text}" for way, t in rows if (text := self.text(t))]
            parts += [f"{graph.title}:", *shown] if shown else []
        return "\n".join(parts)


def type_text(mesh: Mesh, held: Held) -> str:
    """A type as text, without what is the same on all replicas."""
    parts = []
    for name, (kind, dimension) in zip(mesh.names, held, strict=True):
        if kind > REPLICATED:
            where = (
                "" if dimension is None or kind is not SHARDED else " flat" if dimension == FLAT else f" {dimension}"
            )
            parts.append(f"{name}: {kind.name.lower()}{where}")
    return f"{{{', '.join(parts)}}}" if parts else ""


def infer(ir: Ir) -> Report:
    """Infer how replicas hold the values of a program. What its reductions can hardly mean is found on the way."""
    collectives = [op for op in lowered_ops(ir.main_graph) if op.kind.between_replicas]
    mesh = mesh_of(ir, collectives)
    report = Report(mesh)
    if mesh is not None and mesh.names:
        Typing(ir.main_graph, mesh, report, collectives)
    return report


def joined(left: Held, right: Held) -> Held:
    """What may be either, or is made of both."""
    return left if left == right else tuple(_joined(a, b) for a, b in zip(left, right, strict=True))


def _joined(a: Along, b: Along) -> Along:
    if a == b:
        return a
    larger = max(a[0], b[0])
    if larger in (REPLICATED, VARYING):
        slots = [slot for kind, slot in (a, b) if kind in (REPLICATED, VARYING) and slot is not None]
        return (larger, max(slots, default=None))
    return (larger, None) if a[0] == b[0] else a if a[0] is larger else b


def variable_type(mesh: Mesh, v: Variable) -> Held:
    """The type of a variable, as it is declared."""
    shared = mesh.shared(v.replica_grouping)
    if shared is None:
        return (_UNKNOWN,) * len(mesh.names)
    own: Along = _OWN if v.group_axis is None else (SHARDED, v.group_axis)
    found = [_SAME if i in shared else own for i in range(len(mesh.names))]
    if v.piece is not None or v.location_info.sharded:
        pieces: Along = (SHARDED, FLAT)
        found = [pieces if i in shared else each for i, each in enumerate(found)]
    return tuple(found)


@dataclass(frozen=True)
class _Outcome:
    """What a run of a graph makes of what it is given: types of outputs, and of what it was given, afterwards."""

    outputs: tuple[Held, ...]
    contents: tuple[Held, ...]


class Typing:
    """The inference: each graph once for each tuple of types that it is given."""

    def __init__(self, main: Graph, mesh: Mesh, report: Report, collectives: Sequence[Op]) -> None:
        self.mesh, self.report = mesh, report
        self.width = len(mesh.names)
        self.given: Held = (_GIVEN,) * self.width
        self.known: dict[tuple[Graph, tuple[Held, ...]], _Outcome] = {}
        self.stored: dict[Graph, dict[Tensor, tuple[Tensor, ...]]] = {g: storages(g.ops) for g in reachable(main)}
        self.found: dict[tuple[Op, str], Finding] = {}
        self.buffers: dict[RemoteBuffer, Held] = {}
        self.changes: dict[Tensor, tuple[Op, Held]] = {}  # of variables of each replica's own: what they are changed by
        self.fed = self.feeds(collectives)
        variables = main.variables
        for v in variables:
            if (buffer := v.location_info.buffer) is not None:
                own = variable_type(mesh, v)
                self.buffers[buffer] = joined(self.buffers.get(buffer, own), own)
        held = [v if v.piece is None else v.piece for v in variables]
        first = tuple(variable_type(mesh, v) for v in variables)
        outcome = _Pass(self, main, held, first).outcome
        repeated: set[int] = set()  # axes along which some variable gets what was summed though it was the same
        report.types |= dict(zip(variables, first, strict=True))
        for v, was, after in zip(variables, first, outcome.contents, strict=True):
            repeated.update(i for i, along in enumerate(after) if along[1] == 2 and along[0] in (REPLICATED, VARYING))
            certain, others = _no_longer_shared(was, after)
            if certain:
                report.parted[v] = certain
            elif others:
                report.unsettled[v] = others
            if v in self.changes and not v.location_info.isRemote():
                op, by = self.changes[v]
                if alike := tuple(i for i, (kind, _) in enumerate(after) if kind is VARYING and by[i] in _BY_REDUCED):
                    report.changed_alike[v] = op, alike
        of_learning = {mesh.names[i] for i in repeated}
        report.findings += [
            each for each in self.found.values() if each.category != REPEATED or not of_learning.isdisjoint(each.axes)
        ]

    def feeds(self, collectives: Sequence[Op]) -> Held:
        """The type of what the host feeds: own data, but for axes along which some op needs the same."""
        found = [_OWN] * self.width
        for op in collectives:
            if op.kind.needs_same_feeds(op.attributes):
                for i in self.mesh.along(op.attributes["stride"], op.attributes["group_size"]):
                    found[i] = _SAME
        return tuple(found)

    def run(self, graph: Graph, given: Sequence[Held]) -> _Outcome:
        """What a called graph makes of values of these types."""
        key = (graph, tuple(given))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = _Pass(self, graph, graph.inputs, key[1]).outcome
        return found

    def find(self, category: str, certain: bool, op: Op, t: Tensor, axes: Sequence[int], message: str) -> None:
        """Note a finding, once for an op."""
        names = tuple(self.mesh.names[i] for i in axes)
        text = message.format(t=f"`{t.path}`", axes=self.mesh.text(axes))
        self.found.setdefault((op, category), Finding(category, certain, op, t.path, names, text))


class _Pass:
    """One pass over the ops of a graph."""

    def __init__(self, program: Typing, graph: Graph, held: Sequence[Tensor], given: Sequence[Held]) -> None:
        self.program, self.graph = program, graph
        self.made_of = program.stored[graph]
        self.content: dict[Tensor, Held] = dict(zip(held, given, strict=True))
        types = program.report.types
        for t, type_ in self.content.items():
            types[t] = joined(types.get(t, type_), type_)
        for op in graph.ops:
            for part in op.parts:
                self.visit(part)
                for t in part.outputs:
                    now = self.of(t)
                    types[t] = joined(types.get(t, now), now)
        self.outcome = _Outcome(tuple(self.of(t) for t in graph.outputs), tuple(self.content[t] for t in held))
        program.report.graphs.setdefault(graph, []).append(tuple(given))

    def of(self, t: Tensor) -> Held:
        """The type of a tensor, as it is now."""
        found = self.content.get(t)
        if found is not None:
            return found
        if isinstance(t, Constant):
            return self.program.given
        op = t.producer
        if op is not None and op.kind.view is not None:
            bases = [self.of(each) for each in op.inputs]
            return tuple(_seen(op, along) for along in _all(bases)) if bases else self.program.given
        if op is not None and op.kind.aliased:
            return _all([self.of(each) for each in op.bases])
        return self.program.given if op is None else (_UNKNOWN,) * self.program.width

    def writes(self, t: Tensor, type_: Held, whole: bool = True) -> None:
        """Note what an op has written to a tensor."""
        stored = self.made_of.get(t, (t,))
        for s in stored:
            of_all = whole and len(stored) == 1 and s is t.origin
            self.content[s] = type_ if of_all else tuple(_joined(a, b) for a, b in zip(self.of(s), type_, strict=True))

    def visit(self, op: Op) -> None:
        kind = op.kind
        if kind.view is not None:
            return
        self.changes(op)
        if kind.graphs:
            results = self.call(op)
        elif kind.exchange:
            results = self.exchange(op)
        elif kind.between_replicas:
            results = [self.between_replicas(op)] * len(op.outputs)
        else:
            results = [self.computed(op)] * len(op.outputs)
        if op.modified and not kind.graphs:
            made = results[0] if results else self.computed(op)
            for i in op.modified:
                self.writes(op.inputs[i], made)
        for t, type_ in zip(op.outputs, results, strict=False):
            if not (kind.aliased and t is op.outputs[0]):
                self.content[t] = type_

    def changes(self, op: Op) -> None:
        """Note by what an op changes variables of each replica's own."""
        noted = self.program.changes
        for i in op.modified:
            t = op.inputs[i].origin
            if not isinstance(t, Variable) or all(kind is not VARYING for kind, _ in self.of(t)):
                continue
            by = _all([self.program.given, *(self.of(each) for k, each in enumerate(op.inputs) if k != i)])
            noted[t] = (op, joined(noted[t][1], by) if t in noted else by)

    def computed(self, op: Op) -> Held:
        """What an op of the replica alone makes."""
        forgotten = op.modified if op.kind.overwrites is not None and op.kind.overwrites.forgets(op.attributes) else ()
        inputs = [t for i, t in enumerate(op.inputs) if i not in forgotten]
        types = [self.of(t) for t in inputs]
        if not types:
            return self.program.given
        found = _all(types)
        if op.kind.asserts:
            return self.asserted(op, found)
        if not any(kind is SHARDED for kind, _ in found):
            return found
        if "permutation" in op.attributes:
            return tuple(_seen(op, along) for along in found)
        kept = [t.shape for t in op.outputs] or [op.inputs[i].shape for i in op.modified]
        contracted = None if op.kind.contracts is None else op.kind.contracts.dimensions(op)
        return tuple(
            self.of_pieces(along, [each[axis] for each in types], inputs, kept, contracted)
            for axis, along in enumerate(found)
        )

    def asserted(self, op: Op, before: Held) -> Held:
        """What the program says is the same on all replicas of a group."""
        axes = self.program.mesh.along(op.attributes["stride"], op.attributes["group_size"])
        if wrong := [i for i in axes if before[i][0] in (SHARDED, PARTIAL)]:
            what = " and ".join(dict.fromkeys(before[i][0].name.lower() for i in wrong))
            self.program.find(
                "contradicted statement", True, op, op.inputs[0], wrong,
                f"{{t}} is said to be the same on all replicas along {{axes}}, and it is {what}.",
            )  # fmt: skip
        return tuple(_SAME if i in axes else each for i, each in enumerate(before))

    def of_pieces(
        self,
        along: Along,
        types: Sequence[Along],
        inputs: Sequence[Tensor],
        kept: Sequence[tuple[int, ...]],
        contracted: tuple[int, ...] | None,
    ) -> Along:
        """What an op makes of pieces, along one axis: those of its result, or terms of a sum over them."""
        if along[0] is not SHARDED:
            return along
        if contracted is not None:
            divided = [kind is SHARDED and d == c for (kind, d), c in zip(types, contracted, strict=True)]
            both = all(kind is SHARDED for kind, _ in types)
            return (PARTIAL, None) if both and any(divided) else (SHARDED, None)
        elementwise = all(t.shape in kept for t, (kind, _) in zip(inputs, types, strict=True) if kind is SHARDED)
        return along if elementwise else (SHARDED, None)

    def exchange(self, op: Op) -> list[Held]:
        """Loads and stores."""
        with_what = op.attributes[op.kind.exchange]
        if not isinstance(with_what, RemoteBuffer):
            if with_what.tensor.nelms == 1 or not op.outputs:
                return [self.program.given] * len(op.outputs)
            self.program.report.fed = self.program.fed
            return [self.program.fed] * len(op.outputs)
        if not op.outputs and not op.modified:
            now = self.of(op.inputs[0])
            if joined(self.program.buffers.get(with_what, now), now) != self.program.buffers.get(with_what, now):
                self.program.buffers[with_what] = (_UNKNOWN,) * self.program.width
            return []
        unknown: Held = (_UNKNOWN,) * self.program.width
        return [self.program.buffers.get(with_what, unknown)]

    def between_replicas(self, op: Op) -> Held:
        """What an op makes that replicas carry out together."""
        makes = op.kind.exchanged(op.attributes)
        types = [self.of(t) for t in op.inputs]
        before = _all(types)
        size = op.attributes["group_size"]
        axes = self.program.mesh.along(op.attributes["stride"], size) if size > 1 else ()
        if makes is None:
            if axes:
                self.program.report.untyped.setdefault(op, "an op between replicas that does not say what it makes")
            return tuple(_UNKNOWN if i in axes else each for i, each in enumerate(before))
        reduction = op.attributes.get("op")
        repeated = False
        if reduction is not None and makes != "own":
            repeated = self.reduced(op, before, axes, reduction)
            known = self.program.report.reductions
            known[op] = joined(known.get(op, before), before)
        same = _SAME if reduction is None else _REPEATED if repeated else _REDUCED
        after: dict[str, Along] = {"same": same, "pieces": (SHARDED, FLAT)}
        return tuple(
            each if i not in axes else self.own_piece(each, reduction) if makes == "pieces" else after.get(makes, each)
            for i, each in enumerate(before)
        )

    def own_piece(self, along: Along, reduction: str | None) -> Along:
        """The own piece of a value, or of what a reduction makes of it."""
        return along if reduction is None and along[0] >= SHARDED else (SHARDED, FLAT)

    def reduced(self, op: Op, before: Held, axes: Sequence[int], reduction: str) -> bool:
        """Look at a reduction: whether it is what completes the value. Returns whether it sums what is the same."""
        find, (t, *_) = self.program.find, op.inputs
        repeated = bool(axes) and reduction in ("add", "square_add") and all(before[i][0] is REPLICATED for i in axes)
        if repeated:
            find(REPEATED, False, op, t, axes,
                 "{t} is the same on all replicas along {axes}, and is summed over them: the result is as many times "
                 "too large as there are. Leave that reduction out, or take the mean.")  # fmt: skip
        if shared := [i for i in axes if before[i][0] is PARTIAL and reduction == "mean"]:
            find("mean of a sum", False, op, t, shared,
                 "{t} is a term of a sum over {axes}, and the mean of the terms is taken: the result is as many times "
                 "too small as there are replicas. Write \"add\".")  # fmt: skip
        if cut := [i for i in axes if before[i][0] is SHARDED and before[i][1] is not None and reduction != "max"]:
            find("reduced pieces", False, op, t, cut,
                 "replicas along {axes} have different pieces of {t}, and these are reduced as if they were terms of a "
                 "sum. Gather them, with `replicated_all_gather`, or reduce over another axis.")  # fmt: skip
        return repeated

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def call(self, op: Op) -> list[Held]:
        given = [self.of(t) for t in op.inputs]
        if is_call(op):
            (run,) = op.runs
            bound = self.bound(run, given)
            outcome = self.program.run(run.graph, bound)
            for i in op.modified:
                self.writes(op.inputs[i], outcome.contents[i])
            return list(outcome.outputs)
        if is_loop(op):
            return self.loop(op, given)
        results: list[Held] = [given[0]] * len(op.outputs)
        for run in op.runs:
            bound = self.bound(run, given[run.first : run.first + len(run.given)])
            outputs = self.program.run(run.graph, bound).outputs
            results = [joined(a, b) for a, b in zip(results, outputs, strict=False)]
        return results

    def bound(self, run: Run, given: Sequence[Held]) -> list[Held]:
        """Types of a graph's inputs. What nothing is bound to is unknown."""
        missing: list[Held] = [(_UNKNOWN,) * self.program.width] * (len(run.inputs) - len(given))
        return [self.program.given] * len(run.own) + list(given) + missing

    def loop(self, op: Op, given: list[Held]) -> list[Held]:
        """A loop: its graph, until what it carries does not change any more."""
        (run,) = op.runs
        own_in, own_out, carried = len(run.own), run.trait.own_outputs, run.carried
        if not run.turns:
            return given[:carried] + [self.program.given] * (len(op.outputs) - carried)
        turn = self.bound(run, given)
        while True:
            outcome, before = self.program.run(run.graph, turn), list(turn)
            for k in range(carried):
                turn[own_in + k] = joined(turn[own_in + k], outcome.outputs[own_out + k])
            for i in op.modified:
                turn[own_in + i] = joined(turn[own_in + i], outcome.contents[own_in + i])
            if turn == before:
                break
        for i in op.modified:
            self.writes(op.inputs[i], outcome.contents[own_in + i])
        return list(outcome.outputs[own_out:])


def _no_longer_shared(was: Held, after: Held) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a variable is not any more what it was declared as: those where nothing was reduced, and
    the others. None, if something is not known."""
    if any(kind is UNKNOWN for kind, _ in after):
        return (), ()
    found = [
        i
        for i, (before, (kind, _)) in enumerate(zip(was, after, strict=True))
        if (before[0] is REPLICATED and kind > REPLICATED) or (before == (SHARDED, FLAT) and kind > SHARDED)
    ]
    certain = tuple(i for i in found if after[i] != (VARYING, 1))
    return certain, tuple(i for i in found if i not in certain)


def _all(types: Sequence[Held]) -> Held:
    """The join of several types."""
    found = types[0]
    for each in types[1:]:
        if each != found:
            found = joined(found, each)
    return found


def _seen(op: Op, along: Along) -> Along:
    """What a view is, along an axis, if this is what it is of."""
    kind, dimension = along
    if kind is not SHARDED or dimension is None or dimension == FLAT:
        return along
    permutation = op.attributes.get("permutation")
    if permutation is not None:
        return (SHARDED, tuple(permutation).index(dimension))
    return (SHARDED, dimension if op.outputs[0].shape == op.inputs[0].shape else None)
