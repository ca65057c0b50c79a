"""`GraphCost`: work and time of one graph of a program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from popxl.base.records import Record
from runtime.costs.network import Wires
from runtime.costs.step_timeline import StepTimeline
from runtime.costs.work import Account, Collective, Work

Bound = Literal["compute", "memory", "network", "host"]


class GraphCost(Record):
    """Work of one graph in one run of the program, summed over its calls.

    Attributes:
        name: name of the graph; "" for the main graph.
        flops: floating point operations.
        bytes_accessed: bytes read and written in the memory of the device.
        network_bytes: bytes that a chip sends to other chips.
        host_bytes: bytes between a chip and its host.
        seconds: lower bound of the time by the chip's published figures, if all of these overlap; `None` for a device
            without such figures.
        bound: figure that takes longest.
        limits: share of the run's timeline, in seconds, by the bounds of its kernels: "compute", "memory", their
            "launch", and exposed time of the "network" and the "host".
    """

    name: str
    flops: int
    bytes_accessed: int
    network_bytes: int
    host_bytes: int
    seconds: float | None
    bound: Bound | None
    limits: Mapping[str, float] = {}


_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}
"""Bytes sent by a chip in a collective of n chips, as a share of its bytes, if each chip sends to its neighbour
only."""


def _bytes_sent(collective: Collective, all_replicas: int) -> int:
    """Bytes sent by one chip in a run of the collective."""
    count = collective.group_size or all_replicas
    share = _SENT.get(collective.kind, lambda _: 1.0)(count)
    return math.ceil(collective.runs * collective.bytes * share)


def graphs_of(
    account: Account,
    host: Mapping[str, int],
    all_replicas: int,
    wires: Wires | None = None,
    step: StepTimeline | None = None,
) -> tuple[GraphCost, ...]:
    """Cost of each graph, longest first; without times where the chip's figures are not known.

    Args:
        host: bytes between a chip and its host, by graphs.
        wires: links between the chips, with their figures.
        step: timeline of the run.
    """
    sent, network = defaultdict[str, int](int), defaultdict[str, float](float)
    for each in account.collectives:
        sent[each.graph] += _bytes_sent(each, all_replicas)
        network[each.graph] += 0.0 if wires is None else each.runs * wires.time(each).seconds
    graphs = []
    for name in dict.fromkeys((*account.graphs, *(name for name, count in host.items() if count))):
        work, crossing = account.graphs.get(name, Work()), host.get(name, 0)
        times: dict[Bound, float] = {}
        if wires is not None:
            chip = wires.chip
            times = {
                "compute": sum(count / chip.rate(*product) for product, count in work.products.items()),
                "memory": work.memory_bytes / chip.memory_bandwidth,
                "network": network[name],
                "host": crossing / chip.host_bandwidth,
            }
        bound = max(times, key=lambda each: times[each], default=None)
        graphs.append(
            GraphCost(
                name=name,
                flops=work.flops,
                bytes_accessed=work.memory_bytes,
                network_bytes=sent[name],
                host_bytes=crossing,
                seconds=None if bound is None else times[bound],
                bound=bound,
                limits={} if step is None else dict(step.graphs.get(name, {})),
            )
        )
    return tuple(sorted(graphs, key=lambda graph: -(graph.seconds or 0)))
