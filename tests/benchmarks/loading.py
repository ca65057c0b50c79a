"""What it takes until the first batch of a data loader is there: seconds, seconds of all cores, and processes.

    python -m tests.benchmarks.loading [--workers 0 4 16]

Each line is a program of its own. It imports poptorch, as all that use it do, and loads small batches: by PyTorch's
loader, and by poptorch's in its modes, before anything has run on a device and after a first model has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import poptorch
from popxl.utils import table_to_string

WAYS = ("torch", "Sync", "Async", "AsyncRebatched", "Async, later", "the second, later")
TICKS = os.sysconf("SC_CLK_TCK")


class Pictures(torch.utils.data.Dataset):
    """Small ones, with the number of their class."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 16, 16), float(i)), i % 10


def processes() -> Iterator[tuple[int, int]]:
    """Each process of this session, with the clock ticks that it has used, and those of its own that have ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == os.getsid(0):
            yield int(path.parent.name), sum(map(int, fields[11:15]))


def load(way: str, workers: int) -> None:
    """Print what the first batch has taken."""
    dataset, options = Pictures(), poptorch.Options()
    if "later" in way:
        poptorch.inferenceModel(lambda x: x + 1)(torch.ones(2))
    mode = way.partition(",")[0]
    kept = []
    if mode == "the second":
        mode = "Async"
        kept.append(poptorch.DataLoader(options, dataset, 16, mode=poptorch.DataLoaderMode.Async))
    used, begin = sum(ticks for _, ticks in processes()), time.perf_counter()
    if mode == "torch":
        loader = torch.utils.data.DataLoader(dataset, 16, num_workers=workers, persistent_workers=workers > 0)
    else:
        loader = poptorch.DataLoader(options, dataset, 16, num_workers=workers, mode=poptorch.DataLoaderMode[mode])
    batches = iter(loader)
    pictures, _ = next(batches)
    took = time.perf_counter() - begin
    assert pictures.shape == (16, 3, 16, 16)
    found = list(processes())
    print(f"{took:.2f} {(sum(ticks for _, ticks in found) - used) / TICKS:.2f} {len(found) - 1}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return load(arguments.ways[0], arguments.workers[0])
    rows = [("loader", "workers", "seconds", "seconds of all cores", "processes beside")]
    for way in arguments.ways:
        for workers in arguments.workers:
            command = [sys.executable, __file__, "--one", "--ways", way, "--workers", str(workers)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, start_new_session=True)
            rows.append((way, str(workers), *done.stdout.split()))
            print("\r" + " · ".join(rows[-1]), file=sys.stderr)
    print(table_to_string(rows))


if __name__ == "__main__":
    main()
