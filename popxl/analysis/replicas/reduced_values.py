"""Forward tracking of reduced values: from reductions over replicas to variable updates and stores.

Values are tracked through linear ops, calls and accumulators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from popxl.analysis.replicas.means import constant_number, is_replica_count
from popxl.analysis.replicas.report import Report
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.graph import Graph

LINEAR = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Neg", "Sub"})
"""Types of ops through which a gradient is tracked from its reduction to the update."""


@dataclass(slots=True)  # not frozen, which takes thrice as long to make
class ReducedValue:
    """Path from reductions to a value.

    Attributes:
        reductions: reductions, in order.
        factor: constant factor since the reduction; unknown otherwise.
        scaled: last op that scaled it.
        scalars: scalars that it was multiplied with or divided by.
    """

    reductions: tuple[Op, ...]
    factor: float = 1.0
    scaled: Op | None = None
    scalars: frozenset[Tensor] = frozenset()

    def axes_and_weight(self, report: Report) -> tuple[tuple[int, ...], float]:
        """Positions of the axes along which replicas had different values before the reductions, and the weight of one
        replica's value. The mean of equal values is the value, and their sum a multiple."""
        axes: tuple[int, ...] = ()
        scale = self.factor
        for op in self.reductions:
            reduction = report.reductions[op]
            axes = tuple(sorted({*axes, *reduction.varying_axes})) if axes else reduction.varying_axes
            scale *= reduction.weight
        return axes, scale


@dataclass(slots=True)
class Update:
    """Variable update by a reduced value.

    Attributes:
        op: op that makes the change.
        target: updated variable, or input of a graph.
        value: reduced value that it is updated by.
        axes: positions of the axes along which replicas had different values before the reductions.
        scale: weight of one replica's value.
    """

    op: Op
    target: Tensor
    value: ReducedValue
    axes: tuple[int, ...]
    scale: float

    @property
    def reduction_name(self) -> str:
        """Name of the last reduction: "add" or "mean"."""
        return self.value.reductions[-1].attributes["op"]

    @property
    def constants(self) -> str:
        """Attributes of the op; none for a call, because a graph may be made for each shape."""
        return "" if self.op.called_graphs else repr(self.op.attributes)


TrackedValues = dict[Tensor, ReducedValue]
Stored = list[tuple[Tensor, ReducedValue]]


def reduced_values(report: Report) -> Iterator[tuple[list[Update], Stored]]:
    """Updates and stored scalars of each graph that reduces values, or calls a graph that returns reduced values."""
    returned: dict[Graph, TrackedValues] = {}
    reducing = {op.graph for op in report.reductions}
    called: dict[Graph, list[Graph]] = defaultdict(list)
    for op in report.index.calls:
        called[op.graph] += op.called_graphs
    for graph in report.graphs:  # callees first
        if graph in reducing or any(map(returned.get, called[graph])):
            tracked: TrackedValues = {}
            yield _track_graph(graph, report, tracked, returned)
            returned[graph] = {t: tracked[t] for t in (*graph.outputs, *graph.inputs) if t in tracked}


def _track_graph(
    graph: Graph, report: Report, tracked: TrackedValues, returned: Mapping[Graph, TrackedValues]
) -> tuple[list[Update], Stored]:
    """Updates by reduced values in a graph, and reduced scalars that it stores.

    Args:
        tracked: reduced values of the graph; extended in place.
        returned: reduced values that callees return, or leave in their inputs.
    """
    updates: list[Update] = []
    stored: Stored = []
    tracked_keys = tracked.keys()
    for op in report.index.by_graph[graph]:
        operands = [] if tracked_keys.isdisjoint(op.inputs) else [t for t in op.inputs if t in tracked]
        if operands:
            if op.modified:
                updates += _updates(report, op, tracked)
            elif op.kind.exchange and not op.outputs and operands[0].nelms == 1:
                stored.append((operands[0], tracked[operands[0]]))
        has_reduced = bool(operands) or op in report.reductions
        modified = [op.inputs[i].origin for i in op.modified] if has_reduced else []
        if op.kind.graphs:
            for t in modified:
                tracked.pop(t, None)
            if returned:
                tracked |= _returned_by_call(op, returned)
        elif has_reduced:
            result = _tracked_result(op, operands, tracked, report)
            for t in (*op.outputs, *modified):
                if result is not None:
                    tracked[t] = result
                else:
                    tracked.pop(t, None)
    return updates, stored


