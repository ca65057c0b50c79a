"""Changes of a program since a session, or a JAX function, was made from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from popxl.base.pages import listed
from popxl.core.aliasing import reachable
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.graph import Graph

if TYPE_CHECKING:
    from popxl.ir import Ir

_PARTS = {
    "inputs": "other inputs",
    "outputs": "other results",
    "modified": "other inputs that it changes",
    "attributes": "other attributes",
    "ipu": "another IPU",
}
"""Compared attributes of an op, with their names in messages."""


class Snapshot:
    """The reachable graphs of a program at one moment.

    `Ir.edits` counts changes, so that an unchanged program is not compared again; it also counts changes without
    effect.

    Args:
        graph: graph to observe. For the main graph, everything that sessions run, settings and remote buffers count
            too.

    Attributes:
        graphs: the graphs that are run, the graph first.

    Example:
        >>> before = Snapshot(ir.main_graph)
        >>> with ir.main_graph:
        ...     y = x + 1
        >>> print(*before.changes())
        the main graph has gained Op[Add...] (...)
    """

    def __init__(self, graph: Graph) -> None:
        self._ir = graph.ir if graph is graph.main_graph else None
        self.graphs = reachable(graph)
        self._contents = tuple(map(_Content.from_graph, self.graphs))
        self._settings = {} if self._ir is None else _settings(self._ir)

    def changes(self, outputs: bool = True) -> list[str]:
        """Short descriptions of the differences; empty if the graph runs the same as at the time of the snapshot.

        Args:
            outputs: whether additional outputs of graphs count as a change.
        """
        pairs = zip(self.graphs, self._contents, strict=True)
        texts = [text for graph, content in pairs for text in content.changes(graph, outputs)]
        now: Mapping[str, Any] = {} if self._ir is None else _settings(self._ir)
        return texts + [
            f"{name} is {now[name]}, and was {value}" for name, value in self._settings.items() if now[name] != value
        ]


def _settings(ir: Ir) -> dict[str, Any]:
    """Program settings outside the graphs that affect compilation."""
    return {
        "`ir.num_host_transfers`": ir.num_host_transfers,
        "what streams have of transfers of their own": dict(ir.stream_transfers),
        "`ir.replication_factor`": ir.replication_factor,
        **{f"remote buffer {buffer.remote_buffer_id}": repr(buffer) for buffer in ir.remote_buffers},
        "what fills remote buffers": [v for v in ir.main_graph.variables if v.location_info.isRemote()],
    }


@dataclass(frozen=True)
class _Content:
    """The content of a graph: relevant parts of each op, by name."""

    inputs: tuple[Tensor, ...]
    by_ref: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ops: dict[Op, tuple[Any, ...]]

    @staticmethod
    def from_graph(graph: Graph) -> _Content:
        ops = {op: tuple(getattr(op, name) for name in _PARTS) for op in graph.ops}
        return _Content(graph.inputs, tuple(t for t in graph.inputs if t.by_ref), graph.outputs, ops)

    def changes(self, graph: Graph, outputs: bool) -> Iterator[str]:
        """Differences between the snapshot and the current graph."""
        now = _Content.from_graph(graph)
        yield from _differences(graph.title, "", self.ops, now.ops)
        yield from _differences(graph.title, "input ", self.inputs, now.inputs)
        yield from _differences(graph.title, "input by reference ", self.by_ref, now.by_ref)
        if outputs:
            yield from _differences(graph.title, "output ", self.outputs, now.outputs)
        for i, (name, difference) in enumerate(_PARTS.items()):
            changed = [op for op, values in self.ops.items() if op in now.ops and not _equal(now.ops[op][i], values[i])]
            if changed and (outputs or name != "outputs"):
                yield f"{_sample_text(changed)} has {difference}"


def _equal(a: Any, b: Any) -> bool:
    """Compare parts of ops; attributes by identity, as they may hold arrays. Edits replace the whole mapping."""
    return a is b or (not isinstance(a, Mapping) and a == b)


def _differences(title: str, what: str, old: Collection[Any], now: Collection[Any]) -> Iterator[str]:
    """Added and removed items of a graph."""
    old_set, now_set = {*old}, {*now}
    gained, lost = [x for x in now if x not in old_set], [x for x in old if x not in now_set]
    for verb, items in (("gained", gained), ("lost", lost)):
        if items:
            yield f"{title} has {verb} {what}{_sample_text(items)}"
    if not gained and not lost and [*old] != [*now]:
        yield f"{title} has its {what.strip() or 'op'}s in another order"


def _sample_text(items: Sequence[Any]) -> str:
    """Text of some ops or tensors, abbreviated after two."""
    return listed((f"{x!r} ({x.source})" if isinstance(x, Op) else repr(x) for x in items), most=2)
