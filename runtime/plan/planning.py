"""Plan construction: segmentation of graphs into steps, storage ownership, and copies between IPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from popxl.base.liveness import live_ranges
from popxl.core.aliasing import storages
from popxl.core.recording import Op
from popxl.core.recursion import nesting, raised_recursion_limit
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import chooses
from popxl.graph import Graph
from runtime.plan.host_steps import HostControlFlow, HostSteps, SubPlan
from runtime.plan.overlap import OverlappedLoop
from runtime.plan.repeats import group_steps
from runtime.plan.segmentation import SegmentationPolicy
from runtime.plan.segments import Key, Segment, Step
from runtime.plan.stacks import Stack
from runtime.plan.structure import Structure, structure_of


def plan_of(
    main: Graph, segmentation: SegmentationPolicy, owned: Iterable[Tensor], live_out: Iterable[Tensor]
) -> HostSteps:
    """Plan a main graph, with the graphs that the host executes. Arguments as for `PlanBuilder`."""
    with raised_recursion_limit(nesting(main)):
        return PlanBuilder(main.ops, segmentation, owned, live_out).build()


class PlanBuilder:
    """Builder of the host steps of one graph.

    Args:
        ops: ops of the graph, and further ops after them.
        segmentation: selection of calls as segments, and placement of ops.
        owned: storages without other owners at the start.
        live_out: storages whose values are needed at the end.
        ipu: IPU of storages that no step uses.
        on_one_ipu: whether all storages are on this IPU.
    """

    def __init__(
        self,
        ops: Iterable[Op],
        segmentation: SegmentationPolicy,
        owned: Iterable[Tensor],
        live_out: Iterable[Tensor],
        ipu: int = 0,
        on_one_ipu: bool = False,
    ) -> None:
        self._segmentation = segmentation
        self._stacks: dict[Op, tuple[Stack, ...]] = {}
        self._ops: list[Op] = []
        for op in ops:
            if stacks := segmentation.placement.stacks(op):
                self._stacks[op] = stacks
                self._ops += (stack.allocation for stack in stacks)
            self._ops.append(op)
        self._storages = storages(self._ops)
        self._live_out = tuple(live_out)
        self._ipu = ipu
        self._on_one_ipu = on_one_ipu
        self._copied_to: defaultdict[Tensor, set[int]] = defaultdict(set)
        changed = (s for s in self._overwritten(self._ops) if isinstance(s, Constant))
        self._built = HostSteps([], set(owned), tuple(changed))

    def build(self) -> HostSteps:
        """Build the steps, recursively including host-executed graphs."""
        self._built.steps = list(self._split_segments())
        self._find_last_uses()
        self._built.steps = list(self._merge_repeated())
        for step in self._built.steps:
            if isinstance(step, Segment):
                self._plan_segment(step)
            else:
                self._plan_control_flow(step)
        for t in self._live_out:
            self._locate(t, self._ipu)
        return self._built

    def _overwritten(self, ops: Iterable[Op]) -> dict[Tensor, None]:
        """Storages that ops overwrite, in order, as keys."""
        return dict.fromkeys(s for op in ops for i in sorted(op.modified) for s in self._storages[op.inputs[i]])

    # Segments

    def _split_segments(self) -> Iterator[Segment | HostControlFlow]:
        """Split the ops into segments and host-executed ops: each segment call, and other op ranges on a single IPU.

        Ops after a call join its segment if they follow such a call elsewhere too, for example the update of the
        weights after the gradient.
        """
        runs: list[list[Op]] = [[]]  # host control flow, or ops in between, or a call with the ops after it
        ipu = self._ipu_of
        for op in self._ops:
            if self._segmentation.is_host_executed(op):
                runs += [[op], []]
            elif self._segmentation.is_segment(op):
                runs.append([op])
            elif op.kind.view is None:  # a view is made when a reader looks through it
                if runs[-1] and ipu(runs[-1][0]) != ipu(op):
                    runs.append([])
                runs[-1].append(op)
        codes = [self._structure(run) for run in runs]
        count = Counter(codes)
        lengths = sorted({len(run) for run, code in zip(runs, codes, strict=True) if count[code] > 1}, reverse=True)
        for run, code in zip(runs, codes, strict=True):
            if run and self._segmentation.is_host_executed(run[0]):
                yield self._control_flow(run[0])
            elif len(run) > 1 and count[code] == 1 and self._segmentation.is_segment(run[0]):
                repeated = (n for n in lengths if 0 < n < len(run) and count[self._structure(run[:n])] > 1)
                end = next(repeated, 1)
                yield self._segment(run[:end])
                yield self._segment(run[end:])
            elif run:
                yield self._segment(run)

    def _structure(self, ops: Sequence[Op]) -> Structure:
        """The structure of some ops."""
        return structure_of(tuple(self._segmentation.encoded(ops, self._built.changed).code))

    def _is_immutable(self, t: Tensor) -> bool:
        """Whether a storage is immutable: a constant without modifications."""
        return isinstance(t, Constant) and t not in self._built.changed

    def _control_flow(self, op: Op) -> HostControlFlow:
        stacks = tuple(stack.result for stack in self._stacks.get(op, ()))
        modified = tuple(op.inputs[i].origin for i in sorted(op.modified))
        return HostControlFlow(
            tuple(dict.fromkeys((*(t.origin for t in op.inputs if not self._is_immutable(t.origin)), *stacks))),
            (*op.outputs, *modified),
            ipu=self._ipu_of(op),
            op=op,
            subplans=tuple(self._subplans(op, stacks)),
            condition=op.inputs[0].origin if chooses(op) else None,
            numbers=op.runs[0].numbers,
            loop_inputs=op.runs[0].op_inputs,
        )

    def _subplans(self, op: Op, stacks: Sequence[Tensor]) -> Iterator[SubPlan]:
        """Graphs of a host-executed op: one for calls and loops, two for conditionals."""
        stacked = tuple((stack, stack) for stack in stacks)
        for run in op.runs:
            arguments = tuple((t.origin, inner) for inner, t in run.bindings)
            fixed = {inner: t for t, inner in arguments if isinstance(t, Constant) and self._is_immutable(t)}
            returned = tuple((result, t.origin) for result, t in run.results)
            modified = tuple(arguments[i] for i in sorted(op.modified))
            carried = {inner: inner for _, inner in (*arguments, *stacked)}
            carried |= zip(run.inputs, (inner for _, inner in returned[: run.carried]), strict=False)
            yield SubPlan(run.graph, (*arguments, *stacked), fixed, (*returned, *modified, *stacked), carried)

    def _segment(self, ops: Sequence[Op]) -> Segment:
        encoding = self._segmentation.encoded(ops, self._built.changed)
        results = dict.fromkeys(t for op in ops for t in op.outputs if t.origin is t)
        results |= self._overwritten(ops)
        ipu = self._ipu_of(ops[0])
        reads = tuple(t for t in encoding.roots if not self._is_immutable(t))
        size = self._segmentation.size(ops)
        return Segment(reads, tuple(results), ipu=ipu, ops=tuple(ops), size=size, encoding=encoding)

    def _find_last_uses(self) -> None:
        """Determine each step's results, and its last uses of storages.

        All segments of a structure return the results needed from any of them, so they share one executable.
        """
        needed_results: dict[Structure, set[int]] = defaultdict(set)
        used = ((step.reads, {*step.makes}.difference(step.reads)) for step in self._built.steps)
        ends = {(t, each.last) for t, ranges in live_ranges(used, self._live_out).items() for each in ranges}
        for i, step in enumerate(self._built.steps):
            if isinstance(step, Segment):
                needed_results[step.op_structure].update(
                    step.encoding.numbers[t] for t in step.makes if (t, i) not in ends
                )
            step.frees = tuple(dict.fromkeys(t for t in (*step.reads, *step.makes) if (t, i) in ends))
        for step in self._built.steps:
            if isinstance(step, Segment):  # host control flow makes all results
                step.makes = tuple(
                    t for t in step.makes if step.encoding.numbers[t] in needed_results[step.op_structure]
                )
                step.frees = tuple(t for t in step.frees if t in step.reads or t in step.makes)

    def _merge_repeated(self) -> Iterator[Segment | HostControlFlow]:
        """Merge steps that repeat in the same order.

        The group returns all results of its segments, needed or not, so that programs share it: values between segments
        live until its end.
        """
        structures = [
            (step.op_structure, step.ipu) if isinstance(step, Segment) else id(step) for step in self._built.steps
        ]
        sizes = [step.size if isinstance(step, Segment) else 0 for step in self._built.steps]
        for first, count in group_steps(structures, sizes, [step.ipu for step in self._built.steps]):
            yield self._merge(self._built.steps[first : first + count]) if count > 1 else self._built.steps[first]

    def _merge(self, segments: Sequence[Any]) -> Segment:
        """Merge consecutive segments into one."""
        segment = self._segment([op for segment in segments for op in segment.ops])
        segment.makes = tuple(dict.fromkeys(t for each in segments for t in each.makes))
        segment.frees = tuple(dict.fromkeys(t for each in segments for t in each.frees))
        return segment

    def _plan_segment(self, segment: Segment) -> None:
        """Determine the donated inputs of a segment, and copies of its inputs and results."""
        donated = self._overwritten(segment.ops).keys() & self._built.owned & {*segment.makes}
        segment.donated = tuple(t for t in segment.reads if t in donated)
        self._built.owned.update(segment.makes)
        self._insert_copies(segment, {t: segment.ipu for t in segment.reads})
        segment.keys = {t: (t, segment.ipu) for t in segment.reads if self._built.final_ipus[t] != segment.ipu}
        copied = {t: self._segmentation.placement.result_ipu(t) for t in segment.makes}
        self._record_results(segment, {t: segment.ipu if ipu is None else ipu for t, ipu in copied.items()})

    # IPUs of ops

    def _ipu_of(self, op: Op) -> int:
        """IPU of an op."""
        return self._ipu if self._on_one_ipu else self._segmentation.placement.ipu_of(op)

    def _locate(self, t: Tensor, ipu: int) -> int:
        """IPU of a storage, defaulting to `ipu` on first use."""
        if t not in self._built.final_ipus:
            self._built.final_ipus[t] = self._built.initial_ipus[t] = ipu
        return self._built.final_ipus[t]

    def _insert_copies(self, step: Step, wanted: Mapping[Tensor, int]) -> None:
        """Insert copies of storages to a step's required IPUs."""
        missing = [(t, p) for t, p in wanted.items() if self._locate(t, p) != p and p not in self._copied_to[t]]
        for t, p in missing:
            self._copied_to[t].add(p)
        step.copies += tuple(missing)

    def _record_results(self, step: Step, ends: dict[Tensor, int]) -> None:
        """Record result locations after a step, and drop outdated copies of overwritten storages."""
        step.result_ipus = ends
        self._built.final_ipus.update(ends)
        stale = [(t, p) for t in dict.fromkeys((*ends, *step.frees)) for p in sorted(self._copied_to.pop(t, ()))]
        step.drops = (*step.frees, *stale)

    # Host control flow

    def _plan_control_flow(self, step: HostControlFlow) -> None:
        """Plan the graphs of a host-executed op, and route its arguments."""
        owned = set(self._built.owned)
        for subplan in step.subplans:
            self._plan_subgraph(step, subplan, owned)
            self._route_arguments(step, subplan)
            self._built.nesting = max(self._built.nesting, 1 + subplan.plan.nesting)
        ends: dict[Tensor, int] = {}
        for subplan in step.subplans:
            final_ipus = {t: subplan.plan.final_ipus[inner] for t, inner in subplan.results}
            ends = final_ipus | ends
            subplan.final_copies = tuple((t, ends[t]) for t in final_ipus if final_ipus[t] != ends[t])
        self._record_results(step, ends)
        if step.op.runs[0].overlaps:
            step.overlapped = OverlappedLoop.of(step)

    def _plan_subgraph(self, step: HostControlFlow, subplan: SubPlan, owned_before: set[Tensor]) -> None:
        """Plan one graph of a host-executed op."""
        origins = Counter(origin for origin, _ in subplan.arguments)
        given_up = {*step.frees, *step.makes}
        owned = {t for origin, t in subplan.arguments if origin in owned_before & given_up and origins[origin] == 1}
        live_out = {inner for _, inner in subplan.results}
        if step.iterations > 1:
            owned &= {t for origin, t in subplan.arguments if subplan.carried[t] is not t or origin in step.makes}
            owned -= self._segmentation.not_owned[step.op]
            live_out.update(subplan.carried.values())
        ops = (*subplan.graph.ops, *(stack.write for stack in self._stacks.get(step.op, ())))
        on_one_ipu = self._on_one_ipu or not self._segmentation.placement.spans(step.op)
        carried, receivers = subplan.carried, Counter(subplan.carried.values())
        while True:
            subplan.plan = PlanBuilder(ops, self._segmentation, owned, live_out, step.ipu, on_one_ipu).build()
            lost = {t for t in owned if receivers[carried[t]] > 1 or carried[t] not in subplan.plan.owned}
            if step.iterations == 1 or not lost:
                break
            self._segmentation.not_owned[step.op] |= lost
            owned -= lost
        self._note_owned(subplan, is_first=subplan is step.subplans[0])

    def _note_owned(self, subplan: SubPlan, is_first: bool) -> None:
        """Note which storages are owned after a graph. If two share one array, neither is; nor is a storage that
        another branch, before this one, leaves with another owner."""
        returned = Counter(inner for _, inner in subplan.results)
        inputs = {t for _, t in subplan.arguments}
        # A storage that is neither owned inside nor an input may be the array of some input, passed on by a call.
        forwarded = {inner.spec for inner in returned.keys() - inputs - subplan.plan.owned}
        for origin, t in subplan.arguments:
            if t not in subplan.plan.owned and (returned[t] or t.spec in forwarded):
                self._built.owned.discard(origin)
        for t, inner in subplan.results:
            is_sole_owner = returned[inner] == 1 and inner in subplan.plan.owned
            if is_sole_owner and (is_first or t in self._built.owned):
                self._built.owned.add(t)
            else:
                self._built.owned.discard(t)

    def _route_arguments(self, step: HostControlFlow, subplan: SubPlan) -> None:
        """Insert copies of arguments to the IPUs required by a host-executed graph, for every iteration."""
        starts, final_ipus = subplan.plan.initial_ipus, subplan.plan.final_ipus
        keys: list[Key] = []
        for origin, t in subplan.arguments:
            ipu = starts.get(t)
            if t in subplan.constant_inputs or ipu is None:
                keys.append(origin)
                continue
            self._insert_copies(step, {origin: ipu})
            keys.append(origin if self._built.final_ipus[origin] == ipu else (origin, ipu))
        subplan.keys = tuple(keys)
        if step.iterations > 1:
            subplan.carried_copies = tuple(
                (t, starts[t]) for t in subplan.carried if t in starts and final_ipus[subplan.carried[t]] != starts[t]
            )
