"""Op clustering: an order of a graph's ops that makes each loop iteration's ops contiguous.

Programs often say all gradients first, and then all updates. Nothing is changed by an update being made as soon as its
gradient is there, and everything before it that reads the weight. So of the ops that could be next, this order takes
the first of those with the fewest calls to come after them: an update rather than the gradient of the next layer.

What begins with nothing that was computed, such as a load, stays behind all that the program says before it: what is
loaded early takes room. But a single number like which there are no others, such as a learning rate, keeps no update
from its turn. An op like which there are no others would only come between turns. Where no turn needs what it makes, it
comes after all that could be next.

What one turn alone needs and is made of variables, such as a weight in another dtype, comes right before what needs it,
though programs make it for all turns at first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush

from popxl.core.dependencies import external_resources
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from runtime.plan.loop_rerolling.op_signatures import OpSignatures
from runtime.plan.loop_rerolling.patterns import FEWEST


def cluster_iterations(ops: Sequence[Op], signatures: OpSignatures, returned: Container[Tensor]) -> list[Op]:
    """Reorder ops, with each iteration's ops together; ignores `in_sequence`, which changes no numbers.

    Args:
        ops: the ops, in an order in which they may be carried out.
        signatures: theirs. Those of one form may take part in different turns.
        returned: the storages that are read after them.
    """
    count = Counter(map(signatures.signature, ops))
    is_rare = {op: count[signatures.signature(op)] < FEWEST for op in ops}
    needs = _needs(ops, signatures)
    late = _late(ops, needs, is_rare, signatures)
    others = [op for op in ops if op not in late]
    through: dict[Op, set[Op]] = {}  # what an op needs of the others, also by way of what is late
    for op in ops:
        through[op] = {n for needed in needs[op] for n in (through[needed] if needed in late else (needed,))}
    made = {t for op in ops if op.inputs for t in op.outputs}
    place = {op: i for i, op in enumerate(ops)}
    ordered: dict[Op, None] = {}
    for op in (*_in_order(others, through, is_rare, signatures, made, returned), *sorted(late, key=place.__getitem__)):
        before, waiting = {op}, [op]
        while waiting:
            new = {n for n in needs[waiting.pop()] if n in late and n not in ordered} - before
            before |= new
            waiting += new
        ordered.update(dict.fromkeys(sorted(before, key=place.__getitem__)))
    return [*ordered]


def _late(
    ops: Sequence[Op], needs: Mapping[Op, Iterable[Op]], is_rare: Mapping[Op, bool], signatures: OpSignatures
) -> AbstractSet[Op]:
    """Ops on variables only that a single iteration needs, without another op of equal signature. (For constants,
    iterations would need a table.)"""
    followers: defaultdict[Op, list[int]] = defaultdict(list)
    for op in ops:
        for needed in needs[op]:
            followers[needed].append(signatures.signature(op))
    made_early: set[Tensor] = set()
    late: set[Op] = set()
    for op in ops:
        is_pure = not (op.modified or op.called_graphs or op.kind.exchange or op.kind.effect)
        roots = {root for t in op.inputs for root in signatures.roots(t)}
        begins = bool(roots) and made_early.isdisjoint(roots) and not any(isinstance(t, Constant) for t in roots)
        is_of_one = len({*followers[op]}) == len(followers[op]) > 0
        if is_pure and begins and is_of_one and not is_rare[op]:
            late.add(op)
        else:
            made_early.update(op.outputs)
    return late


def _in_order(
    ops: Sequence[Op],
    needs: Mapping[Op, AbstractSet[Op]],
    is_rare: Mapping[Op, bool],
    signatures: OpSignatures,
    made: AbstractSet[Tensor],
    returned: Container[Tensor],
) -> list[Op]:
    """Clustered ops, after their dependencies."""
    place = {op: i for i, op in enumerate(ops)}
    followers: defaultdict[Op, list[Op]] = defaultdict(list)
    read = {root for op in ops for t in op.inputs for root in signatures.roots(t)}
    ahead = dict.fromkeys(ops, 0)  # calls whose results are read, on the longest way that begins with an op
    is_put_off = dict(is_rare)
    for op in reversed(ops):
        ahead[op] += bool(op.called_graphs) and any(t in read or t in returned for t in op.outputs)
        for needed in needs[op]:
            ahead[needed] = max(ahead[needed], ahead[op])
            is_put_off[needed] &= is_put_off[op]
            followers[needed].append(op)
    missing = {op: len(needs[op]) for op in ops}

    def stays_behind(op: Op) -> bool:
        begins = made.isdisjoint(root for t in op.inputs for root in signatures.roots(t))
        return begins and not (is_rare[op] and all(t.nelms == 1 for t in op.outputs))

    waits = {op: is_put_off[op] or stays_behind(op) for op in ops}
    ready: list[tuple[bool, int, bool, int]] = []
    ordered: list[Op] = []
    taken: set[Op] = set()
    upto = 0  # all ops before this place are taken

    def offer(op: Op) -> None:
        if not missing[op] and (not waits[op] or place[op] == upto):
            heappush(ready, (is_put_off[op], ahead[op], is_rare[op], place[op]))

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


def _needs(ops: Sequence[Op], signatures: OpSignatures) -> dict[Op, set[Op]]:
    """Op dependencies: last writers of inputs, readers of modified storages, and users of shared resources."""
    needs: dict[Op, set[Op]] = {}
    changed: dict[object, Op] = {}
    readers: defaultdict[Tensor, set[Op]] = defaultdict(set)
    for op in ops:
        touched = [(root, i in op.modified) for i, t in enumerate(op.inputs) for root in signatures.roots(t)]
        things = [*external_resources(op)]
        needs[op] = {changed[thing] for thing in (*things, *(root for root, _ in touched)) if thing in changed}
        for root, writes in touched:
            needs[op] |= readers[root] if writes else set()
        for root, writes in touched:
            if writes:
                changed[root], readers[root] = op, set()
            else:
                readers[root].add(op)
        changed.update(dict.fromkeys((*things, *op.outputs), op))
    return needs
