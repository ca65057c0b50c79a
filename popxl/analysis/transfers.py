"""Numbers of stream transfers that a program makes in one run, and the part of its host arrays that it does not use."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING

from popxl.base.source import warn_at
from popxl.core.aliasing import callees_first, lowered_ops, reachable
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.errors import UnusedTransferWarning
from popxl.graph import Graph
from popxl.streams import DeviceToHostStream, Stream

if TYPE_CHECKING:
    from popxl.ir import Ir


def transfers_of(main: Graph, fewest: bool = False) -> Counter[Stream]:
    """Maximum number of transfers per stream in one graph run; or the fewest, depending on conditions."""
    counts_of: dict[Graph, Counter[Stream]] = {}
    for graph in callees_first(main):
        counts = counts_of[graph] = Counter()
        for op in (part for each in graph.ops for part in each.parts):
            if op.kind.exchange == "stream":
                counts[op.attributes["stream"]] += 1
            branches = [Counter({s: n * run.iterations for s, n in counts_of[run.graph].items()}) for run in op.runs]
            if branches:  # of which one is run; `&` and `|` of counters are their minimum and maximum
                counts.update(reduce(and_ if fewest else or_, branches))
    return counts_of[main]


def unread_streams(main: Graph) -> set[Stream]:
    """Streams whose loaded values go unread."""
    read = {t for graph in reachable(main) for t in graph.outputs}
    loads: dict[Stream, list[Tensor]] = {}
    for op in lowered_ops(main.ops):
        loads_from = op.attributes["stream"] if op.kind.exchange == "stream" and op.outputs else None
        if loads_from is None:
            read.update(op.inputs)
        else:
            loads.setdefault(loads_from, []).extend(op.outputs)
    return {stream for stream, loaded in loads.items() if read.isdisjoint(loaded)}


def warn_of_unused_transfers(ir: Ir) -> None:
    """Warn about array rows that a run never writes or never reads.

    The warning names the first line that uses the stream.

    Host arrays have slots for the transfers of the stream with the most. So a stream with fewer loads than others gets
    more feeds than it needs, which is harmless; but missing stores leave zeros that look like results. A stream with
    its own number of transfers is checked in both directions.
    """
    main = ir.main_graph
    counts = transfers_of(main)
    needed = max((count for stream, count in counts.items() if not stream.has_own_transfers), default=0)
    users: dict[Stream, Op] = {}
    for op in lowered_ops(main.ops):
        if op.kind.exchange == "stream":
            users.setdefault(op.attributes["stream"], op)
    for stream, count in counts.items():
        is_output, is_own = isinstance(stream, DeviceToHostStream), stream.has_own_transfers
        capacity = stream.num_host_transfers
        if count >= capacity or not (is_output or is_own) and needed >= capacity:
            continue
        left = capacity - count
        what, verb = ("slot", "written") if is_output else ("value", "read")
        remedy = f" Those from number {count} on are no results." if is_output else ""
        if is_own and count:
            remedy = f" Make it with `num_host_transfers={count}`."
        elif 0 < needed < capacity:
            remedy = f" Set `ir.num_host_transfers` to {needed}."
        elif is_output and count:
            remedy += f" Give the stream a number of its own: `popxl.d2h_stream(..., num_host_transfers={count})`."
        setting = "its own `num_host_transfers`" if is_own else "`ir.num_host_transfers`"
        message = (
            f"Session: a run {'stores to' if is_output else 'loads from'} {stream} {_times(count)}, and "
            f"{setting} is {capacity}: {left} {what}{'s' * (left > 1)} of its host array "
            f"{'are' if left > 1 else 'is'} never {verb}.{remedy}"
        )
        warn_at(users[stream].source, message, UnusedTransferWarning)


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
