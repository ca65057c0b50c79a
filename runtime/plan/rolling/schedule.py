"""An order of the ops of a graph in which what belongs to one turn of a loop stands together.

Programs often say all gradients first, and then all updates. Nothing is changed by an update being made as soon as its
gradient is there, and everything before it that reads the weight. So of the ops that could be next, this order takes
the first of those with the fewest calls to come after them: an update rather than the gradient of the next layer.

What begins with nothing that was computed, such as a load, stays behind all that the program says before it: what is
loaded early takes room. So does an op like which there are no others: it would only come between turns. One that makes
nothing, such as a store to a stream of its own, even comes after all that could be next.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

from popxl.core.dependencies import dependencies
from popxl.core.recording import Op
from popxl.graph import Graph
from runtime.plan.rolling.patterns import FEWEST


def close_together(graph: Graph, form: Callable[[Op], int]) -> list[Op]:
    """The ops of a graph in such an order. What `in_sequence` says does not matter here: it changes no numbers.

    Args:
        graph: the graph.
        form: equal for ops that may take part in different turns.
    """
    ops = graph.ops
    count = Counter(map(form, ops))
    is_rare = {op: count[form(op)] < FEWEST for op in ops}
    needs = {op: needed.data | needed.exchanges for op, needed in dependencies(graph).items()}
    place = {op: i for i, op in enumerate(ops)}
    followers: defaultdict[Op, list[Op]] = defaultdict(list)
    read = {t for op in ops for t in op.inputs} | {*graph.outputs}
    ahead = dict.fromkeys(ops, 0)  # calls whose results are read, on the longest way that begins with an op
    for op in reversed(ops):
        ahead[op] += bool(op.called_graphs) and not read.isdisjoint(op.outputs)
        for needed in needs[op]:
            ahead[needed] = max(ahead[needed], ahead[op])
            followers[needed].append(op)
    missing = {op: len(needed) for op, needed in needs.items()}
    waits = {op: is_rare[op] or _begins(op) for op in ops}
    ready: list[tuple[bool, int, int]] = []
    ordered: list[Op] = []
    taken: set[Op] = set()
    upto = 0  # all ops before this place are taken

    def offer(op: Op) -> None:
        if not missing[op] and (not waits[op] or place[op] == upto):
            heappush(ready, (is_rare[op] and not op.outputs, ahead[op], place[op]))

    for op in ops:
        offer(op)
    while ready:
        op = ops[heappop(ready)[-1]]
        ordered.append(op)
        taken.add(op)
        for follower in followers[op]:
            missing[follower] -= 1
            if not waits[follower]:
                offer(follower)
        before = upto
        while upto < len(ops) and ops[upto] in taken:
            upto += 1
        if before < upto < len(ops) and waits[ops[upto]]:
            offer(ops[upto])
    return ordered


def _begins(op: Op) -> bool:
    """Whether an op is given nothing that was computed: variables, constants, inputs, and room to write to."""
    makers = (t.producer for t in op.inputs)
    return all(maker is None or not maker.inputs for maker in makers)
