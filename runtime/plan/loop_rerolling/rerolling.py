"""Loops of a program: rerolled graphs, ops left unrolled and reasons, and variables packed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from popxl.analysis.flops import own_flops
from popxl.base.group_by import group_by
from popxl.core.aliasing import called_by, callees_first, changed_inputs, reachable, shares_by_reference
from popxl.core.recording import Op
from popxl.core.recursion import nesting, raised_recursion_limit
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import Run, chooses, is_call
from popxl.graph import Graph
from popxl.ops.repeat import returned_by_ref
from popxl.values.spec import size_in_bytes
from runtime.lowering.batched_loops import is_batch
from runtime.lowering.rerolled_loops import NARROW, LoopInput, ProgramOrder, RerolledLoop, merge_overlapping
from runtime.plan.loop_rerolling.inlining import InlinedGraphs
from runtime.plan.loop_rerolling.loops import Item, loops_of
from runtime.plan.loop_rerolling.op_signatures import OpSignatures
from runtime.plan.structure import Structures

SMALL = 2**14
"""Largest size, in bytes, of seeds and other small values that are copied into packed arrays for iterations."""

Source = Tensor | tuple[object, int] | None
"""Storage of a value before a loop: a variable, a row of an earlier loop's output, or a separate array."""


class Rerolling(ProgramOrder):
    """Rerolled loops of a program.

    Args:
        from_saved: number of ops that a loop without products must save XLA. Elementwise iterations are one kernel if
            unrolled, and several in a loop, which slices rows out of arrays and writes them back.
        batches_updates: whether updates run after all layers, each on the packed array of one variable of all layers,
            instead of in the iterations. They move fewer bytes, but all gradients are live at once.

    Attributes:
        packed: variables packed into one array each, for successive iterations of a loop.
        aliases: tensors of inlined graphs by their equivalents in the calling graph, and vice versa.
    """

    def __init__(
        self, main: Graph, resident: Collection[Tensor], from_saved: int = 0, batches_updates: bool = False
    ) -> None:
        structures = Structures(main)
        self._size = structures.size
        inlined = InlinedGraphs(main)
        self.aliases = inlined.aliases
        signatures = OpSignatures(structures, inlined.aliases)
        self._reasons: dict[Graph, str | None] = {}
        in_order = {*called_by(op for graph in reachable(main) for op in graph.ops if shares_by_reference(op))}
        self._schedules = {
            graph: ops
            if graph in in_order  # its inputs have aliases that are overwritten
            else loops_of(ops, graph.outputs, signatures, structures.size, self._reasons, batches_updates)
            for graph, ops in inlined.graphs.items()
        }
        self._unroll_kernels(max(1, from_saved))
        while True:
            analysis = _PackingAnalysis(self._schedules, signatures, main, resident)
            with raised_recursion_limit(nesting(main)):
                analysis.visit_graph(main, {t: t for t in resident})
            if not analysis.refused:
                break
            for loop, reason in analysis.refused.items():
                self._unroll(loop, reason)
        self.packed = tuple(analysis.packed_variables())
        self.gathered = analysis.gathered()

    def schedule(self, graph: Graph) -> Sequence[Item]:
        """Schedule of a graph: ops and loops."""
        return self._schedules.get(graph, graph.ops)

    @property
    def loops(self) -> tuple[RerolledLoop, ...]:
        """Rerolled loops of all graphs."""
        return tuple(item for items in self._schedules.values() for item in items if isinstance(item, RerolledLoop))

    @property
    def unrolled_graphs(self) -> Mapping[Graph, str]:
        """Graphs called outside of loops, with reasons. A graph that an iteration calls once is a part of it; graphs
        that are called once and resemble no other are left out."""
        in_loops = {callee for loop in self.loops for op in loop.all_ops for callee in op.called_graphs}
        called = dict.fromkeys(
            callee
            for graph, items in self._schedules.items()
            for item in items
            if isinstance(item, Op)
            for callee in item.called_graphs
            if not (graph in in_loops and len(callee.call_sites) == 1)
        )
        reasons = ((g, self._reasons.get(g, "it is not called again and again in one pattern")) for g in called)
        return {g: reason for g, reason in reasons if reason is not None}

    @property
    def saved(self) -> int:
        """Number of ops that XLA does not compile repeatedly."""
        return sum(map(self._saved_by, self.loops))

    def _saved_by(self, loop: RerolledLoop) -> int:
        return (len(loop.iterations) - 1) * sum(self._size(callee) for op in loop.ops for callee in op.called_graphs)

    @property
    def has_batches(self) -> bool:
        """Whether any loop is lowered on whole arrays."""
        return any(map(is_batch, self.loops))

    def summary(self) -> str:
        """Summary of rerolled loops, one sentence."""
        count = sum(len(op.called_graphs) for loop in self.loops for op in loop.all_ops)
        return f"{count} calls that differ only in what they are given are the turns of {len(self.loops)} loop(s)."

    def _unroll_kernels(self, from_saved: int) -> None:
        """Unroll loops without products that save XLA few ops, except batches of what loops with products slice."""
        sliced = {t for loop in self.loops if _has_products(loop) for t in _by_iteration(loop)}
        for loop in self.loops:
            slices_shared = is_batch(loop) and not sliced.isdisjoint(_by_iteration(loop))
            if self._saved_by(loop) < from_saved and not _has_products(loop) and not slices_shared:
                self._unroll(loop, "it computes no products, and would be more kernels in a loop")

    def _unroll(self, loop: RerolledLoop, reason: str) -> None:
        """Unroll a loop again."""
        for graph, items in self._schedules.items():
            self._schedules[graph] = tuple(op for item in items for op in (loop.all_ops if item is loop else (item,)))
        self._reasons.update((callee, reason) for op in loop.ops for callee in op.called_graphs)


