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
        ops: as passed.
        returned: storages that are read after them.
        positions: positions of the ops in the program.
        slots: slots of remote buffers that ops load from or store to, by constant numbers.
        needs: ops that an op comes after.

    Args:
        signatures: signatures of the ops. Ops of one signature may be counterparts in different iterations.
    """

    def __init__(self, ops: Sequence[Op], signatures: OpSignatures, returned: Container[Tensor]) -> None:
        self.ops, self.returned, self._signatures = ops, returned, signatures
        self.positions = {op: i for i, op in enumerate(ops)}
        count = Counter(map(signatures.signature, ops))
        # Ops with too few counterparts for a loop.
        self._is_rare = {op: count[signatures.signature(op)] < FEWEST for op in ops}
        self.slots = _slots(ops, signatures)
        self.needs = _needs(ops, self.slots, signatures)
        self._followers = _followers(ops, self.needs)

    def ordered(self, batches_updates: bool) -> list[Op]:
        """The ops, with each iteration's together; ignores `in_sequence`, which changes no numbers.

        Args:
            batches_updates: whether updates of variables come after all other ops.
        """
        updates = self._updates() if batches_updates else frozenset()
        sunk = self._sunk() | {op for op in updates if not op.modified}
        needs: dict[Op, set[Op]] = {}  # ops other than sunk ones that an op comes after, directly or through sunk ones
        for op in self.ops:
            needs[op] = {n for needed in self.needs[op] for n in (needs[needed] if needed in sunk else (needed,))}
        recomputable = {op: self._variable_read(op) for op in sunk}
        clustered = self._clustered([op for op in self.ops if op not in sunk], needs, updates)
        ordered: list[Op] = []
        placed: set[Op] = set()
        written: set[Tensor] = set()
        for op in (*clustered, *sorted(sunk, key=self.positions.__getitem__)):
            if op in placed:
                continue
            group, waiting = {op}, [op]  # the op, and the sunk ops that it needs
            while waiting:
                needed = (n for n in self.needs[waiting.pop()] if n in sunk)
                repeated = recomputable if op.called_graphs else {}
                new = {n for n in needed if n not in placed or repeated.get(n) not in (None, *written)} - group
                group |= new
                waiting += new
            ordered += sorted(group, key=self.positions.__getitem__)
            placed |= group
            written.update(self._signatures.roots_written(op))
        return ordered

    def _updates(self) -> AbstractSet[Op]:
        """Batchable updates of variables that only other updates read afterwards; and the ops on gradients that only
        these need, unless their results are smaller."""
        updates: set[Op] = set()
        for op in reversed(self.ops):
            if self._is_rare[op] or not updates.issuperset(self._followers[op]):
                continue
            size = max(map(size_in_bytes, op.inputs), default=0)
            is_larger = any(size_in_bytes(t) >= size for t in op.outputs)
            is_for_update = self._followers[op] and is_larger and not op.modified and is_batchable(op)
            if is_update(op, self._signatures) or is_for_update:
                updates.add(op)
        return updates

    def _variable_read(self, op: Op) -> Tensor | None:
        """Variable of equally many elements that an op reads, such as a cast's; `None` for other ops."""
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.kind.between_replicas:
            return None
        (t,) = op.inputs
        roots = self._signatures.roots(t)
        is_variable = len(roots) == 1 and roots[0].producer is None and t.shape == op.outputs[0].shape
        return roots[0] if is_variable else None

    def _sunk(self) -> AbstractSet[Op]:
        """Ops to place right before their first users: ops on variables only that a single iteration needs, without
        another op of equal signature (for constants, iterations would need a table); and loads from `slots` that are
        used before the next call, with the allocations of their results."""
        computed: set[Tensor] = set()  # by other ops
        sunk: set[Op] = set()
        used: set[Op] = set()  # by ops before the next call
        for op in reversed(self.ops):
            used = set() if op.called_graphs else used
            if op in used and op in self.slots and op.outputs and not op.modified and not self._is_rare[op]:
                sunk |= {op, *(n for n in self.needs[op] if not n.inputs and self._followers[n] == [op])}
            used |= self.needs[op]
        for op in self.ops:
            is_pure = not (op.modified or op.called_graphs or op.kind.exchange or op.kind.effect)
            roots, followers = self._signatures.roots_read(op), self._followers[op]
            begins = bool(roots) and computed.isdisjoint(roots) and not any(isinstance(t, Constant) for t in roots)
            is_single = len({self._signatures.signature(each) for each in followers}) == len(followers) > 0
            if is_pure and begins and is_single and not self._is_rare[op]:
                sunk.add(op)
            elif op not in sunk:
                computed.update(op.outputs)
        return sunk

    def _clustered(self, ops: Sequence[Op], needs: Mapping[Op, AbstractSet[Op]], updates: Container[Op]) -> list[Op]:
        """Ops in the order of clusters, after their dependencies; updates after others."""
        position = {op: i for i, op in enumerate(ops)}
        followers = _followers(ops, needs)
        calls_ahead, is_deferred = self._looked_ahead(ops, needs)
        computed = {t for op in self.ops if op.inputs for t in op.outputs}
        missing = {op: len(needs[op]) for op in ops}  # number of ops that it comes after, and that are not taken yet

        def stays_behind(op: Op) -> bool:
            is_free = self._is_rare[op] and all(t.nelms == 1 for t in op.outputs)
            return computed.isdisjoint(self._signatures.roots_read(op)) and not is_free

        keeps_position = {op: is_deferred[op] or stays_behind(op) for op in ops}  # behind all ops that precede it
        ready: list[tuple[bool, bool, int, bool, int]] = []
        ordered: list[Op] = []
        taken: set[Op] = set()
        first = 0  # position of the first op that is not taken

        def push_if_ready(op: Op) -> None:
            if not missing[op] and (not keeps_position[op] or position[op] == first):
                heappush(ready, (is_deferred[op], op in updates, calls_ahead[op], self._is_rare[op], position[op]))

        for op in ops:
            push_if_ready(op)
        while ready:
            op = ops[heappop(ready)[-1]]
            ordered.append(op)
            taken.add(op)
            for follower in followers[op]:
                missing[follower] -= 1
                if not keeps_position[follower]:
                    push_if_ready(follower)
            before = first
            while first < len(ops) and ops[first] in taken:
                first += 1
            if before < first < len(ops) and keeps_position[ops[first]]:
                push_if_ready(ops[first])
        return ordered

    def _looked_ahead(
        self, ops: Sequence[Op], needs: Mapping[Op, AbstractSet[Op]]
    ) -> tuple[dict[Op, int], dict[Op, bool]]:
        """Number of calls on the longest path of reads that starts at an op; whether only rare ops need a rare op."""
        roots_read = {root for op in ops for root in self._signatures.roots_read(op)}
        calls_ahead = dict.fromkeys(ops, 0)
        is_deferred = dict(self._is_rare)
        for op in reversed(ops):
            calls_ahead[op] += bool(op.called_graphs) and any(t in roots_read or t in self.returned for t in op.outputs)
            for needed in needs[op]:
                calls_ahead[needed] = max(calls_ahead[needed], calls_ahead[op])
                is_deferred[needed] &= is_deferred[op]
        return calls_ahead, is_deferred


def is_update(op: Op, signatures: OpSignatures) -> bool:
    """Whether an op overwrites variables or graph inputs, and supports batching over all iterations."""
    overwritten = signatures.roots_written(op)
    return bool(overwritten) and all(root.producer is None for root in overwritten) and is_batchable(op)


def _followers(ops: Sequence[Op], needs: Mapping[Op, Iterable[Op]]) -> defaultdict[Op, list[Op]]:
    followers: defaultdict[Op, list[Op]] = defaultdict(list)
    for op in ops:
        for needed in needs[op]:
            followers[needed].append(op)
    return followers


def _slots(ops: Sequence[Op], signatures: OpSignatures) -> dict[Op, Slot]:
    """Slots of remote buffers that ops load from or store to, where all numbers of a buffer's slots are constants."""
    overwritten = {root for op in ops for root in signatures.roots_written(op)}
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
