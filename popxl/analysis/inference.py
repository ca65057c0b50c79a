"""Inference of replication types: one pass over the ops of each graph, for the types of its inputs and variables."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from popxl.analysis.mesh import Mesh, mesh_of
from popxl.analysis.op_index import index_ops
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
    variable_types,
)
from popxl.analysis.type_findings import TypeFindings, own_axes
from popxl.core.aliasing import add_alias
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import Run, is_call, is_loop
from popxl.remote_buffer import RemoteBuffer

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph
    from popxl.ir import Ir


def infer(ir: Ir) -> Report:
    """Infer how replicas hold the values of a program. What its reductions can hardly mean is found on the way."""
    if ir.replication_factor == 1:
        return Report(mesh_of(ir, ()))
    index = index_ops(ir.main_graph)
    collectives = [op for graph in index.values() for op in graph.collectives]
    variables = ir.main_graph.variables
    mesh = mesh_of(ir, collectives, variables)
    report = Report(mesh, index=index)
    if mesh is not None:
        TypeInference(ir.main_graph, variables, mesh, report, collectives)
    return report


@dataclass(frozen=True)
class _Outcome:
    """Effect of a graph's run on given types: types of outputs, and final types of inputs and variables; and the last
    op that changes each of those, with the common type of all changes."""

    outputs: tuple[ReplicaType, ...]
    contents: tuple[ReplicaType, ...]
    changes: tuple[tuple[Op, ReplicaType] | None, ...]


class TypeInference:
    """The inference: each graph once for each tuple of types that it is given."""

    def __init__(
        self, main: Graph, variables: Sequence[Variable], mesh: Mesh, report: Report, collectives: Sequence[Op]
    ) -> None:
        self.mesh, self.report = mesh, report
        self.width = len(mesh.names)
        self.given: ReplicaType = (LITERAL,) * self.width
        self.unknown: ReplicaType = (NOT_KNOWN,) * self.width
        self.outcomes: dict[tuple[Graph, tuple[ReplicaType, ...]], _Outcome] = {}
        self.propagated: dict[Hashable, _Propagated] = {}
        self.findings = TypeFindings(report, mesh)
        self.buffers: dict[RemoteBuffer, ReplicaType] = {}
        held = [v if v.piece is None else v.piece for v in variables]
        changed = {op.inputs[i].origin for op in main.ops for i in op.modified}
        first = tuple(variable_types(mesh, variables, changed))
        for v, was in zip(variables, first, strict=True):
            if (buffer := v.location_info.buffer) is not None:
                self.buffers[buffer] = join(self.buffers.get(buffer, was), was)
        self.fed = self.feeds(collectives, {t for v, t in zip(variables, first, strict=True) if v in changed})
        self.findings.divided = [i for i, along in enumerate(self.fed) if along == SAME]
        outcome = _GraphInference(self, main, held, first).outcome
        repeated: set[int] = set()  # axes along which an operand that is the same on all replicas was summed
        report.types |= zip(variables, first, strict=True)
        for v, was, after, change in zip(variables, first, outcome.contents, outcome.changes, strict=True):
            if after != was:
                repeated.update(_repeated_axes(after))
                certain, others = _diverged_axes(was, after)
                if certain:
                    report.diverged[v] = certain
                elif others:
                    report.maybe_diverged[v] = others
            if change is not None and (own := own_axes(was)) and not v.location_info.isRemote():
                self.findings.variable_update(v, was, own, *change)
        of_learning = {mesh.names[i] for i in repeated}
        report.findings += [
            each
            for each in self.findings.found.values()
            if each.category != REPEATED or not of_learning.isdisjoint(each.axes) or _is_at_once(each.op)
        ]

    def feeds(self, collectives: Sequence[Op], learned: Collection[ReplicaType]) -> ReplicaType:
        """The type of the host's feeds: varying, except along axes for which some op needs equal feeds.

        So does a sum of more than single numbers along an axis where replicas share no weight, if they do so along
        another: that is how layers are divided.
        """
        found = [OWN_DATA] * self.width
        shared = [any(each[i][0] is REPLICATED for each in learned) for i in range(self.width)]
        divided = [any(each[i] == (VARYING, OWN) for each in learned) for i in range(self.width)]
        for op in collectives if any(shared) else ():
            axes = self.mesh.axes_of(op)
            sums = op.attributes.get("op") == "add" and op.inputs[0].nelms > 1
            if sums and len(axes) == 1 and divided[axes[0]] and not shared[axes[0]]:
                found[axes[0]] = SAME
        for op in collectives:
            if op.kind.needs_same_feeds(op.attributes):
                for i in self.mesh.axes_of(op):
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
        self.storages: dict[Tensor, tuple[Tensor, ...]] = {}  # of aliases
        self.content: dict[Tensor, ReplicaType] = dict(zip(held, given, strict=True))
        self.changes: dict[Tensor, tuple[Op, ReplicaType]] = {}
        self.made = dict(self.content)  # types of tensors when they are made
        for op in graph.ops:
            for part in op.parts if op.kind.stands_for is not None else (op,):
                self.visit(part)
        self.record()
        self.outcome = _Outcome(
            self.types_of(graph.outputs),
            tuple([self.content[t] for t in held]),
            tuple(map(self.changes.get, held)),
        )
        program.report.graphs.setdefault(graph, []).append(tuple(given))

    def record(self) -> None:
        """Report the types of the graph's tensors, in addition to those of earlier passes."""
        types = self.program.report.types
        if self.graph in self.program.report.graphs:
            for t, now in self.made.items():
                before = types.get(t, now)
                self.made[t] = now if before == now else join(before, now)
        types |= self.made

    def types_of(self, ts: Sequence[Tensor]) -> tuple[ReplicaType, ...]:
        """Current types of tensors."""
        known = self.content.get
        return tuple([known(t) or self.type_without_content(t) for t in ts])

    def type_of(self, t: Tensor) -> ReplicaType:
        """Current type of a tensor."""
        return self.content.get(t) or self.type_without_content(t)

    def type_without_content(self, t: Tensor) -> ReplicaType:
        """Current type of a constant or an alias."""
        if isinstance(t, Constant):
            return self.program.given
        op = t.producer
        if op is not None and op.kind.view is not None:
            bases = join_all(self.types_of(op.inputs)) if op.inputs else self.program.given
            return tuple(self.view_type(op, along) for along in bases) if _has_known_dimensions(bases) else bases
        if op is not None and op.kind.aliased:
            return join_all(self.types_of(op.bases))
        return self.program.given if op is None else self.program.unknown

    def view_type(self, op: Op, along: AxisType) -> AxisType:
        """Type of a view along an axis, given its source's type."""
        if not _has_known_dimensions((along,)):
            return along
        return join_axis(result_types(op, [along] * len(op.inputs))[0])

    def write(self, t: Tensor, type_: ReplicaType, change: tuple[Op, ReplicaType] | None) -> None:
        """Note what an op has written to a tensor, and by what it has changed it."""
        stored, base = self.storages.get(t), t.origin
        if change is not None:
            before = self.changes.get(base)
            self.changes[base] = change if before is None else (change[0], join(before[1], change[1]))
        if stored is None:
            self.content[t] = type_
            return
        for s in stored:
            self.content[s] = type_ if len(stored) == 1 and s is base else join(self.type_of(s), type_)

    def visit(self, op: Op) -> None:
        kind = op.kind
        if kind.view is not None or kind.aliased:
            add_alias(op, self.storages)
            if kind.view is not None:
                self.made |= zip(op.outputs, self.types_of(op.outputs), strict=True)
                return
        if kind.graphs:
            results: Sequence[ReplicaType] = self.call(op)
        elif kind.exchange:
            results = self.exchange(op)
            if op.modified:
                self.change(op, self.types_of(op.inputs), results[0])
        else:
            types = self.types_of(op.inputs)
            made = self.collective_result(op, types) if kind.between_replicas else self.local_result(op, types)
            results = (made,) * len(op.outputs)
            if op.modified:
                self.change(op, types, made)
        for t, type_ in zip(op.outputs, results, strict=False):
            if not (kind.aliased and t is op.outputs[0]):
                self.content[t] = self.made[t] = type_
            else:
                self.made[t] = self.type_of(t)

    def change(self, op: Op, types: Sequence[ReplicaType], made: ReplicaType) -> None:
        """Note what an op writes to its operands, and by what it changes them."""
        others = tuple([each for i, each in enumerate(types) if i not in op.modified])
        change = op, join_all(others) if others else self.program.given
        for i in op.modified:
            self.write(op.inputs[i], made, change)

    def local_result(self, op: Op, types: Sequence[ReplicaType]) -> ReplicaType:
        """Result type of an op without communication, for types of its operands."""
        kind, inputs = op.kind, op.inputs
        if kind.overwrites is not None and kind.overwrites.forgets(op.attributes):
            kept = [i for i in range(len(inputs)) if i not in op.modified]
            inputs, types = tuple([inputs[i] for i in kept]), tuple([types[i] for i in kept])
        if not inputs:
            return self.program.given
        found = join_all(types)
        if kind.asserts:
            return self.asserted_type(op, found)
        if kind.contracts is not None and self.findings.divided:
            self.findings.missing_sum(op, types, self.is_given)
        axes = _propagated_axes(found)
        if not axes or kind.is_carried_out_by_others or len(inputs) < len(op.inputs):
            return found
        key = (kind, op.operands, *op.attributes.items(), *[(t.shape, t.dtype) for t in inputs], *types)
        try:
            known = self.program.propagated.get(key)
        except TypeError:  # from the hash
            known = _propagated(op, types, found, axes)
        if known is None:
            known = self.program.propagated[key] = _propagated(op, types, found, axes)
        made, flaws = known
        if not op.modified:
            for i, flaw in flaws:
                self.findings.nonlinear_use(op, i, [t[i] for t in types], flaw)
        return made

    def asserted_type(self, op: Op, before: ReplicaType) -> ReplicaType:
        """Apply the program's statement that replicas of a group hold equal values."""
        axes = self.program.mesh.axes_of(op)
        self.findings.contradiction(op, before, axes)
        return tuple(SAME if i in axes else each for i, each in enumerate(before))

    def is_given(self, t: Tensor) -> bool:
        """Whether a tensor is a variable or an input of the graph, a view of one, or its transpose."""
        if t.producer is not None and t.producer.attributes.get("permutation"):
            (t,) = t.producer.inputs
        return all(s.producer is None and not isinstance(s, Constant) for s in self.storages.get(t, (t,)))

    def exchange(self, op: Op) -> list[ReplicaType]:
        """Loads and stores."""
        with_what = op.attributes[op.kind.exchange]
        if not isinstance(with_what, RemoteBuffer):
            if not op.outputs or op.outputs[0].nelms == 1:
                return [self.program.given] * len(op.outputs)
            self.program.report.fed = self.program.fed
            return [self.program.fed] * len(op.outputs)
        if not op.outputs and not op.modified:
            now = self.type_of(op.inputs[0])
            if join(self.program.buffers.get(with_what, now), now) != self.program.buffers.get(with_what, now):
                self.program.buffers[with_what] = self.program.unknown
            return []
        return [self.program.buffers.get(with_what, self.program.unknown)]

    def collective_result(self, op: Op, types: Sequence[ReplicaType]) -> ReplicaType:
        """What an op makes that replicas carry out together."""
        makes = op.kind.exchanged(op.attributes)
        before = join_all(types)
        axes = self.program.mesh.axes_of(op)
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
        if makes == "own":
            return before
        same = SAME if reduction is None else REPEATED_SUM if repeated else REDUCED
        return _exchanged_type(before, axes, same if makes == "same" else None, reduction is not None)

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def call(self, op: Op) -> list[ReplicaType]:
        given = self.types_of(op.inputs)
        if is_call(op):
            (run,) = op.runs
            bound = self.bound_types(run, given)
            outcome = self.program.run(run.graph, bound)
            for i in op.modified:
                self.write(op.inputs[i], outcome.contents[i], outcome.changes[i])
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
        missing = [self.program.unknown] * (len(run.inputs) - len(given))
        return [self.program.given] * len(run.op_inputs) + list(given) + missing

    def loop(self, op: Op, given: Sequence[ReplicaType]) -> list[ReplicaType]:
        """Infer a loop: its graph, until the types of carried values are stable."""
        (run,) = op.runs
        own_in, own_out, carried = len(run.op_inputs), run.trait.own_outputs, run.carried
        if not run.iterations:
            return [*given[:carried], *[self.program.given] * (len(op.outputs) - carried)]
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
            self.write(op.inputs[i], outcome.contents[own_in + i], outcome.changes[own_in + i])
        return list(outcome.outputs[own_out:])


