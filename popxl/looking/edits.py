"""What has changed in an Ir since a session was made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from popxl.core.aliasing import reachable
from popxl.graph import Graph
from popxl.op import Op

if TYPE_CHECKING:
    from popxl.ir import Ir

__all__ = ["Snapshot"]


class Snapshot:
    """What running an Ir runs, at one moment. Graphs that nothing calls are no part of it.

    Example:
        >>> before = Snapshot(ir)
        >>> with ir.main_graph:
        ...     y = x + 1
        >>> print(*before.changes())
        the main graph has gained Op[Add...] (...)
    """

    def __init__(self, ir: Ir) -> None:
        self._ir = ir
        self._ops = {graph: tuple(graph.ops) for graph in reachable(ir.main_graph)}
        self._counts = self._counted()

    def _counted(self) -> dict[str, int]:
        return {
            "num_host_transfers": self._ir.num_host_transfers,
            "replication_factor": self._ir.options.replication_factor,
        }

    def changes(self) -> list[str]:
        """What is different now, in a few words each; nothing, if the Ir runs the same as then."""
        found = [text for graph, ops in self._ops.items() for text in _changes(graph, ops)]
        now = self._counted()
        return found + [
            f"`ir.{name}` is {now[name]}, and was {count}" for name, count in self._counts.items() if now[name] != count
        ]


def _changes(graph: Graph, before: tuple[Op, ...]) -> Iterator[str]:
    if tuple(graph.ops) == before:
        return
    gained, lost = [op for op in graph.ops if op not in {*before}], [op for op in before if op not in {*graph.ops}]
    for what, ops in (("gained", gained), ("lost", lost)):
        if ops:
            yield f"{graph.title} has {what} {_some(ops)}"
    if not gained and not lost:
        yield f"{graph.title} has its ops in another order"


def _some(ops: Sequence[Op]) -> str:
    """Some ops, of which the first two are shown."""
    shown = ", ".join(f"{op!r} ({op.source})" for op in ops[:2])
    return f"{shown} and {len(ops) - 2} more" if len(ops) > 2 else shown
