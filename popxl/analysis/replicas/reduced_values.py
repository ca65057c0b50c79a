"""Reduced values: followed from the reductions over replicas to the variables that they change, and to what is stored.

They are followed through linear ops, calls, and accumulators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from popxl.analysis.replicas.means import constant_number, is_of_replicas
from popxl.analysis.replicas.report import Report
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.graph import Graph

LINEAR = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Neg", "Sub"})
"""Ops through which a gradient is followed from its reduction to the update."""


@dataclass(slots=True)  # not frozen, which takes thrice as long to make
class ReducedValue:
    """Path from reductions to a value.

    Attributes:
        by: reductions, in order.
        factor: constant factor since the reduction; unknown otherwise.
        scaled: last op that scaled it.
        scalars: scalars that it was multiplied with or divided by.
    """

    by: tuple[Op, ...]
    factor: float = 1.0
    scaled: Op | None = None
    scalars: frozenset[Tensor] = frozenset()

    def completed(self, report: Report) -> tuple[tuple[int, ...], float]:
        """Positions of the axes along which replicas had different values before the reductions; and the weight of one
        such value. The mean of equal values changes nothing, and their sum is a multiple."""
        axes: tuple[int, ...] = ()
        scale = self.factor
        for op in self.by:
            each = report.reductions[op]
            axes = tuple(sorted({*axes, *each.completed})) if axes else each.completed
            scale *= each.weight
        return axes, scale


@dataclass(slots=True)
class Update:
    """Variable update by a reduced value.

    Attributes:
        op: op that makes the change.
        of: variable, or input of a graph.
        how: reductions of the value that the variable is changed by.
        axes: positions of the axes along which replicas had different values before.
        scale: weight of one replica's value.
    """

    op: Op
    of: Tensor
    how: ReducedValue
    axes: tuple[int, ...]
    scale: float

    @property
    def constants(self) -> str:
        """Attributes of the op; none for a call, because a graph may be made for each shape."""
        return "" if self.op.called_graphs else repr(self.op.attributes)


Known = dict[Tensor, ReducedValue]
Stored = list[tuple[Tensor, ReducedValue]]


def reduced_values(report: Report) -> Iterator[tuple[list[Update], Stored]]:
    """Updates and stored numbers of each graph that reduces values, or calls a graph that returns reduced values."""
    returned: dict[Graph, Known] = {}
    reducing = {op.graph for op in report.reductions}
    called: dict[Graph, list[Graph]] = defaultdict(list)
    for op in report.index.calls:
        called[op.graph] += op.called_graphs
    for graph in report.graphs:  # callees first
        if graph in reducing or any(map(returned.get, called[graph])):
            known: Known = {}
            yield _followed(graph, report, known, returned)
            returned[graph] = {t: known[t] for t in (*graph.outputs, *graph.inputs) if t in known}


def _followed(
    graph: Graph, report: Report, known: Known, returned: Mapping[Graph, Known]
) -> tuple[list[Update], Stored]:
    """Changes by reduced values in a graph, and the single numbers of reduced values that it stores.

    Args:
        known: the reduced values of the graph, which are added.
        returned: those that earlier graphs return, or leave in their inputs.
    """
    updates: list[Update] = []
    stored: Stored = []
    reached = known.keys()
    for op in report.index.by_graph[graph]:
        behind = [] if reached.isdisjoint(op.inputs) else [t for t in op.inputs if t in known]
        if behind:
            if op.modified:
                updates += _updates(report, op, known)
            elif op.kind.exchange and not op.outputs and behind[0].nelms == 1:
                stored.append((behind[0], known[behind[0]]))
        if op.kind.graphs:
            for i in op.modified if behind else ():
                known.pop(op.inputs[i].origin, None)
            known |= _of_call(op, returned) if returned else ()
        elif behind or op in report.reductions:
            found = _result(op, behind, known, report)
            for t in (*op.outputs, *[op.inputs[i].origin for i in op.modified]):
                if found is not None:
                    known[t] = found
                else:
                    known.pop(t, None)
    return updates, stored


def _of_call(op: Op, returned: Mapping[Graph, Known]) -> Iterator[tuple[Tensor, ReducedValue]]:
    """The reduced values that a graph returns to its caller, or leaves in accumulators. What reduces a single number
    that a graph returns makes it a loss."""
    for run in op.runs:
        of_graph = returned.get(run.graph, {})
        made = () if run.trait.chooses else run.graph.outputs[run.trait.own_outputs :]
        pairs = [*zip(op.outputs, made, strict=False)]
        pairs += [(t.origin, inner) for t, inner in zip(run.given, run.inputs, strict=False)]
        yield from ((t, of_graph[inner]) for t, inner in pairs if inner in of_graph and t.nelms > 1)


def _updates(report: Report, op: Op, known: Known) -> Iterator[Update]:
    """Updates of variables by reduced values: each updates the first variable of equal size."""
    changed = [op.inputs[i].origin for i in sorted(op.modified)]
    by = [(t, t.nelms) for i, t in enumerate(op.inputs) if i not in op.modified and t in known]
    sizes = [size for _, size in by]
    for t, size in by:
        if size > 1 and sizes.count(size) == 1:
            of = next((v for v in changed if v.producer is None and v.nelms == size), None)
            if of is not None:
                yield Update(op, of, known[t], *known[t].completed(report))


def _result(op: Op, behind: Sequence[Tensor], known: Known, report: Report) -> ReducedValue | None:
    """Result of an op on reduced operands `behind` it; `None` where results are not tracked."""
    if op in report.reductions:
        if op.attributes["op"] not in ("add", "mean"):
            return None
        return replace(known[op.inputs[0]], by=(*known[op.inputs[0]].by, op)) if behind else _reduced(op, report)
    if op.modified:
        return _accumulated(op, behind, known)
    if len(behind) == 1:
        return scaled(op, behind[0], known[behind[0]])
    return _sum_of_alike([known[t] for t in op.inputs if t in known], op, report)


def _sum_of_alike(terms: Sequence[ReducedValue], op: Op, report: Report) -> ReducedValue | None:
    """The sum of values that are all reduced in the same way, such as the gradients of several uses."""
    if op.op_type not in ("Add", "Sum") or len(terms) < len(op.inputs):
        return None
    ways = {(*each.completed(report), each.scalars, *(by.attributes["op"] for by in each.by)) for each in terms}
    return terms[0] if len(ways) == 1 else None


def _accumulated(op: Op, behind: Sequence[Tensor], known: Known) -> ReducedValue | None:
    """New value of an accumulator, if it sums or averages values with one kind of reduction."""
    rule, (accumulator, *others) = op.kind.sharding_rule, op.modified
    if rule is None or others:
        return None
    added = [t for t in behind if t is not op.inputs[accumulator]]
    if len(added) != 1:
        return None
    both = {accumulator, op.inputs.index(added[0])}
    is_sum = any(both <= together for together in rule.linear_positions(op.operand_names()))
    return known[added[0]] if is_sum and added[0].nelms == op.inputs[accumulator].nelms else None


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
        for other in op.inputs:
            if other is t or other.nelms != 1:
                continue
            number = constant_number(other)
            if number is None:
                reduced = replace(reduced, scalars=reduced.scalars | {other})
            elif number:
                number = number if op.op_type == "Mul" else 1 / number
                reduced = replace(reduced, factor=reduced.factor * number, scaled=op)
    return reduced


def _reduced(op: Op, report: Report) -> ReducedValue:
    """Result of a reduction, including an earlier scale by a replica count; other scales belong to the loss."""
    t = op.inputs[0]
    scale = t.producer
    while scale is not None and scale.op_type in ("Cast", "Identity"):
        scale = scale.inputs[0].producer
    if scale is None or scale.op_type not in ("Mul", "Div") or t.nelms == 1 or scale.inputs[0].nelms != t.nelms:
        return ReducedValue((op,))
    factor = constant_number(scale.inputs[1])
    if not factor or not is_of_replicas(factor, op.attributes["group_size"], *report.known_mesh.sizes):
        return ReducedValue((op,))
    return ReducedValue((op,), factor=factor if scale.op_type == "Mul" else 1 / factor, scaled=scale)
