"""Memory and time of a training step in micro-batches, with its state on the host and logits in chunks, by estimate.

Estimates start from a program that is compiled with everything kept. They order the divisions that a search tries; the
compiler decides what fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from popxl.analysis.memory import Memory
from popxl.base.memory_requests import Logits
from popxl.core.remote_variables import is_on_host
from popxl.core.tensor import Tensor, Variable
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.values.spec import size_in_bytes
from runtime.memory_plans.compiled import Compiled, Division
from runtime.memory_plans.needs import FLOPS, GraphNeeds, OpNeeds, host_bandwidth, memory_bandwidth
from runtime.memory_plans.solver import Solution, keep_all, solve
from runtime.targets.chip import Chip

_ACCUMULATOR = 4
"""Bytes of an element of an accumulator: float32."""

ESTIMATE_SHARE = 0.9
"""Largest share of a budget for the estimate of a step."""


class StepMemory:
    """Parts of a compiled step's memory.

    Args:
        ir, memory: the program, as compiled.
        models: graphs whose activations are planned.
        graphs: needs of the graphs that they call.
    """

    def __init__(self, ir: Ir, memory: Memory, models: Sequence[Graph], graphs: Sequence[GraphNeeds]) -> None:
        self._memory = memory
        self._read_variables = _variables_of(models, ir.main_graph.variables)
        trained = sum(v.on_replica.nelms for v in self._read_variables if v.dtype.is_floating_point)
        self.accumulators = _ACCUMULATOR * trained
        """Bytes of accumulators; a step in one piece has none."""
        self._is_accumulated = any(len(model.call_sites) > 1 for model in models)
        self.gradients = min(most_gradients(graphs), memory.temporaries)
        """Bytes of the gradients of variables, at the end of a backward pass."""
        others = (v for v in ir.main_graph.variables if v not in self._read_variables and not is_on_host(v))
        self.other_bytes = sum(size_in_bytes(v.on_replica) for v in others)
        """Bytes of device variables unread by the model: optimiser state and accumulators."""
        self.state = max(self.other_bytes - (self.accumulators if self._is_accumulated else 0), 0)
        """Bytes of the optimiser state on the device."""

    @property
    def weights(self) -> int:
        """Bytes of the variables that the model reads."""
        return sum(size_in_bytes(v.on_replica) for v in self._read_variables)

    @property
    def fixed(self) -> int:
        """Bytes of a step in many micro-batches, without any activations."""
        return self.without_temporaries(is_accumulated=True) + self.gradients

    def without_temporaries(self, is_accumulated: bool) -> int:
        """Bytes without temporaries, with or without accumulators."""
        added = self.accumulators if is_accumulated and not self._is_accumulated else 0
        return self._memory.device - self._memory.temporaries + added

    def divided_bytes(self, parts: int) -> int:
        """Bytes that a step needs if micro-batches have `1 / parts` of the samples."""
        return self.fixed + (self._memory.temporaries - self.gradients) // parts


class DivisionEstimate:
    """Estimates for divisions, derived from the program in one piece.

    Args:
        compiled: program in one piece, with everything kept.
    """

    def __init__(self, compiled: Compiled, budget: float) -> None:
        self._compiled, self._budget = compiled, budget
        self._graphs: Sequence[GraphNeeds] = compiled.needs
        self._planned = keep_all(self._graphs, compiled.release).bytes
        self._weight = compiled.weight(self._planned)
        self._step = StepMemory(compiled.ir, compiled.memory, compiled.applied.models, self._graphs)
        self._smallest_plans: dict[int, Solution | None] = {}

    def cheapest(self, candidates: Iterable[Division]) -> Division | None:
        """Division within the budget that takes least time, with its state on the device if possible."""
        best, least = None, float("inf")
        for each in sorted(candidates, key=lambda each: (each.state == "host", self._overhead(each))):
            if best is not None and (each.state != best.state or self._overhead(each) >= least):
                break  # the others cost more by themselves
            if (seconds := self.seconds(each)) < least:
                best, least = each, seconds
        return best

    def _overhead(self, division: Division) -> float:
        """Seconds to read weights and to read and write accumulators in each micro-batch, forward and backward; to
        move the state between host and device; and of smaller products of logits."""
        count, step = division.micro_batches, self._step
        moved = 2 * (count - 1) * step.weights + (2 * count * step.accumulators if count > 1 else 0)
        chip, crossing = self._compiled.chip, 2 * step.state if division.state == "host" else 0
        chunks = count * sum(_chunk_seconds(each, count, division.logit_chunks, chip) for each in self._compiled.logits)
        return moved / memory_bandwidth(chip) + crossing / host_bandwidth(chip) + chunks

    def seconds(self, division: Division) -> float:
        """Seconds that a division adds to a step with its best plan; infinity without one."""
        limit = (self._budget - self._fixed(division)) / self._weight
        count = division.micro_batches
        if keep_all(self._graphs_of(count), self._compiled.release).bytes <= limit:
            return self._overhead(division)
        smallest = self._smallest_plan(count)
        plan = None if smallest is None or smallest.bytes > limit else self._solved(count, limit)
        return float("inf") if plan is None else self._overhead(division) + count * plan.seconds

    def smallest(self, division: Division) -> tuple[float, float]:
        """Bytes that a division needs with its smallest plan, and seconds that this plan adds to a step."""
        plan = self._smallest_plan(division.micro_batches)
        planned, seconds = (0, 0.0) if plan is None else (plan.bytes, plan.seconds)
        needed = self._fixed(division) + self._weight * planned
        return needed, self._overhead(division) + division.micro_batches * seconds

    def _smallest_plan(self, micro_batches: int) -> Solution | None:
        """The plan of fewest bytes, which the state and chunks of logits do not change."""
        if micro_batches not in self._smallest_plans:
            self._smallest_plans[micro_batches] = self._solved(micro_batches, None)
        return self._smallest_plans[micro_batches]

    def _solved(self, micro_batches: int, limit: float | None) -> Solution | None:
        compiled = self._compiled
        return solve(self._graphs_of(micro_batches), limit, compiled.chip, compiled.offloadable, compiled.release)

    def _graphs_of(self, micro_batches: int) -> list[GraphNeeds]:
        return [_scaled(g, 1 / micro_batches) for g in self._graphs]

    def _fixed(self, division: Division) -> float:
        """Bytes besides planned ones."""
        step, others = self._step, self._compiled.memory.temporaries - self._weight * self._planned
        fixed = step.without_temporaries(division.micro_batches > 1) - (step.state if division.state == "host" else 0)
        saved = max((_saved_bytes(each, division.logit_chunks) for each in self._compiled.logits), default=0)
        return fixed + max(others - saved, 0) / division.micro_batches


def _saved_bytes(logits: Logits, chunks: int) -> float:
    """Bytes that chunks of logits save, beside the default number of chunks: logits have the dtype of their factors. On
    TPUs, which compute losses of logits in float32, twice as many were measured for bfloat16."""
    share = 1 / logits.chunks - 1 / logits.chunk_count(chunks)
    return share * logits.samples * logits.classes * logits.itemsize


def _chunk_seconds(logits: Logits, micro_batches: int, chunks: int, chip: Chip | None) -> float:
    """Seconds that chunks of logits add to a micro-batch, beside the default number of chunks."""
    samples = ceil(logits.samples / micro_batches)
    return sum(
        sign * count * _product_seconds(logits, ceil(samples / count), chip)
        for sign, count in ((1, logits.chunk_count(chunks)), (-1, logits.chunks))
    )


def _product_seconds(logits: Logits, rows: int, chip: Chip | None) -> float:
    """Seconds of the three products of a chunk: logits and the gradients of both factors, that of the weight in
    float32."""
    products = 2 * rows * logits.width * logits.classes / (FLOPS if chip is None else chip.rate(logits.dtype))
    weight, values = logits.width * logits.classes, rows * logits.classes * logits.itemsize
    moved = (logits.itemsize * weight, logits.itemsize * weight, 2 * _ACCUMULATOR * weight)  # the sum is read, too
    return sum(max(products, (each + values) / memory_bandwidth(chip)) for each in moved)


def _scaled(g: GraphNeeds, share: float) -> GraphNeeds:
    """Needs of a graph for a share of the samples, with one treatment for all of its calls: enough to compare
    divisions."""

    def op(each: OpNeeds) -> OpNeeds:
        exchanges = tuple(x._replace(bytes=ceil(share * x.bytes)) for x in each.exchanges)
        products, moved = ceil(share * each.products), ceil(share * each.bytes)
        return replace(each, products=products, bytes=moved, fused_bytes=None, exchanges=exchanges)

    return replace(
        g,
        bytes={path: ceil(share * size) for path, size in g.bytes.items()},
        steps=tuple(ceil(share * size) for size in g.steps),
        ops=tuple(op(each) for each in g.ops),
        ends=(),
    )


def most_gradients(graphs: Sequence[GraphNeeds]) -> int:
    """Most bytes of gradients of variables after the backward pass of a model, with those of others meanwhile."""
    together = {g.model: {g.model, *g.ended_models} for g in graphs}
    totals = (sum(g.gradients * g.calls for g in graphs if g.model in models) for models in together.values())
    return max(totals, default=0)


def _variables_of(graphs: Iterable[Graph], variables: Iterable[Variable]) -> set[Variable]:
    """Variables that calls of graphs read, possibly cast or gathered before."""
    owners = {v.piece: v for v in variables if v.piece is not None}
    reached: dict[Tensor, None] = {}
    waiting: list[Tensor] = [t for graph in graphs for call in graph.call_sites for t in call.inputs]
    while waiting:
        t = waiting.pop()
        if t not in reached:
            reached[t] = None
            waiting += t.producer.inputs if t.producer is not None and len(t.producer.inputs) == 1 else ()
    return {v for t in reached if isinstance(v := owners.get(t, t), Variable)}