def _returned_by_call(op: Op, returned: Mapping[Graph, TrackedValues]) -> Iterator[tuple[Tensor, ReducedValue]]:
    """Reduced values that callees return, or leave in accumulators. Scalars are left out: a reduced scalar that a graph
    returns is a loss."""
    for run in op.runs:
        inner_values = returned.get(run.graph, {})
        inner_outputs = () if run.trait.chooses else run.graph.outputs[run.trait.own_outputs :]
        pairs = [*zip(op.outputs, inner_outputs, strict=False)]
        pairs += [(t.origin, inner) for inner, t in run.bindings]
        yield from ((t, inner_values[inner]) for t, inner in pairs if inner in inner_values and t.nelms > 1)


def _updates(report: Report, op: Op, tracked: TrackedValues) -> Iterator[Update]:
    """Updates of variables by reduced values: each updates the first variable of equal size."""
    changed = [op.inputs[i].origin for i in sorted(op.modified)]
    operands = [(t, t.nelms) for i, t in enumerate(op.inputs) if i not in op.modified and t in tracked]
    sizes = [size for _, size in operands]
    for t, size in operands:
        if size > 1 and sizes.count(size) == 1:
            target = next((v for v in changed if v.producer is None and v.nelms == size), None)
            if target is not None:
                yield Update(op, target, tracked[t], *tracked[t].axes_and_weight(report))


def _tracked_result(op: Op, operands: Sequence[Tensor], tracked: TrackedValues, report: Report) -> ReducedValue | None:
    """Reduced value of an op's result, given its reduced `operands`; `None` for untracked results."""
    if op in report.reductions:
        if op.attributes["op"] not in ("add", "mean"):
            return None
        if not operands:
            return _reduction_result(op, report)
        earlier = tracked[op.inputs[0]]
        return replace(earlier, reductions=(*earlier.reductions, op))
    if op.modified:
        return _accumulated(op, operands, tracked)
    if len(operands) == 1:
        return scaled(op, operands[0], tracked[operands[0]])
    return _uniform_sum([tracked[t] for t in op.inputs if t in tracked], op, report)


def _uniform_sum(terms: Sequence[ReducedValue], op: Op, report: Report) -> ReducedValue | None:
    """Sum of values with equal reductions, such as the gradients of several uses."""
    if op.op_type not in ("Add", "Sum") or len(terms) < len(op.inputs):
        return None
    distinct = {
        (*term.axes_and_weight(report), term.scalars, *(reduction.attributes["op"] for reduction in term.reductions))
        for term in terms
    }
    return terms[0] if len(distinct) == 1 else None


def _accumulated(op: Op, operands: Sequence[Tensor], tracked: TrackedValues) -> ReducedValue | None:
    """New value of an accumulator, if it sums or averages values with one kind of reduction."""
    rule = op.kind.sharding_rule
    if rule is None or len(op.modified) > 1:
        return None
    (accumulator,) = op.modified
    added = [t for t in operands if t is not op.inputs[accumulator]]
    if len(added) != 1:
        return None
    positions = {accumulator, op.inputs.index(added[0])}
    is_sum = any(positions <= group for group in rule.linear_positions(op.operand_names()))
    return tracked[added[0]] if is_sum and added[0].nelms == op.inputs[accumulator].nelms else None


def scaled(op: Op, t: Tensor, reduced: ReducedValue) -> ReducedValue | None:
    """Result of an op on a reduced value `t`, if elementwise linear."""
    if op.modified or not op.outputs:
        return None
    if op.kind.between_replicas:
        return reduced
    linear = op.kind.view is not None or op.op_type in LINEAR
    if not linear or op.outputs[0].nelms != t.nelms or (op.op_type == "Div" and t is not op.inputs[0]):
        return None
    if op.op_type in ("Mul", "Div"):
        for scalar in op.inputs:
            if scalar is t or scalar.nelms != 1:
                continue
            number = constant_number(scalar)
            if number is None:
                reduced = replace(reduced, scalars=reduced.scalars | {scalar})
            elif number:
                number = number if op.op_type == "Mul" else 1 / number
                reduced = replace(reduced, factor=reduced.factor * number, scaled=op)
    return reduced


def _reduction_result(op: Op, report: Report) -> ReducedValue:
    """Result of a reduction, including an earlier scale by a replica count; other scales belong to the loss."""
    t = op.inputs[0]
    scale = t.producer
    while scale is not None and scale.op_type in ("Cast", "Identity"):
        scale = scale.inputs[0].producer
    if scale is None or scale.op_type not in ("Mul", "Div") or t.nelms == 1 or scale.inputs[0].nelms != t.nelms:
        return ReducedValue((op,))
    factor = constant_number(scale.inputs[1])
    if not factor or not is_replica_count(factor, op.attributes["group_size"], *report.known_mesh.sizes):
        return ReducedValue((op,))
    return ReducedValue((op,), factor=factor if scale.op_type == "Mul" else 1 / factor, scaled=scale)