def _by_iteration(loop: RerolledLoop) -> Iterator[Tensor]:
    """Storages that the iterations of a loop read from outside."""
    return chain.from_iterable(t.by_iteration for t in loop.inputs)


def _has_products(loop: RerolledLoop) -> bool:
    """Whether iterations have matrix products or convolutions, which are separate kernels anyway."""
    ops = (op for each in (loop.ops, *(graph.ops for graph in called_by(loop.ops))) for op in each)
    return any(own_flops(op).products for op in ops)


def _prepares_operand(op: Op) -> bool:
    """Whether an op communicates between replicas, has one operand and one result of equal shape, such as a cast, or
    has no operand, such as the zeros that an accumulator starts from."""
    if len(op.inputs) > 1 or len(op.outputs) != 1 or op.runs or op.kind.view or op.kind.exchange or op.kind.effect:
        return False
    return not op.inputs or op.kind.between_replicas or op.inputs[0].shape == op.outputs[0].shape


def _lowered_ops(items: Iterable[Item]) -> Iterator[Op]:
    """Lowered ops: of loops, the template's."""
    for item in items:
        yield from item.ops if isinstance(item, RerolledLoop) else (item,)


class _PackingRequest(NamedTuple):
    """Variables of one loop input, without duplicates, by iteration."""

    loop: RerolledLoop
    loop_input: LoopInput
    variables: tuple[Tensor, ...]


