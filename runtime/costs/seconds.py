"""Time estimates from a chip's published figures, for each graph and each product precision."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from popxl.base.records import Record
from runtime.costs.work import Account, Collective, Product, Work
from runtime.targets.chip import Chip, Tpu

Bound = Literal["compute", "memory", "network", "host"]


class GraphCost(Record):
    """Work of one graph in one run of the program, summed over its calls.

    Attributes:
        name: the name of the graph; that of the main graph is "".
        flops: floating point operations.
        bytes_accessed: bytes read and written in the memory of the device.
        network_bytes: bytes that a chip sends to others.
        host_bytes: bytes between a chip and its host.
        seconds: how long it takes by the chip's published figures, if each of these goes on while the others do;
            `None` for a device without such figures.
        bound: which of them takes longest.
    """

    name: str
    flops: int
    bytes_accessed: int
    network_bytes: int
    host_bytes: int
    seconds: float | None
    bound: Bound | None


class PrecisionCost(Record):
    """Estimated run cost with float32 products at a given precision, and so less exact. Derived from published figures;
    accounts only for the passes of products.

    Attributes:
        products: seconds for the products of float32.
        cycles: the same in cycles, for TPUs; `None` elsewhere.
        seconds: for a run, as in `Cost.seconds`: it takes no longer where something else bounds it.
    """

    products: float
    cycles: int | None
    seconds: float


_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "u8": "int8"}
"""XLA's names of dtypes, and those of the figures. All that begin with "f8" are float8."""

_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}
"""How much of its bytes a chip sends in a collective of n chips, if each sends to its neighbour only."""


def _bytes_sent(collective: Collective, all_replicas: int) -> int:
    """Bytes sent by one chip in a run of the collective."""
    count = collective.group_size or all_replicas
    share = _SENT.get(collective.kind, lambda _: 1.0)(count)
    return math.ceil(collective.runs * collective.bytes * share)


def graphs_of(account: Account, host: Mapping[str, int], figures: Chip | None, all_replicas: int) -> list[GraphCost]:
    """Cost of each graph, longest first."""
    sent: defaultdict[str, int] = defaultdict(int)
    for each in account.collectives:
        sent[each.graph] += _bytes_sent(each, all_replicas)
    names = dict.fromkeys((*account.graphs, *(name for name, count in host.items() if count)))
    graphs = (_graph(name, account.graphs.get(name, Work()), sent[name], host.get(name, 0), figures) for name in names)
    return sorted(graphs, key=lambda graph: -(graph.seconds or 0))


def _graph(name: str, work: Work, sent: int, crossing: int, figures: Chip | None) -> GraphCost:
    times = {} if figures is None else _times(work, sent, crossing, figures)
    bound = max(times, key=lambda each: times[each], default=None)
    return GraphCost(
        name=name,
        flops=work.flops,
        bytes_accessed=work.memory_bytes,
        network_bytes=sent,
        host_bytes=crossing,
        seconds=None if bound is None else times[bound],
        bound=bound,
    )


def _times(work: Work, sent: int, crossing: int, figures: Chip) -> dict[Bound, float]:
    """Time in seconds per bound, each considered alone."""
    rates = {key: figures.rate(_dtype(key.dtype), key.precision) for key in work.products}
    return {
        "compute": sum(count / rates[key] for key, count in work.products.items()),
        "memory": work.memory_bytes / figures.memory_bandwidth,
        "network": sent / figures.network_bandwidth,
        "host": crossing / figures.host_bandwidth,
    }


LEVELS = ("highest", "high", "default")
"""JAX's precisions, the slowest first."""


def precisions_of(account: Account, figures: Chip, seconds: Callable[[str], float]) -> dict[str, PrecisionCost]:
    """Run cost at the current precision of float32 products, and at each faster precision.

    Args:
        account: what a run does.
        figures: those of the chip.
        seconds: how long a run takes at a precision.
    """
    levels = {key.precision for work in account.graphs.values() for key in work.products if key.dtype == "f32"}
    first = min(map(LEVELS.index, levels), default=len(LEVELS))
    found = {}
    for level in LEVELS[first:]:
        products = (item for work in limited(level, account).graphs.values() for item in work.products.items())
        passes = sum(count / figures.rate("float32", key.precision) for key, count in products if key.dtype == "f32")
        found[level] = PrecisionCost(
            products=passes,
            cycles=round(passes * figures.clock) if isinstance(figures, Tpu) else None,
            seconds=seconds(level),
        )
    return found


def seconds_of(account: Account, host: Mapping[str, int], figures: Chip | None, all_replicas: int) -> float:
    """Time in seconds of graphs executed sequentially; 0 without figures."""
    return sum(graph.seconds or 0 for graph in graphs_of(account, host, figures, all_replicas))


def limited(level: str, account: Account) -> Account:
    """Copy of an account with the precision of float32 products capped at `level`; faster products stay unchanged."""
    return Account(
        {name: _with_capped_precision(level, work) for name, work in account.graphs.items()}, account.collectives
    )


def _with_capped_precision(level: str, work: Work) -> Work:
    """Copy of `work` with the precision of float32 products capped at `level`; faster products stay unchanged."""
    products: Counter[Product] = Counter()
    for key, count in work.products.items():
        reached = max(level, key.precision, key=LEVELS.index) if key.dtype == "f32" else key.precision
        products[key._replace(precision=reached)] += count
    return replace(work, products=products)


def _dtype(of_xla: str) -> str:
    return "float8" if of_xla.startswith("f8") else _DTYPES.get(of_xla, of_xla)
