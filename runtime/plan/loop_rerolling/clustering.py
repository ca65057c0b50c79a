"""Op clustering: an order of a graph's ops that makes each loop iteration's ops contiguous.

Programs often create all gradients first, and then all updates. An update may move up to the point where its gradient
is available and all earlier reads of the weight are done. So among the ops that are ready, this order takes the first
of those with the fewest calls after them: an update before the gradient of the next layer.

An op without computed operands, such as a load, stays behind all ops that precede it in the program: an early load
occupies memory. But a scalar without counterparts in other iterations, such as a learning rate, does not keep an update
out of its iteration. An op without counterparts would only separate iterations. If no iteration needs its result, it
comes after all ops that are ready.

Slots of remote buffers are like variables: an update of one may move up to its gradient. So a load from a slot that is
used before the next call comes right before its user. A load ahead of another call stays there: its copy is to overlap
with that call.

A value that is computed from variables for a single iteration, such as a weight in another dtype, comes right before
its user, although programs compute it for all iterations at first. If that takes one pass over the variable, it is
computed before each call that needs it, as long as the variable is unchanged: recomputing it moves fewer bytes than
stacking it in one loop and slicing the stack in another.

Alternatively, updates come after all other ops. They are then a loop of their own, which is lowered on whole arrays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush

from popxl.core.dependencies import Accesses, external_resources
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.ops.memory import without_wait
from popxl.remote_buffer import RemoteBuffer
from popxl.values.spec import size_in_bytes
from runtime.lowering.batched_loops import is_batchable
from runtime.plan.loop_rerolling.op_signatures import OpSignatures
from runtime.plan.loop_rerolling.patterns import FEWEST

Slot = tuple[RemoteBuffer, int]


class Clustering:
    """Ops of a graph, with what decides about their order.

    Attributes:
        signatures: signatures of the ops. Ops of one signature may be counterparts in different iterations.
        returned: storages that are read after them.
        positions: positions of the ops in the program.
        is_rare: whether an op has too few counterparts for a loop.
        slots: slots of remote buffers that ops load from or store to, by constant numbers.
        needs, followers: ops that an op comes after, and those that come after it.
    """

    def __init__(self, ops: Sequence[Op], signatures: OpSignatures, returned: Container[Tensor]) -> None:
        self.ops, self.signatures, self.returned = ops, signatures, returned
        self.positions = {op: i for i, op in enumerate(ops)}
        count = Counter(map(signatures.signature, ops))
        self.is_rare = {op: count[signatures.signature(op)] < FEWEST for op in ops}
        self.slots = _slots(ops, signatures)
        self.needs = _needs(ops, self.slots, signatures)
        self.followers = _followers(ops, self.needs)

    def ordered(self, batches_updates: bool) -> list[Op]:
        """The ops, with each iteration's together; ignores `in_sequence`, which changes no numbers.

        Args:
            batches_updates: whether updates of variables come after all other ops.
        """
        updates = self._updates() if batches_updates else frozenset()
        late = self._late() | {op for op in updates if not op.modified}
        through: dict[Op, set[Op]] = {}  # direct and indirect dependencies of an op, including those through late ops
        for op in self.ops:
            through[op] = {n for needed in self.needs[op] for n in (through[needed] if needed in late else (needed,))}
        again = {op: self._operand(op) for op in late}
        clustered = self._in_order([op for op in self.ops if op not in late], through, updates)
        ordered: list[Op] = []
        found: set[Op] = set()
        written: set[Tensor] = set()
        for op in (*clustered, *sorted(late, key=self.positions.__getitem__)):
            if op in found:
                continue
            before, waiting = {op}, [op]
            while waiting:
                needed = (n for n in self.needs[waiting.pop()] if n in late)
                repeated = again if op.called_graphs else {}
                new = {n for n in needed if n not in found or repeated.get(n) not in (None, *written)} - before
                before |= new
                waiting += new
            ordered += sorted(before, key=self.positions.__getitem__)
            found |= before
            written.update(root for i in op.modified for root in self.signatures.roots(op.inputs[i]))
        return ordered

    def _roots(self, op: Op) -> set[Tensor]:
        return {root for t in op.inputs for root in self.signatures.roots(t)}

    def _updates(self) -> AbstractSet[Op]:
        """Batchable updates of variables that only other updates read afterwards; and the ops on gradients that only
        these need, unless their results are smaller."""
        updates: set[Op] = set()
        for op in reversed(self.ops):
            if self.is_rare[op] or not updates.issuperset(self.followers[op]):
                continue
            size = max(map(size_in_bytes, op.inputs), default=0)
            is_larger = any(size_in_bytes(t) >= size for t in op.outputs)
            is_for_update = self.followers[op] and is_larger and not op.modified and is_batchable(op)
            if is_update(op, self.signatures) or is_for_update:
                updates.add(op)
        return updates

    def _operand(self, op: Op) -> Tensor | None:
        """Variable of equally many elements that an op reads, such as a cast's; `None` for other ops."""
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.kind.between_replicas:
            return None
        (t,) = op.inputs
        roots = self.signatures.roots(t)
        is_variable = len(roots) == 1 and roots[0].producer is None and t.shape == op.outputs[0].shape
        return roots[0] if is_variable else None

    def _late(self) -> AbstractSet[Op]:
        """Ops on variables only that a single iteration needs, without another op of equal signature. (For constants,
        iterations would need a table.) And loads from `slots` that are used before the next call, with their room."""
        made_early: set[Tensor] = set()
        late: set[Op] = set()
        used: set[Op] = set()  # by ops before the next call
        for op in reversed(self.ops):
            used = set() if op.called_graphs else used
            if op in used and op in self.slots and op.outputs and not op.modified and not self.is_rare[op]:
                late |= {op, *(n for n in self.needs[op] if not n.inputs and self.followers[n] == [op])}
            used |= self.needs[op]
        for op in self.ops:
            is_pure = not (op.modified or op.called_graphs or op.kind.exchange or op.kind.effect)
            roots, followers = self._roots(op), self.followers[op]
            begins = bool(roots) and made_early.isdisjoint(roots) and not any(isinstance(t, Constant) for t in roots)
            is_single = len({self.signatures.signature(each) for each in followers}) == len(followers) > 0
            if is_pure and begins and is_single and not self.is_rare[op]:
                late.add(op)
            elif op not in late:
                made_early.update(op.outputs)
        return late

    def _in_order(self, ops: Sequence[Op], needs: Mapping[Op, AbstractSet[Op]], updates: Container[Op]) -> list[Op]:
        """Clustered ops, after their dependencies; updates after others."""
        position = {op: i for i, op in enumerate(ops)}
        followers = _followers(ops, needs)
        computed = {t for op in self.ops if op.inputs for t in op.outputs}
        roots_read = {root for op in ops for root in self._roots(op)}
        ahead = dict.fromkeys(ops, 0)  # number of calls on the longest path of reads that starts at an op
        is_put_off = dict(self.is_rare)
        for op in reversed(ops):
            ahead[op] += bool(op.called_graphs) and any(t in roots_read or t in self.returned for t in op.outputs)
            for needed in needs[op]:
                ahead[needed] = max(ahead[needed], ahead[op])
                is_put_off[needed] &= is_put_off[op]
        missing = {op: len(needs[op]) for op in ops}

        def stays_behind(op: Op) -> bool:
            is_free = self.is_rare[op] and all(t.nelms == 1 for t in op.outputs)
            return computed.isdisjoint(self._roots(op)) and not is_free

        waits = {op: is_put_off[op] or stays_behind(op) for op in ops}
        ready: list[tuple[bool, bool, int, bool, int]] = []
        ordered: list[Op] = []
        emitted: set[Op] = set()
        upto = 0  # all ops before this place are taken

        def offer(op: Op) -> None:
            if not missing[op] and (not waits[op] or position[op] == upto):
                heappush(ready, (is_put_off[op], op in updates, ahead[op], self.is_rare[op], position[op]))

        for op in ops:
            offer(op)
        while ready:
            op = ops[heappop(ready)[-1]]
            ordered.append(op)
            emitted.add(op)
            for follower in followers[op]:
                missing[follower] -= 1
                if not waits[follower]:
                    offer(follower)
            before = upto
            while upto < len(ops) and ops[upto] in emitted:
                upto += 1
            if before < upto < len(ops) and waits[ops[upto]]:
                offer(ops[upto])
        return ordered


