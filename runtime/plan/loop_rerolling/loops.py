"""Loops of one graph: periodic spans of its ops, filtered for valid iterations."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from popxl.base.liveness import live_ranges
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.graph import Graph
from runtime.lowering.rerolled_loops import RerolledLoop
from runtime.plan.loop_rerolling.clustering import Clustering, is_update
from runtime.plan.loop_rerolling.match_iterations import NotRerollable, reroll
from runtime.plan.loop_rerolling.op_signatures import OpSignatures
from runtime.plan.loop_rerolling.patterns import FEWEST, PeriodicRange, periodic_ranges
from runtime.plan.loop_rerolling.siblings import reasons_of_few

TRIED = 8
"""Maximum number of spans of a sequence that are tried."""

Item = Op | RerolledLoop


def loops_of(
    ops: Sequence[Op],
    outputs: Sequence[Tensor],
    signatures: OpSignatures,
    size: Callable[[Graph], int],
    reasons: dict[Graph, str | None],
    batches_updates: bool,
) -> tuple[Item, ...]:
    """Find loops. Returns ops and loops, in order.

    Args:
        reasons: filled with the reasons why graphs are in no loop; `None` for those that are called once.
        batches_updates: see `Clustering.ordered`.
    """
    count = Counter(signatures.signature(op) for op in ops if op.called_graphs)
    equal_calls: Counter[Graph] = Counter()
    for op in ops:
        equal_calls |= Counter(dict.fromkeys(op.called_graphs, count[signatures.signature(op)]))
    reasons.update(reasons_of_few(equal_calls, signatures.function))
    if max(count.values(), default=0) < FEWEST:
        return tuple(ops)
    returned = {root for t in outputs for root in signatures.roots(t)}
    ops = Clustering([op for op in ops if op.kind.view is None], signatures, returned).ordered(batches_updates)
    return _Sequence(ops, returned, signatures, size, reasons).items()


class _Sequence:
    """A clustered sequence of ops."""

    def __init__(
        self,
        ops: Sequence[Op],
        returned: Iterable[Tensor],
        signatures: OpSignatures,
        size: Callable[[Graph], int],
        reasons: dict[Graph, str | None],
    ) -> None:
        self._ops = ops
        self._roots, self._roots_read = signatures.roots, signatures.roots_read
        self._signatures = [signatures.signature(op) for op in self._ops]
        self._sizes = [
            sum(1 + size(callee) for callee in op.called_graphs) or is_update(op, signatures) for op in self._ops
        ]
        self._reasons = reasons
        self._live = live_ranges(((self._roots_read(op), op.outputs) for op in ops), returned)

    def items(self) -> tuple[Item, ...]:
        """Ops and loops, choosing loops greedily: largest saving first, then recursively before and after it."""
        loop_at: dict[int, tuple[RerolledLoop, int]] = {}
        waiting = [(0, len(self._ops))]
        while waiting:
            first, end = waiting.pop()
            for start, last, loop in self._candidate_loops(first, end):
                loop_at[start] = loop, last
                waiting += [(first, start), (last, end)]
                break
        items: list[Item] = []
        unrolled: dict[int, list[int]] = defaultdict(list)
        i = 0
        while i < len(self._ops):
            if i in loop_at:
                loop, i = loop_at[i]
                items.append(loop)
            else:
                items.append(self._ops[i])
                if self._ops[i].called_graphs:
                    unrolled[self._signatures[i]].append(i)
                i += 1
        for positions in unrolled.values():
            self._note_reason(positions)
        return tuple(items)

    def _note_reason(self, positions: Sequence[int]) -> None:
        """Record why equal calls form no loop: differing successors."""
        for a, b in itertools.pairwise(positions):
            n = next((n for n in range(b - a) if self._signature_at(a + n) != self._signature_at(b + n)), None)
            if n is not None:
                one, next_one = (self._describe(position + n) for position in (a, b))
                reason = f"one call is followed by {one}, and the next, in its place, by {next_one}"
                for callee in self._ops[a].called_graphs:
                    self._reasons.setdefault(callee, reason)
                return

    def _signature_at(self, position: int) -> int | None:
        return self._signatures[position] if position < len(self._signatures) else None

    def _describe(self, position: int) -> str:
        """Describe an op, including its source line."""
        if position >= len(self._ops):
            return "nothing"
        op = self._ops[position]
        called = "".join(f" of {callee.title}" for callee in op.called_graphs)
        return f"`{op.op_type}`{called} ({op.source})"

    def _candidate_loops(self, first: int, end: int) -> Iterator[tuple[int, int, RerolledLoop]]:
        """Candidate loops within a range, best first, with start and end."""
        for span in periodic_ranges(self._signatures, self._sizes, first, end)[:TRIED]:
            problem = None
            for start, count in self._alignments(span):
                last = start + count * span.period
                by_iteration = [tuple(self._ops[i : i + span.period]) for i in range(start, last, span.period)]
                try:
                    yield start, last, reroll(by_iteration, self._roots, self._used_after(last))
                    return
                except NotRerollable as reason:
                    problem = problem or str(reason)
            for op in self._ops[span.first : span.first + span.period]:
                self._reasons.update((callee, problem or "") for callee in op.called_graphs)

    def _alignments(self, span: PeriodicRange) -> Iterator[tuple[int, int]]:
        """Candidate starts of the first iteration, with repetition counts: those with fewest carried values first. The
        first or last iteration may be special."""
        for start in sorted(
            span.starts, key=lambda start: (self._carried_values(start + span.period, span.period), start)
        ):
            yield start, span.repetitions
            if span.repetitions > FEWEST:
                yield start + span.period, span.repetitions - 1
                yield start, span.repetitions - 1

    def _carried_values(self, position: int, period: int) -> int:
        """Number of values carried across an iteration boundary."""
        after = {root for op in self._ops[position : position + period] for root in self._roots_read(op)}
        return sum(any(position - period <= start < position for start, _ in self._live.get(t, ())) for t in after)

    def _used_after(self, position: int) -> set[Tensor]:
        """Storages read or modified after an index."""
        return {t for t, ranges in self._live.items() if any(start < position <= last for start, last in ranges)}
