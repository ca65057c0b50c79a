"""`PrecisionCost`: cost of the precision of float32 products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from popxl.base.records import Record
from runtime.costs.work import Product, Work
from runtime.targets.chip import Chip, Tpu

LEVELS = ("highest", "high", "default")
"""JAX's precisions, the slowest first."""


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


def precisions_of(total: Work, chip: Chip, seconds: Callable[[str], float]) -> dict[str, PrecisionCost]:
    """Run cost at the current precision of float32 products, and at each faster precision.

    Args:
        total: work of the run.
        seconds: function that returns the time of a run at a precision.
    """
    counts = {key.precision: count for key, count in total.products.items() if key.dtype == "float32"}
    first = min(map(LEVELS.index, counts), default=len(LEVELS))
    costs = {}
    for level in LEVELS[first:]:
        products = sum(count / chip.rate("float32", _faster(level, own)) for own, count in counts.items())
        cycles = round(products * chip.clock) if isinstance(chip, Tpu) else None
        costs[level] = PrecisionCost(products=products, cycles=cycles, seconds=seconds(level))
    return costs


def capped(level: str, work: Work) -> Work:
    """Copy of `work` with the precision of float32 products capped at `level`; faster products stay unchanged."""

    def cap(product: Product) -> Product:
        return product._replace(precision=_faster(level, product.precision)) if product.dtype == "float32" else product

    products: Counter[Product] = Counter()
    for product, count in work.products.items():
        products[cap(product)] += count
    sized = [each._replace(product=cap(each.product)) for each in work.sized]
    return replace(work, products=products, sized=sized, cycles=work.cycles if products == work.products else 0)


def _faster(*levels: str) -> str:
    return max(levels, key=LEVELS.index)
