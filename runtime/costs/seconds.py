"""Time estimates from a chip's published figures, for each graph and each product precision."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from popxl.base.records import Record
from runtime.costs.work import Account, Collective, Product, Work
from runtime.targets.chip import Chip, Tpu

if TYPE_CHECKING:
    from runtime.costs.network import CollectiveTime
    from runtime.costs.step import StepTimeline

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


class PrecisionCost(Record):
    """Estimated run cost with float32 products at a given precision, and so less exact. Derived from published figures;
    accounts only for the passes of products.

    Attributes:
        products: seconds for the products of float32.
        cycles: the same in cycles, for TPUs; `None` elsewhere.
        seconds: time of a run, as in `Cost.seconds`: not longer if something else bounds it.
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


def graphs_of(
    account: Account,
    host: Mapping[str, int],
    figures: Chip | None,
    all_replicas: int,
    price: Callable[[Collective], CollectiveTime] | None = None,
    step: StepTimeline | None = None,
) -> list[GraphCost]:
    """Cost of each graph, longest first.

    Args:
        host: bytes between a chip and its host, by graphs.
        price: time of a collective; by default that of one switch for all chips.
    """
    sent, network = defaultdict[str, int](int), defaultdict[str, float](float)
    for each in account.collectives:
        own = _bytes_sent(each, all_replicas)
        sent[each.graph] += own
        if figures is not None:
            network[each.graph] += own / figures.network_bandwidth if price is None else each.runs * price(each).seconds
    names = dict.fromkeys((*account.graphs, *(name for name, count in host.items() if count)))
    graphs = []
    for name in names:
        work, crossing = account.graphs.get(name, Work()), host.get(name, 0)
        times = {} if figures is None else _times(work, network[name], crossing, figures)
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
    return sorted(graphs, key=lambda graph: -(graph.seconds or 0))


def _times(work: Work, network: float, crossing: int, figures: Chip) -> dict[Bound, float]:
    """Time in seconds per bound, each considered alone."""
    rates = {key: figures.rate(dtype_of(key.dtype), key.precision) for key in work.products}
    return {
        "compute": sum(count / rates[key] for key, count in work.products.items()),
        "memory": work.memory_bytes / figures.memory_bandwidth,
        "network": network,
        "host": crossing / figures.host_bandwidth,
    }


LEVELS = ("highest", "high", "default")
"""JAX's precisions, the slowest first."""


def precisions_of(account: Account, figures: Chip, seconds: Callable[[str], float]) -> dict[str, PrecisionCost]:
    """Run cost at the current precision of float32 products, and at each faster precision.

    Args:
        seconds: function that returns the time of a run at a precision.
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


def limited(level: str, account: Account) -> Account:
    """Copy of an account with the precision of float32 products capped at `level`; faster products stay unchanged."""
    return Account(
        {name: _with_capped_precision(level, work) for name, work in account.graphs.items()}, account.collectives
    )


def _with_capped_precision(level: str, work: Work) -> Work:
    """Copy of `work` with the precision of float32 products capped at `level`; faster products stay unchanged."""
    products: Counter[Product] = Counter()
    for product, count in work.products.items():
        products[_capped_product(level, product)] += count
    return replace(work, products=products)


def capped(level: str, work: Work) -> Work:
    """Work of a kernel, with the precision of its float32 products capped at `level`."""
    if level == LEVELS[0]:
        return work
    sized = [each._replace(product=_capped_product(level, each.product)) for each in work.sized]
    return replace(work, sized=sized, cycles=work.cycles if sized == work.sized else 0)


def _capped_product(level: str, product: Product) -> Product:
    """Float32 product with precision capped at `level`; other products stay unchanged."""
    if product.dtype != "f32":
        return product
    return product._replace(precision=max(level, product.precision, key=LEVELS.index))


def dtype_of(of_xla: str) -> str:
    return "float8" if of_xla.startswith("f8") else _DTYPES.get(of_xla, of_xla)