def is_update(op: Op, signatures: OpSignatures) -> bool:
    """Whether an op overwrites variables or graph inputs, and supports batching over all iterations."""
    overwritten = [root for i in op.modified for root in signatures.roots(op.inputs[i])]
    return bool(overwritten) and all(root.producer is None for root in overwritten) and is_batchable(op)


def _followers(ops: Sequence[Op], needs: Mapping[Op, Iterable[Op]]) -> defaultdict[Op, list[Op]]:
    followers: defaultdict[Op, list[Op]] = defaultdict(list)
    for op in ops:
        for needed in needs[op]:
            followers[needed].append(op)
    return followers


def _slots(ops: Sequence[Op], signatures: OpSignatures) -> dict[Op, Slot]:
    """Slots of remote buffers that ops load from or store to, where all numbers of a buffer's slots are constants."""
    overwritten = {root for op in ops for i in op.modified for root in signatures.roots(op.inputs[i])}
    slots: dict[Op, Slot] = {}
    others: set[object] = set()  # buffers with computed numbers, or used by called graphs
    for op in ops:
        given = (op.inputs[1], without_wait(op.inputs[1])) if op.kind.exchange == "buffer" else ()
        number = signatures.storage(given[-1]) if given else None
        if isinstance(number, Constant) and overwritten.isdisjoint(map(signatures.storage, given)):
            slots[op] = (op.attributes["buffer"], int(number.data.item()))
        else:
            others.update(external_resources(op))
    return {op: slot for op, slot in slots.items() if others.isdisjoint(external_resources(op))}


def _needs(ops: Sequence[Op], slots: Mapping[Op, Slot], signatures: OpSignatures) -> dict[Op, set[Op]]:
    """Op dependencies: last writers of inputs and slots, readers of modified ones, and users of shared resources."""
    needs: dict[Op, set[Op]] = {}
    accesses = Accesses()
    for op in ops:
        touched: list[tuple[object, bool]]
        touched = [(root, i in op.modified) for i, t in enumerate(op.inputs) for root in signatures.roots(t)]
        if op in slots:
            touched.append((slots[op], not op.outputs))  # a load has a result
        else:
            touched += [(resource, True) for resource in external_resources(op)]
        needs[op] = accesses.add(op, [*touched, *((t, True) for t in op.outputs)])
    return needs
