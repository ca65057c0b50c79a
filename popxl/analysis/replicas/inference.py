"""Inference of replication types: one pass over the ops of each graph, for the types of its inputs and variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from popxl import dtypes
from popxl.analysis.mesh import mesh_of
from popxl.analysis.replicas.axis_types import (
    LITERAL,
    NOT_KNOWN,
    OWN,
    OWN_DATA,
    REDUCED,
    REPEATED_SUM,
    REPLICATED,
    SAME,
    ZEROS,
    AxisType,
    ReplicaType,
    join,
    join_all,
    join_axis,
)
from popxl.analysis.replicas.means import constant_number, is_of_replicas
from popxl.analysis.replicas.op_effects import makes_zero, op_effect, propagated_axes, result_types
from popxl.analysis.replicas.op_index import index_ops
from popxl.analysis.replicas.report import REPEATED, Report, reduction
from popxl.analysis.replicas.type_changes import (
    diverged_axes,
    exchanged_type,
    has_known_dimensions,
    held_type,
    join_of_others,
    kept_layout,
    masked_types,
    presumed_layout,
    repeated_axes,
    stacked_type,
)
from popxl.analysis.replicas.type_findings import TypeFindings, own_axes
from popxl.analysis.replicas.variable_types import variable_types
from popxl.core.aliasing import add_alias
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import is_call, is_loop
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
    variables = ir.main_graph.variables
    mesh = mesh_of(ir, index.collectives, variables)
    report = Report(mesh, index=index)
    if mesh is not None:
        TypeInference(ir.main_graph, variables, report)
    return report


class _Outcome(NamedTuple):
    """Effect of a graph's run on given types: types of outputs, and final types of inputs and variables; and the last
    op that changes each of those, with the common type of all changes."""

    outputs: tuple[ReplicaType, ...]
    contents: tuple[ReplicaType, ...]
    changes: tuple[tuple[Op, ReplicaType] | None, ...]


class TypeInference:
    """The inference: each graph once for each tuple of types that it is given."""

    def __init__(self, main: Graph, variables: Sequence[Variable], report: Report) -> None:
        self.report, self.mesh = report, report.known_mesh
        self.width = len(self.mesh.names)
        self.given: ReplicaType = (LITERAL,) * self.width
        self.zero: ReplicaType = (ZEROS,) * self.width
        self.unknown: ReplicaType = (NOT_KNOWN,) * self.width
        self.outcomes: dict[tuple[Graph, tuple[ReplicaType, ...], int], _Outcome] = {}
        self.findings = TypeFindings(report)
        self.buffers: dict[RemoteBuffer, ReplicaType] = {}
        self.stores = 0  # those that have changed the type of a buffer, so that graphs make other types
        held = [v.on_replica for v in variables]
        changed = {op.inputs[i].origin for op in main.ops for i in op.modified}
        stored = {
            op.attributes[op.kind.exchange] for op in report.index.exchanges if not op.outputs and not op.modified
        }
        remote = {v for v in variables if v.location_info.buffer in stored}
        first = tuple(variable_types(self.mesh, variables, changed | remote if remote else changed))
        for v, was in zip(variables, first, strict=True):
            if (buffer := v.location_info.buffer) is not None:
                self.buffers[buffer] = join(self.buffers.get(buffer, was), was)
        self.declared = {*self.buffers}
        self.fed = self.feeds(report.index.collectives, {*compress(first, map(changed.__contains__, variables))})
        self.findings.divided = [i for i, along in enumerate(self.fed) if along == SAME]
        outcome = _GraphInference(self, main, held, first).outcome
        repeated: set[int] = set()  # axes along which an operand that is the same on all replicas was summed
        report.types |= zip(variables, first, strict=True)
        alike: dict[tuple[ReplicaType, ReplicaType], list[Variable]] = {}  # there are many variables, and few types
        for v, was, after, change in zip(variables, first, outcome.contents, outcome.changes, strict=True):
            if change is not None:
                alike.setdefault((was, after), []).append(v)
                is_held = v.piece is not None or not v.location_info.isRemote()
                if is_held and (own := own_axes(was, change[1])):
                    self.findings.variable_update(v, was, *change, own)
        for (was, after), some in alike.items():
            repeated.update(repeated_axes(after))
            certain, others = diverged_axes(was, after)
            diverged = report.diverged if certain else report.maybe_diverged
            diverged |= dict.fromkeys(some if certain or others else (), certain or others)
        of_learning = {self.mesh.names[i] for i in repeated}
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
        along = [*zip(*learned, strict=True)]
        shared = {i for i, types in enumerate(along) if any([each.kind is REPLICATED for each in types])}
        apart = {i for i, types in enumerate(along) if any([each.own is OWN for each in types])} - shared
        for op in collectives if apart and shared else ():
            axes = self.mesh.axes_of(op)
            if len(axes) == 1 and axes[0] in apart and op.attributes.get("op") == "add" and op.inputs[0].nelms > 1:
                found[axes[0]] = SAME
        for op in collectives:
            if op.kind.needs_same_feeds(op.attributes):
                for i in self.mesh.axes_of(op):
                    found[i] = SAME
        return tuple(found)

    def run(self, graph: Graph, given: Sequence[ReplicaType]) -> _Outcome:
        """What a called graph makes of values of these types."""
        key = (graph, tuple(given), self.stores)
        found = self.outcomes.get(key)
        if found is None:
            found = self.outcomes[key] = _GraphInference(self, graph, graph.inputs, key[1]).outcome
        return found


class _Contents(dict[Tensor, ReplicaType]):
    """Current type of each tensor of a graph. Types of constants, views and aliases are derived."""

    def __init__(self, program: TypeInference, held: Iterable[tuple[Tensor, ReplicaType]]) -> None:
        super().__init__(held)
        self.given, self.zero, self.unknown = program.given, program.zero, program.unknown

    def __missing__(self, t: Tensor) -> ReplicaType:
        op = t.producer
        if op is None:
            return self.zero if isinstance(t, Constant) and _is_zero(t.data) else self.given
        if op.kind.view is not None:
            bases = join_all(self.of(op.inputs)) if op.inputs else self.given
            return tuple(_view_type(op, along) for along in bases) if has_known_dimensions(bases) else bases
        return join_all(self.of(op.bases)) if op.kind.aliased else self.unknown

    def of(self, ts: Iterable[Tensor]) -> tuple[ReplicaType, ...]:
        return tuple(map(self.__getitem__, ts))


class _GraphInference:
    """One pass over the ops of a graph."""

    def __init__(
        self, program: TypeInference, graph: Graph, held: Sequence[Tensor], given: Sequence[ReplicaType]
    ) -> None:
        self.program, self.graph, self.findings = program, graph, program.findings
        self.storages: dict[Tensor, tuple[Tensor, ...]] = {}  # of aliases
        self.content = _Contents(program, zip(held, given, strict=True))
        self.type_of = self.content.__getitem__
        self.changes: dict[Tensor, tuple[Op, ReplicaType]] = {}
        self.made: dict[Tensor, ReplicaType] = {}  # types of tensors when they are made, unless still their contents'
        for op in program.report.index.by_graph[graph]:
            self.visit(op)
        self.record()
        types = self.content.of
        self.outcome = _Outcome(types(graph.outputs), types(held), tuple(map(self.changes.get, held)))
        program.report.graphs.setdefault(graph, []).append(tuple(given))

    def record(self) -> None:
        """Report the types of the graph's tensors, in addition to those of earlier passes."""
        types, made = self.program.report.types, self.made
        if self.graph in self.program.report.graphs:
            types |= {t: join(types.get(t, now), now) for t, now in (self.content | made).items()}
        else:
            types |= self.content
            types |= made

    def write(self, t: Tensor, type_: ReplicaType, change: tuple[Op, ReplicaType] | None) -> None:
        """Record the type that an op writes to a tensor, and the op's change of it."""
        content, made, base = self.content, self.made, t.origin
        if change is not None:
            before = self.changes.get(base, change)
            self.changes[base] = change if before[1] == change[1] else (change[0], join(before[1], change[1]))
        stored = self.storages.get(t, (t,))
        for s in stored:
            now = content[s]
            made.setdefault(s, now)
            content[s] = type_ if s is base and len(stored) == 1 else join(now, type_)

    def visit(self, op: Op) -> None:
        kind, content = op.kind, self.content
        if kind.view is not None:
            add_alias(op, self.storages)
            for t in op.outputs:
                self.made[t] = content[t]
            return
        types = tuple(map(self.type_of, op.inputs))
        if kind.overwrites is not None:
            types = presumed_layout(types, op.modified)
        elif kind.drops is not None and op.attributes[kind.drops.ratio]:
            types = masked_types(types, op.operand_names().index(kind.drops.seed))
        if not kind.is_carried_out_by_others:
            if kind.overwrites is None and not kind.asserts and (plain := _plain_result(types)) is not None:
                for t in op.outputs:  # as most ops
                    content[t] = plain
                return
            made = self.local_results(op, types)
        elif kind.graphs:
            content |= zip(op.outputs, self.call(op, types), strict=False)
            return
        elif kind.exchange:
            made = [self.exchange(op)]
        else:
            made = [self.collective_result(op, types)] if kind.between_replicas else self.local_results(op, types)
        if kind.overwrites is not None:
            self.overwrite(op, types, made[0])
            return
        if len(made) == 1:
            for t in op.outputs:
                content[t] = made[0]
        else:
            content |= zip(op.outputs, made, strict=False)

    def overwrite(self, op: Op, types: tuple[ReplicaType, ...], made: ReplicaType) -> None:
        """Record the types of overwritten operands and results of an op, with its change."""
        if op.kind.aliased:
            add_alias(op, self.storages)
        change = op, join_of_others(types, op.modified) or self.program.given
        for i in op.modified:
            self.write(op.inputs[i], kept_layout(types[i], made), change)
        for t in op.outputs:
            if op.kind.aliased and t is op.outputs[0]:
                self.made[t] = self.content[t]
            else:
                self.content[t] = made

    def local_results(self, op: Op, types: tuple[ReplicaType, ...]) -> Sequence[ReplicaType]:
        """Result types of an op without communication from operand types: one per result, or a single one."""
        kind = op.kind
        if kind.overwrites is not None and kind.overwrites.forgets(op.attributes):
            return [join_of_others(types, op.modified) or self.program.given]
        if not types:
            return [self.program.zero if op.attributes.get("init_type") == "zero" else self.program.given]
        found = join_all(types)
        if kind.asserts:
            return [self.asserted_type(op, found)]
        if kind.contracts is not None and self.findings.divided:
            self.findings.missing_sum(op, types, self.is_given)
        if not propagated_axes(found) or kind.is_carried_out_by_others:
            if (zero := self.program.zero) not in types:
                return [found]
            is_zero = makes_zero(op, {i for i, each in enumerate(types) if each == zero})
            return [zero if is_zero else self.program.given if found == zero else found]
        made, flaws = op_effect(op, types, found)
        is_test = flaws and all(t.dtype is dtypes.bool for t in op.outputs)  # a test of values, as `isnan`
        if not op.modified and not is_test:
            for i, flaw in flaws:
                self.findings.nonlinear_use(op, i, [t[i] for t in types], flaw)
        return made

    def asserted_type(self, op: Op, before: ReplicaType) -> ReplicaType:
        """Apply the program's statement that replicas of a group hold equal values."""
        axes = self.program.mesh.axes_of(op)
        self.findings.contradiction(op, before, axes)
        return tuple(SAME if i in axes else each for i, each in enumerate(before))

    def is_given(self, t: Tensor) -> bool:
        """Whether a tensor is a graph input or variable, its view, or its transpose."""
        if t.producer is not None and t.producer.attributes.get("permutation"):
            (t,) = t.producer.inputs
        return all(s.producer is None and not isinstance(s, Constant) for s in self.storages.get(t, (t,)))

    def exchange(self, op: Op) -> ReplicaType:
        """Type of what a load makes; or note what is stored."""
        buffers, with_what = self.program.buffers, op.attributes[op.kind.exchange]
        if not isinstance(with_what, RemoteBuffer):
            if not op.outputs or op.outputs[0].nelms == 1:
                return self.program.given
            self.program.report.fed = self.program.fed
            return self.program.fed
        if not op.outputs and not op.modified:
            now = self.content[op.inputs[0]]
            was = buffers.setdefault(with_what, now)
            if (held := held_type(was, now, with_what in self.program.declared)) != was:
                buffers[with_what] = held
                self.program.stores += 1
        return buffers.get(with_what, self.program.unknown)

    def collective_result(self, op: Op, types: Sequence[ReplicaType]) -> ReplicaType:
        """What an op makes that replicas carry out together."""
        makes, name = op.kind.exchanged(op.attributes), op.attributes.get("op")
        before = join_all(types)
        if makes == "own":
            return before
        report, axes = self.program.report, self.program.mesh.axes_of(op)
        if makes is None:
            if axes:
                report.untyped.setdefault(op, "an op between replicas that does not say what it makes")
            return tuple(NOT_KNOWN if i in axes else each for i, each in enumerate(before))
        same = SAME
        if name is not None:
            same = REPEATED_SUM if self.findings.reduction(op, before, axes, name) else REDUCED
            known = report.reductions.get(op)
            of = before if known is None else join(known.before, before)
            report.reductions[op] = reduction(name, of, axes, self.program.mesh.sizes)
        elif makes == "same" and op.inputs[0].meta_shape:
            self.findings.gather(op, before, axes)
        return exchanged_type(before, axes, same if makes == "same" else None, name is not None)

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def call(self, op: Op, given: Sequence[ReplicaType]) -> Sequence[ReplicaType]:
        if is_call(op):
            (graph,) = op.called_graphs
            outcome = self.program.run(graph, self.bound_types(op, graph, given))
            for i in op.modified:
                self.write(op.inputs[i], outcome.contents[i], outcome.changes[i])
            return outcome.outputs
        if is_loop(op):
            return self.loop(op, given)
        condition = tuple(REDUCED if along == REPEATED_SUM else along for along in given[0])  # a multiple tells as much
        results: list[ReplicaType] = [condition] * len(op.outputs)
        for run in op.runs:
            bound = self.bound_types(op, run.graph, given[run.first : run.first + len(run.given)])
            outputs = self.program.run(run.graph, bound).outputs
            results = [join(a, b) for a, b in zip(results, outputs, strict=False)]
        return results

    def bound_types(self, op: Op, graph: Graph, given: Sequence[ReplicaType]) -> list[ReplicaType]:
        """Types of the inputs of a graph that an op runs. What nothing is bound to is unknown."""
        own = op.kind.runs.own_inputs if op.kind.runs is not None else 0
        missing = len(graph.inputs) - own - len(given)
        return [self.program.given] * own + list(given) + [self.program.unknown] * missing

    def loop(self, op: Op, given: Sequence[ReplicaType]) -> list[ReplicaType]:
        """Infer a loop: its graph, until the types of carried values are stable."""
        (run,) = op.runs
        own_in, own_out, carried = len(run.op_inputs), run.trait.own_outputs, run.carried
        if not run.iterations:
            return [*given[:carried], *[self.program.given] * (len(op.outputs) - carried)]
        bound = self.bound_types(op, run.graph, given)
        while True:
            before, stores = list(bound), self.program.stores
            outcome = self.program.run(run.graph, bound)
            for k in range(carried):
                bound[own_in + k] = join(bound[own_in + k], outcome.outputs[own_out + k])
            for i in op.modified:
                bound[own_in + i] = join(bound[own_in + i], outcome.contents[own_in + i])
            if bound == before and self.program.stores == stores:
                break
        for i in op.modified:
            self.write(op.inputs[i], outcome.contents[own_in + i], outcome.changes[own_in + i])
        results = outcome.outputs[own_out:]
        return [*results[:carried], *map(stacked_type, results[carried:])]


