"""Dependencies between the ops of a graph, and the orders of its ops that they allow.

Creation order is one of these orders. Code that reorders the ops of a graph asks here first. In-place changes that the
*language* leaves unordered are a separate topic: `popxl.analysis.ambiguity`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from popxl.core.aliasing import lowered_ops, storages

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


@dataclass(frozen=True)
class Needs:
    """Direct predecessors of one op, without transitive ones.

    Attributes:
        data: ops that make what the op reads, use a storage that it overwrites, or overwrite one that it reads.
        order: ops from which no data flows: `in_sequence` puts them before the op, or both use the same stream, buffer
            or other resource outside of the program.
    """

    data: frozenset[Op]
    order: frozenset[Op]

    @property
    def ops(self) -> frozenset[Op]:
        """Both kinds."""
        return self.data | self.order


class Accesses:
    """Last writer of each storage or resource, and its readers since then."""

    def __init__(self) -> None:
        self._writers: dict[object, Op] = {}
        self._readers: defaultdict[object, set[Op]] = defaultdict(set)

    def add(self, op: Op, accesses: Collection[tuple[object, bool]]) -> set[Op]:
        """Record what an op accesses, and whether it writes it. Returns the earlier ops that have to precede it."""
        needed = {self._writers[what] for what, _ in accesses if what in self._writers}
        needed.update(*(self._readers[what] for what, writes in accesses if writes))
        for what, writes in accesses:
            if writes:
                self._writers[what], self._readers[what] = op, set()
            else:
                self._readers[what].add(op)
        return needed


def dependencies(graph: Graph) -> dict[Op, Needs]:
    """Map each op of a graph to its predecessors. Visits each op and its callees once."""
    storages_of = storages(graph.ops)
    op_by_id: dict[int, Op] = {}
    tensor_accesses, external_accesses = Accesses(), Accesses()
    needs = {}
    for op in graph.ops:
        data = {t.producer for t in op.inputs if t.producer is not None}
        data |= tensor_accesses.add(
            op, [(s, i in op.modified) for i, t in enumerate(op.inputs) for s in storages_of[t]]
        )
        order = {op_by_id[id] for id in op.after}
        order |= external_accesses.add(op, [(resource, True) for resource in external_resources(op)])
        needs[op] = Needs(frozenset(data), frozenset(order))
        op_by_id[op.id] = op
    return needs


def external_resources(op: Op) -> Iterator[object]:
    """Resources outside program tensors used by an op or its callees."""
    for executed in lowered_ops([op]):
        if executed.kind.exchange:
            yield executed.kind.exchange, executed.attributes[executed.kind.exchange]
        elif executed.kind.effect:
            yield "effect"
