"""`overview_of`: activations, recomputation, transfers and communication of a training step, before compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from popxl.analysis.communication import communication_of
from popxl.analysis.memory import EnteredCall, Steps, memory_of, steps_of
from popxl.analysis.mesh import mesh_of
from popxl.base.pages import Picture, bytes_text
from popxl.base.step_picture import Layer, LineCollectives, step_picture
from popxl.core.aliasing import lowered_ops, reachable, storages
from popxl.core.tensor import Constant, Tensor, Variable

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph
    from popxl.ir import Ir

Use = Literal["state", "copies", "moved", "kept", "gradients", "recomputed", "other"]

_NAMES: dict[Use, str] = {
    "state": "variables and feeds",
    "copies": "casts of variables",
    "moved": "moved here from chips or host",
    "kept": "kept for the gradient",
    "gradients": "gradients",
    "recomputed": "recomputed",
    "other": "other results",
}
_COLUMNS = 300
"""Number of columns of the drawn schedule; each shows the step of its part with the most memory."""


def overview_of(ir: Ir) -> Picture:
    """Draw the memory of a program over its schedule beside its mesh; see `Ir.picture`."""
    schedule = _Schedule(steps_of(ir.main_graph, each_call=True))
    heights = schedule.heights(memory_of(ir).always)
    totals = [sum(each) for each in zip(*heights.values(), strict=True)]
    shown = [*_highest(totals)]
    layers = [Layer(use, name, [heights[use][i] for i in shown]) for use, name in _NAMES.items()]
    on = " on each chip" if ir.replication_factor > 1 else ""
    title = f"Memory{on}: {bytes_text(max(totals, default=0))} at most, counted op by op before compilation"
    return step_picture(title, layers, schedule.phases, *_axes_and_collectives(ir))


def _highest(totals: list[int]) -> Iterator[int]:
    """Peak step of each column."""
    columns = min(len(totals), _COLUMNS)
    for c in range(columns):
        yield max(range(len(totals) * c // columns, len(totals) * (c + 1) // columns), key=totals.__getitem__)


@dataclass
class _Schedule:
    """Program steps with the purposes of values."""

    steps: Steps

    @cached_property
    def backward(self) -> tuple[int, int]:
        """The first step of a gradient, and the first one after the last; both the end without gradients."""
        calls = [call for call in self.steps.calls if _called(call).gradient_of is not None]
        count = len(self.steps.moments)
        return min((c.first for c in calls), default=count), max((c.last + 1 for c in calls), default=count)

    @cached_property
    def recomputing(self) -> list[bool]:
        """Flag for each step: whether it recomputes a part of the forward pass."""
        flags = [False] * len(self.steps.moments)
        for call in self.steps.calls:  # callers before callees
            graph = _called(call)
            if graph.gradient_of is not None:
                flags[call.first : call.last + 1] = [_calls_its_gradient(graph)] * (call.last + 1 - call.first)
        return [
            is_recomputed and not op.kind.schedules for is_recomputed, op in zip(flags, self.steps.ops, strict=True)
        ]

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """Parts of the schedule with where they begin and end, from 0 to 1; none without gradients."""
        count, (start, end) = len(self.steps.moments), self.backward
        bounds = {"forward": (0, start), "backward": (start, end), "update": (end, count)}
        shares = {name: (a / count, b / count) for name, (a, b) in bounds.items() if b - a > count / 20}
        return shares if start < count else {}

    def heights(self, always: int) -> dict[Use, list[int]]:
        """Bytes of each use at each step."""
        count = len(self.steps.moments)
        heights: dict[Use, list[int]] = {use: [0] * (count + 1) for use in get_args(Use)}
        for i, use in enumerate(self.uses()):
            live = self.steps.tensors[i]
            heights[use][live.first + 1] += live.bytes
            heights[use][max(self.until(i), live.first) + 1] -= live.bytes
        heights = {use: [*accumulate(changes[:-1])] for use, changes in heights.items()}
        for i, moment in enumerate(self.steps.moments):
            heights["recomputed" if self.recomputing[i] else "other"][i] += moment.inside
        heights["state"] = [always] * count
        return heights

    def uses(self) -> Iterator[Use]:
        """Purpose of each value that is live between steps."""
        start, _ = self.backward
        casts = _casts(self.steps)
        for i, (t, live) in enumerate(zip(self.steps.values, self.steps.tensors, strict=True)):
            if t.producer is not None and _moves(t.producer):
                yield "moved"
            elif self.recomputing[live.first]:
                yield "recomputed"
            elif t in casts:
                yield "copies"
            elif live.first >= start:
                yield "gradients"
            else:
                yield "kept" if self.steps.tensors[self._returned(i)].last >= start else "other"

    def _returned(self, i: int) -> int:
        """The value itself, or the result of the outermost enclosing call that returns it."""
        while True:
            outer = self._results.get((self.steps.values[i], self.steps.tensors[i].last))
            if outer is None or outer not in self._numbers:
                return i
            i = self._numbers[outer]

    @cached_property
    def _numbers(self) -> dict[tuple[Tensor, int], int]:
        """Numbers of live values, by their tensors and first steps."""
        pairs = zip(self.steps.values, self.steps.tensors, strict=True)
        return {(t, live.first): i for i, (t, live) in enumerate(pairs)}

    @cached_property
    def _results(self) -> dict[tuple[Tensor, int], tuple[Tensor, int]]:
        """Results of calls, by the tensors that called graphs return; both with the last steps of the calls."""
        results: dict[tuple[Tensor, int], tuple[Tensor, int]] = {}
        for call in self.steps.calls:
            (run,) = call.op.runs
            storages_of = storages(run.graph.ops)
            for t, outer in zip(run.outputs, call.op.outputs, strict=False):
                results |= {(base, call.last): (outer, call.last) for base in storages_of.get(t, (t,))}
        return results

    @cached_property
    def _calls_ending(self) -> dict[tuple[Graph, int], EnteredCall]:
        return {(call.op.graph, call.last): call for call in self.steps.calls}

    def until(self, i: int) -> int:
        """The last step that uses a value: of one that a called graph uses last, within that graph."""
        t, last = self.steps.values[i], self.steps.tensors[i].last
        graph = t.graph
        while (call := self._calls_ending.get((graph, last))) is not None and t in call.op.inputs:
            (run,) = call.op.runs
            if run.trait.is_loop or t in graph.outputs:
                break
            inner = [inner_t for inner_t, outer in run.bindings if outer is t]
            steps = [call.inputs_until[inner_t] for inner_t in inner if inner_t in call.inputs_until]
            if not steps:
                break
            t, graph, last = inner[-1], run.graph, call.first + max(steps)
        return last


def _called(call: EnteredCall) -> Graph:
    return call.op.called_graphs[0]


def _calls_its_gradient(graph: Graph) -> bool:
    """Whether a gradient graph recomputes activations, and calls the graph that takes them."""
    return any(callee.gradient_of is graph.gradient_of for op in graph.ops for callee in op.called_graphs)


def _casts(steps: Steps) -> set[Tensor]:
    """Tensors computed from variables and constants alone."""
    casts: set[Tensor] = set()
    shards = {v.piece for graph in {op.graph for op in steps.ops} for v in graph.variables}
    for op in steps.ops:
        if op.inputs and all(isinstance(t, Variable | Constant) or t in casts or t in shards for t in op.inputs):
            casts.update(op.outputs)
    return casts


def _moves(op: Op) -> bool:
    """Whether results come from elsewhere: the host, or other chips, unless they are sums."""
    return op.op_type == "Reload" or (op.kind.between_replicas and "Reduce" not in op.op_type)


def _axes_and_collectives(ir: Ir) -> tuple[list[tuple[str, int]], list[LineCollectives]]:
    """The axes of a program, and its collectives by line, the most bytes first."""
    mesh = mesh_of(ir, [op for op in lowered_ops(ir.main_graph.ops) if op.kind.between_replicas])
    if mesh is None:
        return [("replicas", ir.replication_factor)], [*_by_line(ir, lambda stride, size: (0,))]
    return [*zip(mesh.names, mesh.sizes, strict=True)], [*_by_line(ir, mesh.along)]


_Key = tuple[tuple[int, ...], str, str, str]
"""Axes, kind, line and phase of collectives."""


def _by_line(ir: Ir, along: Callable[[int, int], tuple[int, ...]]) -> Iterator[LineCollectives]:
    phases = {graph.name: _phase(graph) for graph in reachable(ir.main_graph)}
    counts, sizes = Counter[_Key](), Counter[_Key]()
    for collective in communication_of(ir).collectives:
        key: _Key = (
            along(collective.stride, collective.group_size),
            collective.kind,
            collective.line,
            phases.get(collective.graph, ""),
        )
        counts[key] += collective.turns
        sizes[key] += collective.turns * collective.bytes
    yield from (LineCollectives(*key, counts[key], size) for key, size in sizes.most_common())


def _phase(graph: Graph) -> str:
    """The part of a training step that a graph is; empty for the main graph."""
    if graph.gradient_of is not None:
        return "recomputing" if _calls_its_gradient(graph) else "backward"
    return "" if graph is graph.ir.main_graph else "forward"
