"""A long series of random programs, each compared with its meaning:

    python -m tests.popxl.random_programs --count 20000 --seed 0 --processes 2

A seed makes a program (`maker`), and how it is run (`settings`): in which way called graphs are compiled, where remote
buffers are, on how many replicas, IPUs and devices. What it should do is said in `meanings`; every fifth ten programs
are compared with JAX's gradients instead. The tests run the first few hundred seeds.

A program that fails is cut down to the beginning that still fails, and printed with the settings and the line that runs
it again. Programs run in processes of their own: if one of these ends, or takes too long, the series names the program,
and goes on. At the end it says how often each setting was drawn. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from time import perf_counter

from tests.popxl.random_programs.agreement import TOGETHER, failure, fewest, order_of, settings_of
from tests.popxl.random_programs.worker import Worker

LONGEST = 14
"""Steps of the longest program: what `Maker.main` draws at most."""


@dataclass
class Series:
    """A series under way.

    Attributes:
        total: how many programs it has.
        done: how many have been run.
        failed: how many of them failed.
        drawn: how many had each value of each setting.
    """

    total: int
    done: int = 0
    failed: int = 0
    drawn: Counter[tuple[str, object]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._start = self._told = perf_counter()
        self._lock = threading.Lock()
        self._workers = threading.local()

    def check(self, seeds: Sequence[int]) -> None:
        """Check programs that have the same settings."""
        if not hasattr(self._workers, "own"):
            self._workers.own = Worker()
        failures = self._failures(self._workers.own, seeds)
        settings = asdict(settings_of(seeds[0])) | {"differentiated": order_of(seeds[0])}
        with self._lock:
            self.done += len(seeds)
            self.failed += len(failures)
            self.drawn.update(dict.fromkeys(settings.items(), len(seeds)))
            for each in failures:
                print(f"\n{each}\n", flush=True)
            if perf_counter() - self._told > 30 or self.done == self.total:
                self._told = perf_counter()
                pace = self.done / (self._told - self._start) * 60
                print(f"{self.done} of {self.total} programs, {pace:.0f} a minute, {self.failed} failed", flush=True)

    def _failures(self, worker: Worker, seeds: Sequence[int]) -> list[str]:
        """What to say of the programs that fail."""

        def fail(seeds: Sequence[int]) -> bool:
            return worker.check(seeds).problem is not None

        if not fail(seeds):
            return []
        alone = [[seed] for seed in seeds if fail([seed])]
        return [self._failure(worker, each) for each in alone or [fewest(seeds, fail)]]

    def _failure(self, worker: Worker, seeds: Sequence[int]) -> str:
        """What to say of programs that fail: of their first steps, if these do."""
        parts = (worker.check(seeds, most) for most in range(LONGEST))
        smallest = next((answer for answer in parts if answer.problem is not None), None) or worker.check(seeds)
        return failure(seeds, smallest.text, smallest.problem or "They do not fail again.")


def main() -> int:
    """Run a series as the arguments say. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--together", type=int, nargs="+", metavar="SEED", help="run these programs only, as one")
    arguments = parser.parse_args()
    stop = arguments.seed + arguments.count
    firsts = range(arguments.seed - arguments.seed % TOGETHER, stop, TOGETHER)
    batches = [range(max(first, arguments.seed), min(first + TOGETHER, stop)) for first in firsts]
    batches = [arguments.together] if arguments.together else batches
    series = Series(sum(map(len, batches)))
    with ThreadPoolExecutor(arguments.processes) as threads:
        list(threads.map(series.check, batches))  # an error comes out here
    print("\nHow many had each setting:")
    for (name, value), count in sorted(series.drawn.items(), key=str):
        print(f"{count:8} {name}={value}")
    return bool(series.failed)


if __name__ == "__main__":
    sys.exit(main())
