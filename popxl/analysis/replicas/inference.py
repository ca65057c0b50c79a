"""Inference of replication types: one pass over the ops of each graph, for the types of its inputs and variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from popxl import dtypes
from popxl.analysis.mesh import mesh_of
from popxl.analysis.replicas.axis_types import (
    LITERAL,
    NOT_KNOWN,
    OWN_DATA,
    REDUCED,
    REPEATED_SUM,
    REPLICATED,
    SAME,
    VALUES,
    ZEROS,
    AxisType,
    ReplicaType,
    join,
    join_all,
    join_axis,
)
from popxl.analysis.replicas.means import constant_number, is_replica_count
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
    """Infer the replication types of all values of a program, with findings of the pass."""
    if ir.replication_factor == 1:
        return Report(mesh_of(ir, ()))
    index = index_ops(ir.main_graph)
    variables = ir.main_graph.variables
    mesh = mesh_of(ir, index.collectives, variables)
    report = Report(mesh, index=index)
    if mesh is not None:
        TypeInference(report).infer(ir.main_graph, variables)
    return report


class _Outcome(NamedTuple):
    """Result of a graph for one tuple of input types.

    Attributes:
        outputs: types of the outputs.
        contents: final types of inputs and variables.
        changes: the last op that updates each of these, with the join of all updates; `None` without an update.
    """

    outputs: tuple[ReplicaType, ...]
    contents: tuple[ReplicaType, ...]
    changes: tuple[tuple[Op, ReplicaType] | None, ...]


class TypeInference:
    """Interprocedural inference: each graph once per tuple of input types."""

    def __init__(self, report: Report) -> None:
        self.report, self.mesh = report, report.known_mesh
        self.width = len(self.mesh.names)
        self.constant: ReplicaType = (LITERAL,) * self.width
        self.zero: ReplicaType = (ZEROS,) * self.width
        self.unknown: ReplicaType = (NOT_KNOWN,) * self.width
        self.outcomes: dict[tuple[Graph, tuple[ReplicaType, ...], int], _Outcome] = {}
        self.findings = TypeFindings(report)
        self.fed = self.unknown
        self.buffers: dict[RemoteBuffer, ReplicaType] = {}
        self.declared: Set[RemoteBuffer] = set()  # those of variables
        self.stores = 0  # number of stores that changed the type of a buffer; part of the cache key

    def infer(self, main: Graph, variables: Sequence[Variable]) -> None:
        """Add the types of all values, and the findings, to the report."""
        report, changed = self.report, {op.inputs[i].origin for op in main.ops for i in op.modified}
        initial = self._initial_types(variables, changed)
        self.declared = set(self.buffers)
        self.fed = self.feeds(report.index.collectives, {*compress(initial, map(changed.__contains__, variables))})
        self.findings.layer_axes = [i for i, along in enumerate(self.fed) if along == SAME]
        outcome = _GraphInference(self, main, [v.on_replica for v in variables], initial).infer()
        report.types |= zip(variables, initial, strict=True)
        repeated = self._changes(variables, initial, outcome)
        report.findings += [
            finding
            for finding in self.findings.by_op.values()
            if finding.category != REPEATED
            or not repeated.isdisjoint(finding.axes)
            or _is_immediately_repeated(finding.op)
        ]

    def _initial_types(self, variables: Sequence[Variable], changed: Set[Tensor]) -> tuple[ReplicaType, ...]:
        """Types of variables at the start of a run, joined for each remote buffer in `buffers`."""
        exchanges = self.report.index.exchanges
        stored = {op.attributes[op.kind.exchange] for op in exchanges if not op.outputs and not op.modified}
        remote = {v for v in variables if v.location_info.buffer in stored}
        types = tuple(variable_types(self.mesh, variables, changed | remote if remote else changed))
        for v, declared in zip(variables, types, strict=True):
            if (buffer := v.location_info.buffer) is not None:
                self.buffers[buffer] = join(self.buffers.get(buffer, declared), declared)
        return types

    def _changes(self, variables: Sequence[Variable], initial: Sequence[ReplicaType], outcome: _Outcome) -> set[str]:
        """Note changes of variables that are wrong; returns names of axes along which an equal operand was summed."""
        repeated: set[int] = set()
        for v, declared, final, change in zip(variables, initial, outcome.contents, outcome.changes, strict=True):
            if change is None:
                continue
            is_on_device = v.piece is not None or not v.location_info.isRemote()
            if is_on_device and (axes := own_axes(declared, change[1])):
                self.findings.variable_update(v, declared, *change, axes)
            repeated.update(repeated_axes(final))
            certain, conditional = diverged_axes(declared, final)
            if certain:
                self.report.diverged[v] = certain
            elif conditional:
                self.report.maybe_diverged[v] = conditional
        return {self.mesh.names[i] for i in repeated}

    def feeds(self, collectives: Sequence[Op], trained_types: Collection[ReplicaType]) -> ReplicaType:
        """Type of the host's feeds: varying, except along axes for which some op needs equal feeds.

        Sums of arrays need equal feeds along an axis without shared weights, if weights are shared along another axis:
        such axes divide layers (tensor parallelism).
        """
        feed_type = [OWN_DATA] * self.width
        by_axis = [*zip(*trained_types, strict=True)]
        common = {i for i, types in enumerate(by_axis) if any([along.kind is REPLICATED for along in types])}
        separate = {
            i for i, types in enumerate(by_axis) if any([along.per_replica is VALUES for along in types])
        } - common
        if separate and common:
            sums = (op for op in collectives if op.attributes.get("op") == "add" and op.inputs[0].nelms > 1)
            for axes in map(self.mesh.axes_of, sums):
                if len(axes) == 1 and axes[0] in separate:
                    feed_type[axes[0]] = SAME
        for op in collectives:
            if op.kind.needs_same_feeds(op.attributes):
                for i in self.mesh.axes_of(op):
                    feed_type[i] = SAME
        return tuple(feed_type)

    def run(self, graph: Graph, types: Sequence[ReplicaType]) -> _Outcome:
        """Outcome of a called graph for these input types, cached."""
        key = (graph, tuple(types), self.stores)
        outcome = self.outcomes.get(key)
        if outcome is None:
            outcome = self.outcomes[key] = _GraphInference(self, graph, graph.inputs, key[1]).infer()
        return outcome


class _Contents(dict[Tensor, ReplicaType]):
    """Current types of a graph's tensors; those of constants, views and aliases are derived on demand."""

    def __init__(self, program: TypeInference, types: Iterable[tuple[Tensor, ReplicaType]]) -> None:
        super().__init__(types)
        self.constant, self.zero, self.unknown = program.constant, program.zero, program.unknown

    def __missing__(self, t: Tensor) -> ReplicaType:
        op = t.producer
        if op is None:
            return self.zero if isinstance(t, Constant) and _is_zero(t.data) else self.constant
        if op.kind.view is not None:
            bases = join_all(self.of(op.inputs)) if op.inputs else self.constant
            return tuple(_view_type(op, along) for along in bases) if has_known_dimensions(bases) else bases
        return join_all(self.of(op.bases)) if op.kind.aliased else self.unknown

    def of(self, ts: Iterable[Tensor]) -> tuple[ReplicaType, ...]:
        return tuple(map(self.__getitem__, ts))


