"""Trains a small GPT in seven ways, and shows what each costs.

    python tests/benchmarks/variants.py [--tiny]

All start from the same weights and are fed the same ten batches. They are in `tests/popxl_addons/gpt`; their numbers
are tested in `tests/popxl_addons/test_addons_gpt.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from popxl.utils import table_to_string
from tests.benchmarks.harness import megabytes, progress, seconds
from tests.popxl_addons.gpt.model import Config, batches, first_weights
from tests.popxl_addons.gpt.training import Training
from tests.popxl_addons.gpt.variants import VARIANTS

STEPS = 10
HEADER = [
    "variant",
    "loss",
    "largest difference",
    "building",
    "compiling",
    "a step",
    "temporaries",
    "variables",
    "remote memory",
]
FULL = Config(vocabulary=512, width=128, layers=8, sequence=64, batch=16)
TINY = Config()

Weights = dict[str, np.ndarray]


def trained(session: Training, config: Config) -> tuple[float, Weights]:
    """The last loss, and the weights then."""
    with session:
        session.start(first_weights(config))
        losses = [session.step(*batch) for batch in batches(config, STEPS)]
        return losses[-1], session.weights()


def time_of_step(session: Training, config: Config) -> float:
    """Seconds, the median of ten steps."""
    times = []
    with session:
        for batch in batches(config, STEPS):
            start = time.perf_counter()
            session.step(*batch)
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def line(name: str, config: Config, reference: Weights | None) -> tuple[list[str], Weights]:
    """Cells of the table; and the weights, with which those of the others are compared."""
    start = time.perf_counter()
    session = VARIANTS[name](config)
    whole = time.perf_counter() - start
    loss, weights = trained(session, config)
    difference = "" if reference is None else f"{max(abs(weights[n] - reference[n]).max() for n in weights):.1e}"
    report = session.report
    memory = report.memory
    remote = memory.buffers + memory.buffers_on_host
    step = time_of_step(session, config)
    times = [seconds(value) for value in (whole - report.seconds, report.seconds, step)]
    sizes = [megabytes(value) if value else "" for value in (memory.temporaries, memory.variables, remote)]
    return [name, f"{loss:.6f}", difference, *times, *sizes], weights


def table(config: Config, names: Iterable[str] = tuple(VARIANTS)) -> str:
    """Variants, each with its costs on one replica; the others are compared with the first."""
    rows, reference = [HEADER], None
    for name in names:
        progress(f"{name}: compiling")
        row, weights = line(name, config, reference)
        rows.append(row)
        reference = reference or weights
    progress()
    return table_to_string(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the sizes of the tests")
    config = TINY if parser.parse_args().tiny else FULL
    print(f"{config}, {os.cpu_count()} CPUs")
    print(table(config))
    print(
        f"Loss: of step {STEPS}. Largest difference: of a weight, from the first variant, after {STEPS} steps of "
        f"{config.learning_rate}.\nMemory: of one replica. Accumulated, phased, pipelined: {config.micro_batches} "
        f"micro-batches a step. Tensor parallel: {config.shards} replicas."
    )


if __name__ == "__main__":
    main()