_Propagated = tuple[ReplicaType, tuple[tuple[int, str], ...]]
"""What an op makes of pieces or terms of a sum; and what it does to terms that their sum does not survive, by axis."""


def _propagated(op: Op, types: Sequence[ReplicaType], joined: ReplicaType, axes: Sequence[int]) -> _Propagated:
    """Result type of an op, along each of some axes by the function that it computes."""
    made, found = list(joined), []
    for i in axes:
        made[i], flaws = _propagated_along(op, [t[i] for t in types], joined[i])
        found += [(i, flaw) for flaw in flaws]
    return tuple(made), tuple(found)


def _propagated_along(op: Op, types: Sequence[AxisType], whole: AxisType) -> tuple[AxisType, tuple[str, ...]]:
    if len(types) == 1 and whole[0] is VARYING and unreduced_slot(whole[1]) == OWN:
        return whole, ()
    made, flaws = result_types(op, [_without_reduction(each) for each in types])
    result = join_axis(made) if made else whole
    if differs_by_own_variables(result) and (whole[1] or 0) < NONLINEAR_TERMS:
        result = (VARYING, reduced_slot(result[1]))
    return result, flaws


@lru_cache(256)
def _propagated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """The axes along which the function of an op says what it makes; along others, it makes what its operands are."""
    return tuple(
        i for i, along in enumerate(type_) if along[0] in (SHARDED, PARTIAL) or differs_by_own_variables(along)
    )


