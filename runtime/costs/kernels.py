"""Time of a kernel on a chip: its computation, its reads and writes, and a lower bound for its launch."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from runtime.costs.work import SizedProduct, Work
from runtime.targets.chip import Chip, Tpu

Limit = Literal["compute", "memory", "network", "host", "launch"]


class KernelTime(NamedTuple):
    """Time of a kernel, with its bound."""

    seconds: float
    limit: Limit


def attained(chip: Chip, product: SizedProduct) -> float:
    """Share of the published rate that a product attains, from 0 to 1.

    A unit computes whole blocks of the result, so a product that fills its blocks badly, or the last round of units,
    attains less. Units fill and drain, so short sums attain less, too.
    """
    efficiency = chip.efficiency
    useful = product.batch * product.rows * product.columns
    filled = 1.0
    if efficiency.tiles:
        rounds = (_blocks(product, chip.product_units, tile) * tile[0] * tile[1] for tile in efficiency.tiles)
        filled = useful / min(rounds)
    depth = product.depth / (product.depth + efficiency.depth) if product.depth else 1.0
    return efficiency.products * min(1.0, filled) * depth


def _blocks(product: SizedProduct, units: int, tile: tuple[int, int]) -> int:
    """Blocks that the units compute, in whole rounds. The longer side of a block lies along the longer side of the
    result."""
    rows, columns = sorted((product.rows, product.columns), reverse=True)
    along, across = sorted(tile, reverse=True)
    count = product.batch * math.ceil(rows / along) * math.ceil(columns / across)
    return units * math.ceil(count / units)


def product_seconds(chip: Chip, product: SizedProduct) -> float:
    """Time of a matrix product by its operations alone."""
    return product.flops / (chip.rate(*product.product) * attained(chip, product)) if product.flops else 0.0


def kernel_time(chip: Chip, work: Work) -> KernelTime:
    """Time of one kernel. XLA's own estimate of cycles goes before the figures of a TPU."""
    efficiency = chip.efficiency
    computed = sum(product_seconds(chip, each) for each in work.sized)
    times: dict[Limit, float] = {
        "compute": computed,
        "memory": work.memory_bytes / (chip.memory_bandwidth * efficiency.memory),
        "host": work.host_bytes / chip.host_bandwidth,
        "launch": efficiency.launch if work.kernels else 0.0,
    }
    if isinstance(chip, Tpu) and work.cycles:
        times["compute" if times["compute"] >= times["memory"] else "memory"] = work.cycles / chip.clock
    limit = max(times, key=lambda each: times[each])
    return KernelTime(times[limit], limit)
