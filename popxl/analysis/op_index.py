"""The ops of a program that checks look for, by their traits: one pass over the program instead of one for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


@dataclass(eq=False, slots=True)
class GraphOps:
    """The ops of one graph, and those that have certain traits, in program order; parts of composite ops instead of
    these.

    Attributes:
        ops: all of them.
        calls: ops that run graphs.
        collectives: ops between replicas.
        statements: those that declare values equal.
        exchanges: loads and stores of host streams and remote buffers.
        dropouts: ops that drop elements.
        draws: ops that make random numbers.
        products: ops that multiply and sum.
    """

    ops: list[Op]
    calls: list[Op] = field(default_factory=list)
    collectives: list[Op] = field(default_factory=list)
    statements: list[Op] = field(default_factory=list)
    exchanges: list[Op] = field(default_factory=list)
    dropouts: list[Op] = field(default_factory=list)
    draws: list[Op] = field(default_factory=list)
    products: list[Op] = field(default_factory=list)

    def add(self, op: Op) -> None:
        """Add an op to the lists of its traits, if any."""
        kind = op.kind
        if kind.between_replicas:
            self.collectives.append(op)
        elif kind.contracts is not None:
            self.products.append(op)
        elif kind.exchange:
            self.exchanges.append(op)
        elif kind.asserts:
            self.statements.append(op)
        elif kind.drops is not None:
            self.dropouts.append(op)
        elif kind.draws:
            self.draws.append(op)


def index_ops(main: Graph) -> dict[Graph, GraphOps]:
    """Index a graph and its direct and indirect callees."""
    found: dict[Graph, GraphOps] = {}
    waiting = [main]
    while waiting:
        graph = waiting.pop()
        if graph in found:
            continue
        found[graph] = index = GraphOps(graph.ops)
        called: dict[Graph, None] = {}
        for op in graph.ops:
            kind = op.kind
            if not kind.traits:
                continue
            if kind.graphs:
                called |= dict.fromkeys(op.called_graphs)
                index.calls.append(op)
            elif kind.stands_for is None:
                index.add(op)
            else:
                if index.ops is graph.ops:
                    index.ops = [part for each in graph.ops for part in each.parts]
                for part in op.parts:
                    index.add(part)
        waiting += reversed(called)
    return found
