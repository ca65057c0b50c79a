"""In-place changes without a defined order, which a session refuses to run.

Only data flow and `popxl.in_sequence` order the ops of a graph. Where an op overwrites a tensor and another op reads
the same storage, the program has to state their order; creation order would decide it here, but a reader of the program
could not tell. No values are computed: the check compares the storages that ops read and the elements that views show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from popxl.core.aliasing import bases_first, reachable, storages
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.graph import Graph


def check_in_place_order(graph: Graph) -> None:
    """Check a graph and every called graph, each separately.

    A graph without in-place ops costs one look at each op; one with them, one bit for each op that touches a storage
    that changes, per op.

    Raises:
        PopxlError: if an op overwrites a tensor that another op reads, and neither comes before the other.
    """
    for checked in reachable(graph):
        if any(_overwrites(op) for op in checked.ops):
            _check(checked)


def _overwrites(op: Op) -> bool:
    """Test whether an op changes an operand and returns an alias; write-backs of calls excluded."""
    return bool(op.modified) and op.kind.aliased


@dataclass
class _Users:
    """Ops that touch one storage, as bit sets, with their operands."""

    readers: int = 0
    writers: int = 0
    operands: dict[int, list[tuple[Op, Tensor, bool]]] = field(default_factory=lambda: defaultdict(list))


def _check(graph: Graph) -> None:
    """Make one pass in creation order, comparing every op with earlier ops."""
    storages_of = storages(graph.ops)
    changing = {s for op in graph.ops if _overwrites(op) for i in op.modified for s in storages_of[op.inputs[i]]}
    regions = _Regions(storages_of)
    # Fragments of the program run one after the other, so users are grouped by execution context too.
    users: dict[object, _Users] = defaultdict(_Users)
    up_to: dict[object, int] = {}  # by id of an op and by called graph: it, and all that comes before it
    bit = 1
    for op in graph.ops:
        predecessors = 0
        for t in op.inputs:
            if t.producer is not None:
                predecessors |= up_to[t.producer.id]
        for id in op.after:
            predecessors |= up_to[id]
        for callee in op.called_graphs:  # a gradient comes after its forward call, also if it needs no result of it
            predecessors |= up_to.get(callee.gradient_of, 0)
        overwritten = op.modified if _overwrites(op) else frozenset()
        touched = [
            (t, i in overwritten, users[s, op.execution_context])
            for i, t in enumerate(op.inputs)
            for s in storages_of[t]
            if s in changing and op.kind.view is None  # looking through a view counts, making it does not
        ]
        for t, writes, known_users in touched:
            for k in _bits((known_users.readers if writes else known_users.writers) & ~predecessors):
                for earlier, u, is_written in known_users.operands[k]:
                    if (writes or is_written) and regions.overlap(t, u):
                        raise _ambiguity(graph, op, t, earlier) if writes else _ambiguity(graph, earlier, u, op)
        for t, writes, known_users in touched:
            known_users.readers |= bit
            known_users.writers |= bit if writes else 0
            known_users.operands[bit].append((op, t, writes))
        up_to[op.id] = predecessors | (bit if touched else 0)
        for callee in op.called_graphs:
            up_to[callee] = up_to.get(callee, 0) | up_to[op.id]
        bit <<= bool(touched)


def _bits(number: int) -> Iterator[int]:
    """Positions of set bits."""
    while number:
        yield number & -number
        number &= number - 1


class _Regions:
    """Storage elements that a tensor views, computed on demand for ops whose order is otherwise ambiguous."""

    def __init__(self, storages_of: dict[Tensor, tuple[Tensor, ...]]) -> None:
        self._storages = storages_of
        self._numbers: dict[Tensor, np.ndarray] = {}
        self._next = 0

    def overlap(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors that share a storage share an element."""
        (storage, *more) = {*self._storages[a], *self._storages[b]}
        if not more and storage.nelms in (a.nelms, b.nelms):  # one of them is the whole storage
            return True
        first, second = self._elements(a), self._elements(b)
        if not first.size or not second.size or first.max() < second.min() or second.max() < first.min():
            return False
        return bool(np.isin(first, second).any())

    def _elements(self, t: Tensor) -> np.ndarray:
        """Number tensor elements so that elements of equal storage have equal numbers."""
        for view in bases_first(t.origin, self._numbers, self._bases_of):
            bases = self._bases_of(view)
            if bases and view.producer is not None:
                # A view only moves elements, so its effect on values is its effect on their numbers.
                self._numbers[view] = np.asarray(view.producer.apply([self._numbers[base] for base in bases]))
            else:
                numbers = np.arange(self._next, self._next + view.nelms, dtype=np.int32)
                self._numbers[view] = numbers.reshape(view.shape)
                self._next += view.nelms
        return self._numbers[t.origin]

    def _bases_of(self, t: Tensor) -> list[Tensor]:
        return [] if t.producer is None or self._storages[t] == (t,) else [base.origin for base in t.producer.bases]


def _ambiguity(graph: Graph, writer: Op, t: Tensor, reader: Op) -> PopxlError:
    def op_text(op: Op) -> str:
        text = op.source.text
        return f"{op.op_type}.{op.id} ({f'`{text}`, ' if text else ''}{op.source})"

    return PopxlError(
        f"Inplacing ambiguity detected. In {graph.title} the op {op_text(writer)} changes `{t.path}` in place, and the "
        f"op {op_text(reader)} reads the same storage, but nothing says which of the two comes first. Create both "
        "inside `with popxl.in_sequence():`, or give the later one the result of the earlier one."
    )
