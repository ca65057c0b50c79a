"""The inference of how replicas hold values: one pass over the ops of each graph, for what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from popxl.analysis.mesh import Mesh, mesh_of
from popxl.analysis.propagation import result_types
from popxl.analysis.replication import (
    FLAT,
    LITERAL,
    NONLINEAR_TERMS,
    NOT_KNOWN,
    OWN,
    OWN_DATA,
    PARTIAL,
    REDUCED,
    REPEATED,
    REPEATED_SUM,
    REPLICATED,
    SAME,
    SHARDED,
    UNKNOWN,
    VARYING,
    AxisType,
    ReplicaType,
    Report,
    differs_by_own_variables,
    join,
    join_all,
    join_axis,
    reduced_slot,
    unreduced_slot,
    variable_type,
)
from popxl.analysis.type_findings import TypeFindings
from popxl.core.aliasing import lowered_ops, reachable, storages
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import Run, is_call, is_loop
from popxl.remote_buffer import RemoteBuffer

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph
    from popxl.ir import Ir


def infer(ir: Ir) -> Report:
    """Infer how replicas hold the values of a program. What its reductions can hardly mean is found on the way."""
    collectives = [op for op in lowered_ops(ir.main_graph) if op.kind.between_replicas]
    mesh = mesh_of(ir, collectives)
    report = Report(mesh)
    if mesh is not None and mesh.names:
        TypeInference(ir.main_graph, mesh, report, collectives)
    return report


@dataclass(frozen=True)
class _Outcome:
    """What a run of a graph makes of what it is given: types of outputs, and of what it was given, afterwards; and the
    last op that changes each of that, with the type of what all of them change it by."""

    outputs: tuple[ReplicaType, ...]
    contents: tuple[ReplicaType, ...]
    changes: tuple[tuple[Op, ReplicaType] | None, ...]


class TypeInference:
    """The inference: each graph once for each tuple of types that it is given."""

    def __init__(self, main: Graph, mesh: Mesh, report: Report, collectives: Sequence[Op]) -> None:
        self.mesh, self.report = mesh, report
        self.width = len(mesh.names)
        self.given: ReplicaType = (LITERAL,) * self.width
        self.outcomes: dict[tuple[Graph, tuple[ReplicaType, ...]], _Outcome] = {}
        self.stored: dict[Graph, dict[Tensor, tuple[Tensor, ...]]] = {g: storages(g.ops) for g in reachable(main)}
        self.findings = TypeFindings(report, mesh)
        self.buffers: dict[RemoteBuffer, ReplicaType] = {}
        variables = main.variables
        for v in variables:
            if (buffer := v.location_info.buffer) is not None:
                own = variable_type(mesh, v)
                self.buffers[buffer] = join(self.buffers.get(buffer, own), own)
        held = [v if v.piece is None else v.piece for v in variables]
        changed = {op.inputs[i].origin for op in main.ops for i in op.modified}
        first = tuple(variable_type(mesh, v, v in changed) for v in variables)
        self.fed = self.feeds(collectives, [t for v, t in zip(variables, first, strict=True) if v in changed])
        self.findings.divided = [i for i, along in enumerate(self.fed) if along == SAME]
        outcome = _GraphInference(self, main, held, first).outcome
        repeated: set[int] = set()  # axes along which some variable gets what was summed though it was the same
        report.types |= dict(zip(variables, first, strict=True))
        for v, was, after, change in zip(variables, first, outcome.contents, outcome.changes, strict=True):
            repeated.update(i for i, along in enumerate(after) if along[1] == 2 and along[0] in (REPLICATED, VARYING))
            certain, others = _diverged_axes(was, after)
            if certain:
                report.diverged[v] = certain
            elif others:
                report.maybe_diverged[v] = others
            if change is not None and not v.location_info.isRemote():
                self.findings.variable_update(v, was, *change)
        of_learning = {mesh.names[i] for i in repeated}
        report.findings += [
            each
            for each in self.findings.found.values()
            if each.category != REPEATED or not of_learning.isdisjoint(each.axes) or _is_at_once(each.op)
        ]

    def feeds(self, collectives: Sequence[Op], learned: Sequence[ReplicaType]) -> ReplicaType:
        """The type of what the host feeds: own data, but for axes along which some op needs the same.

        So does a sum of more than single numbers along an axis where replicas share no weight, if they do so along
        another: that is how layers are divided.
        """
        found = [OWN_DATA] * self.width
        shared = [any(each[i][0] is REPLICATED for each in learned) for i in range(self.width)]
        divided = [any(each[i] == (VARYING, OWN) for each in learned) for i in range(self.width)]
        for op in collectives if any(shared) else ():
            axes = self.mesh.along(op.attributes["stride"], op.attributes["group_size"])
            sums = op.attributes.get("op") == "add" and op.inputs[0].nelms > 1
            if sums and len(axes) == 1 and divided[axes[0]] and not shared[axes[0]]:
                found[axes[0]] = SAME
        for op in collectives:
            if op.kind.needs_same_feeds(op.attributes):
                for i in self.mesh.along(op.attributes["stride"], op.attributes["group_size"]):
                    found[i] = SAME
        return tuple(found)

    def run(self, graph: Graph, given: Sequence[ReplicaType]) -> _Outcome:
        """What a called graph makes of values of these types."""
        key = (graph, tuple(given))
        found = self.outcomes.get(key)
        if found is None:
            found = self.outcomes[key] = _GraphInference(self, graph, graph.inputs, key[1]).outcome
        return found


class _GraphInference:
    """One pass over the ops of a graph."""

    def __init__(
        self, program: TypeInference, graph: Graph, held: Sequence[Tensor], given: Sequence[ReplicaType]
    ) -> None:
        self.program, self.graph, self.findings = program, graph, program.findings
        self.storages = program.stored[graph]
        self.content: dict[Tensor, ReplicaType] = dict(zip(held, given, strict=True))
        self.changes: dict[Tensor, tuple[Op, ReplicaType]] = {}
        types = program.report.types
        for t, type_ in self.content.items():
            types[t] = join(types.get(t, type_), type_)
        for op in graph.ops:
            for part in op.parts:
                self.visit(part)
                for t in part.outputs:
                    now = self.type_of(t)
                    types[t] = join(types.get(t, now), now)
        self.outcome = _Outcome(
            tuple(self.type_of(t) for t in graph.outputs),
            tuple(self.content[t] for t in held),
            tuple(self.changes.get(t) for t in held),
        )
        program.report.graphs.setdefault(graph, []).append(tuple(given))

    def type_of(self, t: Tensor) -> ReplicaType:
        """Current type of a tensor."""
        found = self.content.get(t)
        if found is not None:
            return found
        if isinstance(t, Constant):
            return self.program.given
        op = t.producer
        if op is not None and op.kind.view is not None:
            bases = [self.type_of(each) for each in op.inputs]
            return tuple(self.view_type(op, along) for along in join_all(bases)) if bases else self.program.given
        if op is not None and op.kind.aliased:
            return join_all([self.type_of(each) for each in op.bases])
        return self.program.given if op is None else (NOT_KNOWN,) * self.program.width

    def view_type(self, op: Op, along: AxisType) -> AxisType:
        """Type of a view along an axis, given its source's type."""
        kind, dimension = along
        if kind is not SHARDED or dimension is None or dimension == FLAT:
            return along
        return join_axis(result_types(op, [along] * len(op.inputs))[0])

    def write(self, t: Tensor, type_: ReplicaType, whole: bool = True) -> None:
        """Note what an op has written to a tensor."""
        stored = self.storages.get(t, (t,))
        for s in stored:
            of_all = whole and len(stored) == 1 and s is t.origin
            self.content[s] = type_ if of_all else join(self.type_of(s), type_)

    def visit(self, op: Op) -> None:
        kind = op.kind
        if kind.view is not None:
            return
        if kind.graphs:
            results = self.call(op)
        elif kind.exchange:
            results = self.exchange(op)
        elif kind.between_replicas:
            results = [self.collective_result(op)] * len(op.outputs)
        else:
            results = [self.local_result(op)] * len(op.outputs)
        if op.modified and not kind.graphs:
            made = results[0] if results else self.local_result(op)
            others = [self.type_of(t) for i, t in enumerate(op.inputs) if i not in op.modified]
            for i in op.modified:
                self.record_change(op.inputs[i], (op, join_all(others or [self.program.given])))
                self.write(op.inputs[i], made)
        for t, type_ in zip(op.outputs, results, strict=False):
            if not (kind.aliased and t is op.outputs[0]):
                self.content[t] = type_

    def record_change(self, t: Tensor, change: tuple[Op, ReplicaType] | None) -> None:
        """Note by what an op changes what the graph was given."""
        if change is not None:
            op, by = change
            before = self.changes.get(t.origin)
            self.changes[t.origin] = op, by if before is None else join(before[1], by)

    def local_result(self, op: Op) -> ReplicaType:
        """What an op of the replica alone makes."""
        forgotten = op.modified if op.kind.overwrites is not None and op.kind.overwrites.forgets(op.attributes) else ()
        inputs = [t for i, t in enumerate(op.inputs) if i not in forgotten]
        types = [self.type_of(t) for t in inputs]
        if not types:
            return self.program.given
        found = join_all(types)
        if op.kind.asserts:
            return self.asserted_type(op, found)
        if op.kind.contracts is not None and self.findings.divided:
            self.findings.missing_sum(op, types, self.is_given)
        axes = [i for i, along in enumerate(found) if along[0] in (SHARDED, PARTIAL) or differs_by_own_variables(along)]
        if not axes:
            return found
        made = list(found)
        for i in axes:
            made[i] = self.propagated(op, i, [t[i] for t in types], inputs)
        return tuple(made)

    def asserted_type(self, op: Op, before: ReplicaType) -> ReplicaType:
        """Apply the program's statement that replicas of a group hold equal values."""
        axes = self.program.mesh.along(op.attributes["stride"], op.attributes["group_size"])
        self.findings.contradiction(op, before, axes)
        return tuple(SAME if i in axes else each for i, each in enumerate(before))

    def propagated(self, op: Op, axis: int, types: Sequence[AxisType], inputs: Sequence[Tensor]) -> AxisType:
        """What an op makes of pieces or terms of a sum, along one axis: the function that it computes says it."""
        if op.kind.is_carried_out_by_others or len(inputs) < len(op.inputs):
            return join_axis(types)
        whole = join_axis(types)
        if len(types) == 1 and whole[0] is VARYING and unreduced_slot(whole[1]) == OWN:
            return whole
        made, flaws = result_types(op, [_without_reduction(each) for each in types])
        if not op.modified:
            for flaw in flaws:
                self.findings.nonlinear_use(op, axis, types, flaw)
        result = join_axis(made) if made else whole
        return (
            (VARYING, reduced_slot(result[1]))
            if differs_by_own_variables(result) and (whole[1] or 0) < NONLINEAR_TERMS
            else result
        )

    def is_given(self, t: Tensor) -> bool:
        """Whether a tensor is a variable or an input of the graph, a view of one, or its transpose."""
        if t.producer is not None and t.producer.attributes.get("permutation"):
            (t,) = t.producer.inputs
        return all(s.producer is None and not isinstance(s, Constant) for s in self.storages.get(t, (t,)))

    def exchange(self, op: Op) -> list[ReplicaType]:
        """Loads and stores."""
        with_what = op.attributes[op.kind.exchange]
        if not isinstance(with_what, RemoteBuffer):
            if with_what.tensor.nelms == 1 or not op.outputs:
                return [self.program.given] * len(op.outputs)
            self.program.report.fed = self.program.fed
            return [self.program.fed] * len(op.outputs)
        if not op.outputs and not op.modified:
            now = self.type_of(op.inputs[0])
            if join(self.program.buffers.get(with_what, now), now) != self.program.buffers.get(with_what, now):
                self.program.buffers[with_what] = (NOT_KNOWN,) * self.program.width
            return []
        unknown: ReplicaType = (NOT_KNOWN,) * self.program.width
        return [self.program.buffers.get(with_what, unknown)]

    def collective_result(self, op: Op) -> ReplicaType:
        """What an op makes that replicas carry out together."""
        makes = op.kind.exchanged(op.attributes)
        types = [self.type_of(t) for t in op.inputs]
        before = join_all(types)
        size = op.attributes["group_size"]
        axes = self.program.mesh.along(op.attributes["stride"], size) if size > 1 else ()
        if makes is None:
            if axes:
                self.program.report.untyped.setdefault(op, "an op between replicas that does not say what it makes")
            return tuple(NOT_KNOWN if i in axes else each for i, each in enumerate(before))
        reduction = op.attributes.get("op")
        repeated = False
        if reduction is None and makes == "same" and op.inputs[0].meta_shape:
            self.findings.gather(op, before, axes)
        if reduction is not None and makes != "own":
            repeated = self.findings.reduction(op, before, axes, reduction)
            known = self.program.report.reductions
            known[op] = join(known.get(op, before), before)
        same = SAME if reduction is None else REPEATED_SUM if repeated else REDUCED
        after: dict[str, AxisType] = {"same": same, "pieces": (SHARDED, FLAT)}
        return tuple(
            each
            if i not in axes
            else self.scattered_type(each, reduction)
            if makes == "pieces"
            else after.get(makes, each)
            for i, each in enumerate(before)
        )

    def scattered_type(self, along: AxisType, reduction: str | None) -> AxisType:
        """Type of a replica's own shard of a value, or of a reduced value."""
        return along if reduction is None and along[0] >= SHARDED else (SHARDED, FLAT)

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def call(self, op: Op) -> list[ReplicaType]:
        given = [self.type_of(t) for t in op.inputs]
        if is_call(op):
            (run,) = op.runs
            bound = self.bound_types(run, given)
            outcome = self.program.run(run.graph, bound)
            for i in op.modified:
                self.record_change(op.inputs[i], outcome.changes[i])
                self.write(op.inputs[i], outcome.contents[i])
            return list(outcome.outputs)
        if is_loop(op):
            return self.loop(op, given)
        results: list[ReplicaType] = [given[0]] * len(op.outputs)
        for run in op.runs:
            bound = self.bound_types(run, given[run.first : run.first + len(run.given)])
            outputs = self.program.run(run.graph, bound).outputs
            results = [join(a, b) for a, b in zip(results, outputs, strict=False)]
        return results

    def bound_types(self, run: Run, given: Sequence[ReplicaType]) -> list[ReplicaType]:
        """Types of a graph's inputs. What nothing is bound to is unknown."""
        missing: list[ReplicaType] = [(NOT_KNOWN,) * self.program.width] * (len(run.inputs) - len(given))
        return [self.program.given] * len(run.op_inputs) + list(given) + missing

    def loop(self, op: Op, given: list[ReplicaType]) -> list[ReplicaType]:
        """A loop: its graph, until what it carries does not change any more."""
        (run,) = op.runs
        own_in, own_out, carried = len(run.op_inputs), run.trait.own_outputs, run.carried
        if not run.iterations:
            return given[:carried] + [self.program.given] * (len(op.outputs) - carried)
        turn = self.bound_types(run, given)
        while True:
            outcome, before = self.program.run(run.graph, turn), list(turn)
            for k in range(carried):
                turn[own_in + k] = join(turn[own_in + k], outcome.outputs[own_out + k])
            for i in op.modified:
                turn[own_in + i] = join(turn[own_in + i], outcome.contents[own_in + i])
            if turn == before:
                break
        for i in op.modified:
            self.record_change(op.inputs[i], outcome.changes[own_in + i])
            self.write(op.inputs[i], outcome.contents[own_in + i])
        return list(outcome.outputs[own_out:])


def _diverged_axes(was: ReplicaType, after: ReplicaType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a variable is not any more what it was declared as: those where nothing was reduced, and
    the others. None, if something is not known."""
    if any(kind is UNKNOWN for kind, _ in after):
        return (), ()
    found = [
        i
        for i, (before, (kind, _)) in enumerate(zip(was, after, strict=True))
        if (before[0] is REPLICATED and kind > REPLICATED) or (before == (SHARDED, FLAT) and kind > SHARDED)
    ]
    certain = tuple(i for i in found if after[i][0] is not VARYING or reduced_slot(after[i][1]) != after[i][1])
    return certain, tuple(i for i in found if i not in certain)


def _is_at_once(op: Op) -> bool:
    """Whether an op sums the result of another one that does the same, and it stays a sum: nothing divides it."""
    (t, *_), (made, *_) = op.inputs, op.outputs or op.inputs
    before = t.producer
    if before is None or before.kind is not op.kind or before.attributes != op.attributes:
        return False
    return made.nelms > 1 and all(t.nelms > 1 for each in op.graph.ops if made in each.inputs for t in each.inputs)


def _without_reduction(along: AxisType) -> AxisType:
    return (along[0], unreduced_slot(along[1])) if along[0] is VARYING else along