@lru_cache(256)
def _has_known_dimensions(type_: ReplicaType) -> bool:
    """Whether replicas have pieces along a known dimension, which a view may move."""
    return any(kind is SHARDED and dimension not in (None, FLAT) for kind, dimension in type_)


@lru_cache(256)
def _exchanged_type(before: ReplicaType, axes: Sequence[int], same: AxisType | None, reduces: bool) -> ReplicaType:
    """Result type of an op between replicas: `same` on all of a group, or else each one's shard of a value."""
    made = list(before)
    for i in axes:
        if same is not None or reduces or before[i][0] < SHARDED:
            made[i] = same or (SHARDED, FLAT)
    return tuple(made)


@lru_cache(256)
def _repeated_axes(type_: ReplicaType) -> tuple[int, ...]:
    """Axes along which equal values were summed."""
    return tuple(i for i, (kind, slot) in enumerate(type_) if slot == 2 and kind in (REPLICATED, VARYING))


@lru_cache(256)
def _diverged_axes(was: ReplicaType, after: ReplicaType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a variable has lost its declared type: those without a reduction, and the others. None, if a
    type is unknown."""
    if any(kind is UNKNOWN for kind, _ in after):
        return (), ()
    found = [
        i
        for i, (before, (kind, _)) in enumerate(zip(was, after, strict=True))
        if (before[0] is REPLICATED and kind > REPLICATED) or (before == (SHARDED, FLAT) and kind is PARTIAL)
    ]
    certain = tuple(i for i in found if after[i][0] is not VARYING or reduced_slot(after[i][1]) != after[i][1])
    return certain, tuple(i for i in found if i not in certain)


def _is_at_once(op: Op) -> bool:
    """Whether an op sums the result of another sum over the same axes, without a division."""
    (t, *_), (made, *_) = op.inputs, op.outputs or op.inputs
    before = t.producer
    if before is None or before.kind is not op.kind or before.attributes != op.attributes:
        return False
    return made.nelms > 1 and all(t.nelms > 1 for each in op.graph.ops if made in each.inputs for t in each.inputs)


def _without_reduction(along: AxisType) -> AxisType:
    return (along[0], unreduced_slot(along[1])) if along[0] is VARYING else along
