"""Dependencies between the ops of a graph, and the orders of its ops that they allow.

Creation order is one of these orders. Code that reorders the ops of a graph asks here first. In-place changes that the
*language* leaves unordered are a separate topic: `popxl.analysis.ambiguity`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from popxl.core.aliasing import reachable, storages

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
    made_of = storages(graph.ops)
    known: dict[int, Op] = {}
    inside, outside = Accesses(), Accesses()
    needs = {}
    for op in graph.ops:
        data = {t.producer for t in op.inputs if t.producer is not None}
        data |= inside.add(op, [(s, i in op.modified) for i, t in enumerate(op.inputs) for s in made_of[t]])
        order = {known[id] for id in op.after}
        order |= outside.add(op, [(resource, True) for resource in external_resources(op)])
        needs[op] = Needs(frozenset(data), frozenset(order))
        known[op.id] = op
    return needs


def external_resources(op: Op) -> Iterator[object]:
    """Resources outside program tensors used by an op or its callees."""
    called = dict.fromkeys(graph for callee in op.called_graphs for graph in reachable(callee))
    for each in (op, *(inner for graph in called for inner in graph.ops)):
        for part in each.parts:
            if part.kind.exchange:
                yield part.kind.exchange, part.attributes[part.kind.exchange]
            elif part.kind.effect:
                yield "effect"