class _GraphInference:
    """One pass over the ops of a graph."""

    def __init__(
        self, program: TypeInference, graph: Graph, storages: Sequence[Tensor], input_types: Sequence[ReplicaType]
    ) -> None:
        self.program, self.graph, self.findings = program, graph, program.findings
        self.inputs, self.input_types = storages, tuple(input_types)
        self.storages: dict[Tensor, tuple[Tensor, ...]] = {}  # of aliases
        self.content = _Contents(program, zip(storages, input_types, strict=True))
        self.type_of = self.content.__getitem__
        self.changes: dict[Tensor, tuple[Op, ReplicaType]] = {}
        self.result_types: dict[Tensor, ReplicaType] = {}  # types of tensors at their definition, before later updates

    def infer(self) -> _Outcome:
        """Visit all ops, and report the types of their results."""
        report, types = self.program.report, self.content.of
        for op in report.index.by_graph[self.graph]:
            self.visit(op)
        self.record()
        report.graphs.setdefault(self.graph, []).append(self.input_types)
        return _Outcome(types(self.graph.outputs), types(self.inputs), tuple(map(self.changes.get, self.inputs)))

    def record(self) -> None:
        """Report the types of the graph's tensors, in addition to those of earlier passes."""
        types, result_types = self.program.report.types, self.result_types
        if self.graph in self.program.report.graphs:
            types |= {t: join(types.get(t, now), now) for t, now in (self.content | result_types).items()}
        else:
            types |= self.content
            types |= result_types

    def write(self, t: Tensor, type_: ReplicaType, change: tuple[Op, ReplicaType] | None) -> None:
        """Record an in-place update of a tensor: the new type, and the op with the type of its change."""
        content, result_types, base = self.content, self.result_types, t.origin
        if change is not None:
            recorded = self.changes.get(base, change)
            self.changes[base] = change if recorded[1] == change[1] else (change[0], join(recorded[1], change[1]))
        stored = self.storages.get(t, (t,))
        for s in stored:
            now = content[s]
            result_types.setdefault(s, now)
            content[s] = type_ if s is base and len(stored) == 1 else join(now, type_)

    def visit(self, op: Op) -> None:
        """Record the types of an op's results, and of what it overwrites."""
        kind, content = op.kind, self.content
        if kind.view is not None:
            add_alias(op, self.storages)
            for t in op.outputs:
                self.result_types[t] = content[t]
            return
        types = self.operand_types(op)
        results = self.results(op, types)
        if kind.overwrites is not None and not kind.graphs:  # `call` records what graphs overwrite
            self.overwrite(op, types, results[0])
        elif len(results) == 1:
            for t in op.outputs:
                content[t] = results[0]
        else:
            content |= zip(op.outputs, results, strict=False)

    def operand_types(self, op: Op) -> tuple[ReplicaType, ...]:
        """Types of an op's operands, as the op uses them."""
        kind, types = op.kind, tuple(map(self.type_of, op.inputs))
        if kind.overwrites is not None:
            return presumed_layout(types, op.modified)
        if kind.drops is not None and op.attributes[kind.drops.ratio]:
            return masked_types(types, op.operand_names().index(kind.drops.seed))
        return types

    def results(self, op: Op, types: tuple[ReplicaType, ...]) -> Sequence[ReplicaType]:
        """Result types of an op: one per result, or a single one for all."""
        kind = op.kind
        if not kind.is_carried_out_by_others:
            is_plain = kind.overwrites is None and not kind.asserts  # the common case
            plain = _plain_result(types) if is_plain else None
            return self.local_results(op, types) if plain is None else [plain]
        if kind.graphs:
            return self.call(op, types)
        if kind.exchange:
            return [self.exchange(op)]
        return [self.collective_result(op, types)] if kind.between_replicas else self.local_results(op, types)

    def overwrite(self, op: Op, types: tuple[ReplicaType, ...], result: ReplicaType) -> None:
        """Record the types of overwritten operands and results of an in-place op."""
        if op.kind.aliased:
            add_alias(op, self.storages)
        change = op, join_of_others(types, op.modified) or self.program.constant
        for i in op.modified:
            self.write(op.inputs[i], kept_layout(types[i], result), change)
        for t in op.outputs:
            if op.kind.aliased and t is op.outputs[0]:
                self.result_types[t] = self.content[t]
            else:
                self.content[t] = result

    def local_results(self, op: Op, types: tuple[ReplicaType, ...]) -> Sequence[ReplicaType]:
        """Result types of an op without communication: one per result, or a single one for all."""
        kind = op.kind
        if kind.overwrites is not None and kind.overwrites.forgets(op.attributes):
            return [join_of_others(types, op.modified) or self.program.constant]
        if not types:
            return [self.program.zero if op.attributes.get("init_type") == "zero" else self.program.constant]
        joined = join_all(types)
        if kind.asserts:
            return [self.asserted_type(op, joined)]
        if kind.contracts is not None and self.findings.layer_axes:
            self.findings.missing_sum(op, types, self.is_given)
        if not propagated_axes(joined) or kind.is_carried_out_by_others:
            if (zero := self.program.zero) not in types:
                return [joined]
            is_zero = makes_zero(op, {i for i, type_ in enumerate(types) if type_ == zero})
            return [zero if is_zero else self.program.constant if joined == zero else joined]
        results, flaws = op_effect(op, types, joined)
        is_test = flaws and all(t.dtype is dtypes.bool for t in op.outputs)  # a test of values, as `isnan`
        if not op.modified and not is_test:
            for i, flaw in flaws:
                self.findings.nonlinear_use(op, i, [t[i] for t in types], flaw)
        return results

    def asserted_type(self, op: Op, operand_type: ReplicaType) -> ReplicaType:
        """Type of a value that the program asserts to be equal in a group."""
        axes = self.program.mesh.axes_of(op)
        self.findings.contradiction(op, operand_type, axes)
        return tuple(SAME if i in axes else axis_type for i, axis_type in enumerate(operand_type))

    def is_given(self, t: Tensor) -> bool:
        """Whether a tensor is a graph input or variable, its view, or its transpose."""
        if t.producer is not None and t.producer.attributes.get("permutation"):
            (t,) = t.producer.inputs
        return all(s.producer is None and not isinstance(s, Constant) for s in self.storages.get(t, (t,)))

    def exchange(self, op: Op) -> ReplicaType:
        """Type of a loaded value; for a store, join the type of the buffer."""
        buffers, channel = self.program.buffers, op.attributes[op.kind.exchange]
        if not isinstance(channel, RemoteBuffer):
            if not op.outputs or op.outputs[0].nelms == 1:
                return self.program.constant
            self.program.report.fed = self.program.fed
            return self.program.fed
        if not op.outputs and not op.modified:
            stored = self.content[op.inputs[0]]
            before = buffers.setdefault(channel, stored)
            if (joined := held_type(before, stored, channel in self.program.declared)) != before:
                buffers[channel] = joined
                self.program.stores += 1
        return buffers.get(channel, self.program.unknown)

    def collective_result(self, op: Op, types: Sequence[ReplicaType]) -> ReplicaType:
        """Result type of a collective."""
        effect, name = op.kind.exchanged(op.attributes), op.attributes.get("op")
        operand_type = join_all(types)
        if effect == "own":
            return operand_type
        report, axes = self.program.report, self.program.mesh.axes_of(op)
        if effect is None:
            if axes:
                report.untyped.setdefault(op, "an op between replicas that does not say what it makes")
            return tuple(NOT_KNOWN if i in axes else axis_type for i, axis_type in enumerate(operand_type))
        equal_type = SAME
        if name is not None:
            equal_type = REPEATED_SUM if self.findings.reduction(op, operand_type, axes, name) else REDUCED
            recorded = report.reductions.get(op)
            recorded_type = operand_type if recorded is None else join(recorded.operand_type, operand_type)
            report.reductions[op] = reduction(name, recorded_type, axes, self.program.mesh.sizes)
        elif effect == "same" and op.inputs[0].meta_shape:
            self.findings.gather(op, operand_type, axes)
        return exchanged_type(operand_type, axes, equal_type if effect == "same" else None, name is not None)

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def call(self, op: Op, types: Sequence[ReplicaType]) -> Sequence[ReplicaType]:
        if is_call(op):
            (graph,) = op.called_graphs
            outcome = self.program.run(graph, self.bound_types(op, graph, types))
            for i in op.modified:
                self.write(op.inputs[i], outcome.contents[i], outcome.changes[i])
            return outcome.outputs
        if is_loop(op):
            return self.loop(op, types)
        condition = tuple(REDUCED if along == REPEATED_SUM else along for along in types[0])  # multiples of conditions
        results: list[ReplicaType] = [condition] * len(op.outputs)
        for run in op.runs:
            bound = self.bound_types(op, run.graph, types[run.first : run.first + len(run.operands)])
            outputs = self.program.run(run.graph, bound).outputs
            results = [join(a, b) for a, b in zip(results, outputs, strict=False)]
        return results

    def bound_types(self, op: Op, graph: Graph, types: Sequence[ReplicaType]) -> list[ReplicaType]:
        """Input types of a graph that an op runs; unknown for inputs without bindings."""
        num_own = op.kind.runs.own_inputs if op.kind.runs is not None else 0
        missing = len(graph.inputs) - num_own - len(types)
        return [self.program.constant] * num_own + list(types) + [self.program.unknown] * missing

    def loop(self, op: Op, types: Sequence[ReplicaType]) -> list[ReplicaType]:
        """Infer a loop: its body until the types of carried values reach a fixpoint."""
        (run,) = op.runs
        first_input, first_output, carried = len(run.op_inputs), run.trait.own_outputs, run.carried
        if not run.iterations:
            return [*types[:carried], *[self.program.constant] * (len(op.outputs) - carried)]
        bound = self.bound_types(op, run.graph, types)
        while True:
            previous, stores = list(bound), self.program.stores
            outcome = self.program.run(run.graph, bound)
            for k in range(carried):
                bound[first_input + k] = join(bound[first_input + k], outcome.outputs[first_output + k])
            for i in op.modified:
                bound[first_input + i] = join(bound[first_input + i], outcome.contents[first_input + i])
            if bound == previous and self.program.stores == stores:
                break
        for i in op.modified:
            self.write(op.inputs[i], outcome.contents[first_input + i], outcome.changes[first_input + i])
        results = outcome.outputs[first_output:]
        return [*results[:carried], *map(stacked_type, results[carried:])]