class _PackingAnalysis:
    """Dataflow analysis of loop inputs: which variables and values to pack.

    It enters the graphs that have loops, and tracks the storages that lowering will know for their inputs and results.
    Inputs of branches are separate arrays, and so are inputs of iterations, unless all iterations have the same.
    """

    def __init__(
        self,
        schedules: dict[Graph, tuple[Item, ...]],
        signatures: OpSignatures,
        main: Graph,
        resident: Collection[Tensor],
    ) -> None:
        self._schedules, self._storage = schedules, signatures.storage
        self._with_loops: set[Graph] = set()
        for graph in (graph for graph in callees_first(main) if graph in schedules):
            items = schedules[graph]
            ops = [item for item in items if isinstance(item, Op)]
            if len(ops) < len(items) or any(not self._with_loops.isdisjoint(op.called_graphs) for op in ops):
                self._with_loops.add(graph)
        self._resident = frozenset(resident)
        self._computed: list[tuple[Tensor, ...]] = []
        self._visited_separately: set[Graph] = set()
        self._requests: list[_PackingRequest] = []
        self.refused: dict[RerolledLoop, str] = {}

    def visit_graph(self, graph: Graph, sources: dict[Tensor, Source]) -> dict[Tensor, Source]:
        """Visit a graph, given sources of its storages. Returns final sources."""
        return self._visit_items(self._schedules[graph], sources)

    def _visit_items(self, items: Sequence[Item], sources: dict[Tensor, Source]) -> dict[Tensor, Source]:
        """Visit scheduled ops and loops."""
        for item in items:
            if isinstance(item, RerolledLoop):
                self._visit_loop(item, sources)
                same = {t.storage for t in item.inputs if t.is_invariant}
                self._visit_items(item.ops, {t: source for t, source in sources.items() if t in same})
            elif not chooses(item) and self._with_loops.issuperset(item.called_graphs) and item.runs:
                (run,) = item.runs
                after = self.visit_graph(run.graph, self._input_sources(run, sources))
                if is_call(item):
                    results = ((t, self._storage(output)) for t, output in run.results)
                    sources.update((t, after.get(s)) for t, s in results if s is not None and s not in run.inputs)
            else:
                if _prepares_operand(item):
                    sources.update((t, t) for t in item.outputs)
                self._visit_separately((item,))
        return sources

    def _visit_separately(self, ops: Sequence[Op]) -> None:
        """Visit graphs run by ops, each once, with unknown sources."""
        for callee in dict.fromkeys(callee for op in ops for callee in op.called_graphs):
            if callee in self._with_loops and callee not in self._visited_separately:
                self._visited_separately.add(callee)
                self.visit_graph(callee, {})

    def _input_sources(self, run: Run, sources: dict[Tensor, Source]) -> dict[Tensor, Source]:
        """Sources of a called graph's inputs; unknown for copies of modified inputs."""
        own = len(run.op_inputs)
        changed = {i - own for i in changed_inputs(run.graph)}
        copied = {*range(run.carried), *(returned_by_ref(run.op) if run.carried else ())}
        storages = [*map(self._storage, run.operands)]
        count = Counter(storages)
        return {
            inner: sources.get(storage)
            for i, (inner, storage) in enumerate(zip(run.inputs, storages, strict=False))
            if storage is not None
            and i not in copied
            and (i not in changed or (i in run.op.modified and count[storage] == 1))
        }

    def _visit_loop(self, loop: RerolledLoop, sources: dict[Tensor, Source]) -> None:
        for t in loop.inputs:
            if t.carried_from is None and len(set(t.by_iteration)) > 1:
                self._note_packing(loop, t, sources)
        for m in loop.outputs:
            if not m.is_last_only:
                output = object()
                sources.update((row, (output, n)) for n, row in enumerate(m.rows))

    def _note_packing(self, loop: RerolledLoop, t: LoopInput, sources: dict[Tensor, Source]) -> None:
        """Register one loop input's values for packing."""
        storages = [*dict.fromkeys(t.by_iteration)]
        known_sources = [sources.get(s) for s in storages]
        variables = [source for source in known_sources if isinstance(source, Tensor)]
        rows_by_output = Counter(source[0] for source in known_sources if isinstance(source, tuple))
        size = len(storages) * size_in_bytes(t.storage)
        separate = len(known_sources) - max(rows_by_output.values(), default=0)
        computed = [v for v in variables if v not in self._resident]
        if len(variables) == len(known_sources) and not computed:
            self._requests.append(_PackingRequest(loop, t, tuple(variables)))
        elif len(computed) == len(known_sources) and len({v.graph for v in computed}) == 1 and size > SMALL:
            self._computed.append(tuple(computed))
        elif size > SMALL and separate > (not t.is_modified) and not all(isinstance(s, Constant) for s in storages):
            reason = f"what its turns take for `{t.storage.path}` lies apart, and would have to be copied first"
            self.refused.setdefault(loop, reason)

    def gathered(self) -> dict[Op, list[tuple[Tensor, ...]]]:
        """Computed loop inputs, such as casts, merged across loops: packed after the last op that computes one. The
        compiler writes results into the packed array."""
        groups_by_op: dict[Op, list[tuple[Tensor, ...]]] = {}
        for group in merge_overlapping(self._computed):
            producers = {t.producer for t in group}
            ops = [op for items in self._schedules.values() for op in _lowered_ops(items) if op in producers]
            groups_by_op.setdefault(ops[-1], []).append(group)
        return groups_by_op

    def packed_variables(self) -> list[tuple[Tensor, ...]]:
        """Variables of loop inputs, merged across loops."""
        return _group_adjacent(merge_overlapping(request.variables for request in self._requests), self._requests)


def _group_adjacent(
    groups: Sequence[tuple[Tensor, ...]], requests: Sequence[_PackingRequest]
) -> list[tuple[Tensor, ...]]:
    """Merge groups of narrow variables with equal roles, so that iterations slice adjacent rows at once, such as a
    layer's biases. Wide rows keep separate groups."""
    group_of = {t: group for group in groups for t in group}
    requests_of = group_by(requests, lambda request: group_of[request.variables[0]])
    by_roles = group_by(groups, lambda group: _roles(group, requests_of[group]))
    # By name: programs that share variables have them in the same order.
    ordered = (sorted(alike, key=lambda group: group[0].name) for alike in by_roles.values())
    return [tuple(t for of_iteration in zip(*alike, strict=True) for t in of_iteration) for alike in ordered]


def _roles(group: Sequence[Tensor], requests: Sequence[_PackingRequest]) -> object:
    """Variable roles in loops: equal for groups that may be adjacent."""
    first = group[0]
    is_uniform = all(len(request.variables) == len(request.loop.iterations) == len(group) for request in requests)
    if size_in_bytes(first) > NARROW or not is_uniform or len({w.loop for w in requests}) < len(requests):
        return first  # no similar tensors
    position = {t: n for n, t in enumerate(group)}
    of_loops = tuple((w.loop, w.loop_input.is_modified, tuple(position[t] for t in w.variables)) for w in requests)
    replicas = tuple(first.replica_grouping.assignment) if isinstance(first, Variable) else None
    return first.spec.to_tuple(), replicas, of_loops
