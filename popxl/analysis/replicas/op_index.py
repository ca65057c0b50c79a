"""Index of a program's ops by traits: one pass for all checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


@dataclass(eq=False, slots=True)
class ProgramOps:
    """Ops of a program by traits, with composite ops expanded.

    Attributes:
        by_graph: all ops of each graph that runs, in program order.
        calls: ops that run graphs.
        collectives: ops between replicas.
        moves: collectives without a reduction: they gather, divide or exchange values.
        statements: ops that assert equal values.
        exchanges: loads and stores of host streams and remote buffers.
        dropouts: ops that drop elements.
        draws: ops that make random numbers.
        products: ops that multiply and sum.
    """

    by_graph: dict[Graph, Sequence[Op]] = field(default_factory=dict)
    calls: list[Op] = field(default_factory=list)
    collectives: list[Op] = field(default_factory=list)
    moves: list[Op] = field(default_factory=list)
    statements: list[Op] = field(default_factory=list)
    exchanges: list[Op] = field(default_factory=list)
    dropouts: list[Op] = field(default_factory=list)
    draws: list[Op] = field(default_factory=list)
    products: list[Op] = field(default_factory=list)

    def add(self, op: Op) -> None:
        """Add an op to the list of its trait, if it has one."""
        kind = op.kind
        if kind.runs is not None:
            self.calls.append(op)
        elif kind.between_replicas:
            self.collectives.append(op)
            if "op" not in op.attributes:
                self.moves.append(op)
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


def index_ops(main: Graph) -> ProgramOps:
    """Index a graph and its transitive callees, except for loops without iterations."""
    index = ProgramOps()
    waiting = [main]
    while waiting:
        graph = waiting.pop()
        if graph in index.by_graph:
            continue
        ops: Sequence[Op] = graph.ops
        if any([op.kind.stands_for is not None for op in ops]):
            ops = [part for op in ops for part in op.parts]
        index.by_graph[graph] = ops
        called: dict[Graph, None] = {}
        for op in ops:
            if op.kind.traits:
                index.add(op)
            runs = op.kind.runs
            if runs is not None and (not runs.is_loop or op.attributes[runs.iterations]):
                called |= dict.fromkeys(op.called_graphs)
        waiting += reversed(called)
    return index
