"""`merge_exchange` and `io_tile_exchange`: merging the transfers of a block of code.

At the end of the block, its loads and stores become as few `MultiExchange` ops as possible. The numbers do not change;
the device waits for the outside less often. `MultiExchange` is in `popxl.ops.exchange`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from popxl.context import get_current_graph, in_sequence, io_tiles
from popxl.core.dependencies import dependencies
from popxl.core.recording import Op
from popxl.graph import Graph
from popxl.ops.exchange import MergedOp, multi_exchange_kind
from popxl.ops.host import is_init

__all__ = ["io_tile_exchange", "merge_exchange"]


@contextmanager
def merge_exchange() -> Iterator[None]:
    """Merge the loads and stores created in the block, in the graph that is current at its start.

    At the end of the block they become as few `MultiExchange` ops as possible, with the same tensors. Ops on different
    IPUs or tile sets are not merged, and neither are two ops if one depends on the other: by its data, by `in_sequence`
    with other ops in between, or because some op of the block has to run between them. So use it where the order is
    free. Nothing is merged if the block raises.

    Example:
        >>> with popxl.in_sequence(False), popxl.transforms.merge_exchange():
        ...     x = ops.host_load(image_stream)
        ...     ops.host_store(loss_stream, loss)
        >>> x.producer.op_type
        'MultiExchange'
    """
    graph = get_current_graph()
    first_id = graph.ir.counters["op_ids"]
    yield
    _merge(graph, first_id)


@contextmanager
def io_tile_exchange(verify_overlap: bool = True) -> Iterator[None]:
    """Place the ops created in the block on the I/O tiles, without an order, and merge their loads and stores.

    Args:
        verify_overlap: check that one exchange is all that is left of the block, so that compute tiles are free to work
            meanwhile.

    Raises:
        RuntimeError: if more than one op is left, and `verify_overlap`. Initialisations do not count. The ops stay.

    Example:
        >>> with popxl.transforms.io_tile_exchange():
        ...     x = ops.host_load(image_stream)
        ...     ops.host_store(loss_stream, loss)
        >>> x.tile_set
        'io'
    """
    graph = get_current_graph()
    first_id = graph.ir.counters["op_ids"]
    with io_tiles(), in_sequence(False), merge_exchange():
        yield
    remaining = [op for op in graph.ops if op.id >= first_id and not is_init(op)]
    if verify_overlap and len(remaining) > 1:
        ops = ", ".join(f"{op.op_type}.{op.id} ({op.source})" for op in remaining)
        raise RuntimeError(
            f"More than one Op remained after io_tile_exchange in {graph.title}: {ops}. Loads and stores are merged "
            "only if none needs another's data. Move everything else out of the block, or pass `verify_overlap=False`."
        )


def _merge(graph: Graph, first_id: int) -> None:
    """Merge exchanges with ids from `first_id`.

    They are taken in rounds: an exchange is in the first round that comes after all it needs. So all exchanges of one
    round are free to run together, and there are no more rounds than the longest chain of needs has exchanges.
    """
    candidates = {
        op: None for op in graph.ops if op.id >= first_id and all(member.kind.exchange for member in op.parts)
    }
    if len(candidates) < 2:
        return
    start = graph.ops.index(next(iter(candidates)))
    needs = dependencies(graph)
    groups: dict[tuple[int, int], list[Op]] = defaultdict(list)
    group_of: dict[Op, tuple[int, int]] = {}
    location_ids: dict[object, int] = {}
    rank: dict[Op, tuple[int, int]] = {}
    completed = {op: 0 for op in graph.ops[:start]}  # for each op, how many rounds are over after it
    for op in graph.ops[start:]:
        completed[op] = max((completed[earlier] for earlier in needs[op].ops), default=0)
        rank[op] = (completed[op], -1)
        if op in candidates:
            location = location_ids.setdefault((op.ipu, op.io_tiles, op.execution_context), len(location_ids))
            # One that comes first only in order may be in the same exchange, where the order is kept.
            concurrent = {b for b in needs[op].order - needs[op].data if b in group_of and group_of[b][1] == location}
            rounds = [completed[b] for b in needs[op].ops - concurrent] + [group_of[b][0] for b in concurrent]
            rank[op] = group_of[op] = (max(rounds, default=0), location)
            groups[rank[op]].append(op)
            completed[op] = rank[op][0] + 1
    merged = [ops for ops in groups.values() if len(ops) > 1]
    if merged:
        graph.reorder(graph.ops[:start] + sorted(graph.ops[start:], key=rank.__getitem__))
    for ops in merged:
        members = [member for op in ops for member in op.parts]
        # Free names: no number is used up for a suffix, so later names are the same as without merging.
        names = [f"{t.name}/exchange" for member in members for t in member.outputs]
        graph.replace(ops, partial(multi_exchange_kind, parts=tuple(map(MergedOp.from_op, members)), results=names))