@lru_cache(4096)
def _plain_result(types: tuple[ReplicaType, ...]) -> ReplicaType | None:
    """Join of operand types for a local op; `None` if the result depends on its function: shards, terms, zeros."""
    if not types or any(ZEROS in type_ for type_ in types):
        return None
    joined = join_all(types)
    return None if propagated_axes(joined) else joined


def _view_type(op: Op, along: AxisType) -> AxisType:
    """Type of a view along an axis, given its source's type."""
    if not has_known_dimensions((along,)):
        return along
    return join_axis(result_types(op, [along] * len(op.inputs))[0])


def _is_zero(numbers: np.ndarray) -> bool:
    return not (numbers if numbers.size == 1 else numbers.any())  # the truth of a scalar is 50 times faster than `any`


def _is_immediately_repeated(op: Op) -> bool:
    """Whether an op sums the result of the same sum, and no reader seems to divide by the replica count."""
    (t, *_), (summed, *_) = op.inputs, op.outputs or op.inputs
    earlier = t.producer
    if earlier is None or earlier.kind is not op.kind or earlier.attributes != op.attributes:
        return False
    numbers = [
        t for user in op.graph.ops if summed in user.inputs for t in user.inputs if t is not summed and t.nelms == 1
    ]
    return not numbers or summed.nelms == 1 and not any(_may_be_count(t, op.attributes["group_size"]) for t in numbers)


def _may_be_count(t: Tensor, count: int) -> bool:
    """Whether a scalar may be a replica count or its inverse; true for non-constants."""
    number = constant_number(t)
    return not number or is_replica_count(number, count)