@lru_cache(4096)
def _plain_result(types: tuple[ReplicaType, ...]) -> ReplicaType | None:
    """Type of the results of any op that computes on each replica; `None` if its function has a say: for shards, terms
    of a sum, and zeros."""
    if not types or any(ZEROS in each for each in types):
        return None
    found = join_all(types)
    return None if propagated_axes(found) else found


def _view_type(op: Op, along: AxisType) -> AxisType:
    """Type of a view along an axis, given its source's type."""
    if not has_known_dimensions((along,)):
        return along
    return join_axis(result_types(op, [along] * len(op.inputs))[0])


def _is_zero(numbers: np.ndarray) -> bool:
    return not (numbers if numbers.size == 1 else numbers.any())  # the truth of one number takes a fiftieth of `any`


def _is_at_once(op: Op) -> bool:
    """Whether an op sums the result of another sum over the same axes, and no reader seems to divide the result."""
    (t, *_), (made, *_) = op.inputs, op.outputs or op.inputs
    before = t.producer
    if before is None or before.kind is not op.kind or before.attributes != op.attributes:
        return False
    numbers = [t for each in op.graph.ops if made in each.inputs for t in each.inputs if t is not made and t.nelms == 1]
    return not numbers or made.nelms == 1 and not any(_may_be_count(t, op.attributes["group_size"]) for t in numbers)


def _may_be_count(t: Tensor, count: int) -> bool:
    """Whether a number may be a number of replicas, or its inverse; only constants tell."""
    number = constant_number(t)
    return not number or is_of_replicas(number, count)
