"""Time of a graph before compilation: each op is a kernel, priced by its own shapes.

A compiler fuses ops, so a compiled program takes less time; a framework that dispatches op by op, such as PyTorch, runs
the kernels priced here. Views of an array (a reshape, a transpose, a slice) are free: kernels take strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from popxl.analysis.communication import exchanges_of
from popxl.analysis.flops import op_work
from popxl.core.aliasing import readers
from popxl.core.recording import Op
from popxl.graph import Graph
from popxl.values.spec import size_in_bytes
from runtime.costs.kernels import kernel_time
from runtime.costs.work import Product, SizedProduct, Work
from runtime.targets.chip import Chip

Exchanged = Callable[[str, int, int, int], float]
"""Seconds of a collective: its kind, the bytes of a replica, the stride between members of a group, and its size."""


@dataclass
class GraphTime:
    """Time of one run of a graph, op by op.

    Attributes:
        seconds: time of the chip, or of the host, which dispatches ahead of it, whichever is longer.
        device: time of the chip alone.
        network: share of collectives in it.
        dispatched: number of kernels and collectives.
        flops: operations of products.
    """

    seconds: float = 0.0
    device: float = 0.0
    network: float = 0.0
    dispatched: int = 0
    flops: int = 0

    def plus(self, more: GraphTime, times: float = 1) -> GraphTime:
        """The sum with another, `times` times."""
        fields = ("seconds", "device", "network", "dispatched", "flops")
        return GraphTime(*(getattr(self, name) + times * getattr(more, name) for name in fields))


class GraphKernel(NamedTuple):
    """Kernel of a graph in a run: one dispatch.

    Attributes:
        work: work of a kernel; `None` for collectives.
        exchanges: collectives: the kind and the bytes of a replica.
        stride, size: stride and size of the groups.
        runs: number of executions in a run of the graph.
        is_overlapped: whether collectives overlap with the kernel before, whose results they do not send.
    """

    work: Work | None
    exchanges: tuple[tuple[str, int], ...]
    stride: int
    size: int
    runs: int
    is_overlapped: bool = False


def kernels_of(graph: Graph) -> tuple[GraphKernel, ...]:
    """Kernels and collectives of a graph, including its callees.

    Element-wise ops that only the next element-wise op reads are one kernel with it.
    """
    return tuple(_kernels(graph, 1))


def graph_time(kernels: Graph | Sequence[GraphKernel], chip: Chip, exchanged: Exchanged) -> GraphTime:
    """Time of one run of a graph on a chip whose host dispatches each kernel.

    The host is ahead of the chip as long as the chip has more to do, so the longer of both counts. A collective
    overlaps with the kernel before it, unless it sends that kernel's result: one gradient overlaps with the computation
    of the next.

    Args:
        kernels: the graph, or `kernels_of` it.
        chip: figures of the chip; its `efficiency.dispatch` is the host's time for each kernel.
    """
    total, hidden = GraphTime(), 0.0
    for each in kernels_of(kernels) if isinstance(kernels, Graph) else kernels:
        if each.work is not None:
            hidden = each.runs * kernel_time(chip, each.work).seconds
            total.device += hidden
            total.flops += each.runs * sum(product.flops for product in each.work.sized)
            total.dispatched += each.runs
        for kind, nbytes in each.exchanges:
            time = each.runs * exchanged(kind, nbytes, each.stride, each.size)
            total.device += max(0.0, time - hidden) if each.is_overlapped else time
            total.network += time
            total.dispatched += each.runs
            hidden = 0.0
    total.seconds = max(total.device, total.dispatched * chip.efficiency.dispatch)
    return total


def _kernels(graph: Graph, times: int) -> Iterator[GraphKernel]:
    merged, last = _merged(graph), None
    for op in graph.ops:
        for run in op.runs:
            yield from _kernels(run.graph, times * run.iterations)
        if not op.runs and op.kind.between_replicas and op.attributes["group_size"] > 1:
            is_overlapped = last is not None and set(op.inputs).isdisjoint(last.outputs)
            groups = op.attributes["stride"], op.attributes["group_size"]
            yield GraphKernel(None, _exchanges(op), *groups, times, is_overlapped)
        elif work := merged.get(op):
            last = op
            yield GraphKernel(work, (), 1, 1, times)


def _exchanges(op: Op) -> tuple[tuple[str, int], ...]:
    """Collectives of an op, in the dtype of its tensors: compiled programs sum those of 16 bits in 32."""
    most = max(map(size_in_bytes, (*op.inputs, *op.outputs)))
    return tuple((kind, min(nbytes, most)) for kind, nbytes in exchanges_of(op))


def _merged(graph: Graph) -> dict[Op, Work]:
    """Work of a graph's kernels, by the last op of each."""
    ops = [op for op in graph.ops if not (op.runs or op.kind.between_replicas or op.kind.is_carried_out_by_others)]
    users = readers(graph)
    outputs = {*graph.outputs}
    merged = {op: work for op in ops if (work := _work(op)).kernels}
    for op in ops:
        if op not in merged or not op_work(op).is_elementwise or len(op.outputs) != 1:
            continue
        (result,) = op.outputs
        reader = users[result][0] if len(users.get(result, [])) == 1 else None
        if reader is not None and reader in merged and op_work(reader).is_elementwise:
            own, into = merged.pop(op), merged[reader]
            nbytes = size_in_bytes(result)
            saved = nbytes if result in outputs else 2 * nbytes
            into.memory_bytes += own.memory_bytes - saved
    return merged


def _work(op: Op) -> Work:
    """Work of an op as one kernel, which reads its operands and writes its results; none of a view."""
    work = op_work(op)
    if work.is_view:
        return Work()
    products = [
        SizedProduct(Product(dtype.removeprefix("u"), "default"), count * flops, *sizes)  # uint8 is as fast as int8
        for (dtype, flops, *sizes), count in work.products.items()
    ]
    nbytes = work.read + work.written
    return Work(kernels=1, bytes=nbytes, memory_bytes=nbytes, sized=products)
