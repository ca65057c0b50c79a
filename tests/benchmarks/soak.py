"""Sessions that run for long: what is in memory has to stay what it was, and the numbers have to stay right.

    python -m tests.benchmarks.soak --runs 100000

Each form of program counts in a variable. A run is fed and read, and what it gives is compared with the count; now and
then the variable is read and written, and the session left and entered again.
"""

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Self

import jax
import numpy as np

import popxl
from popxl import ops
from tests.benchmarks.harness import megabytes

START = 1.0
"""What the count starts from, and what is written into it: small enough for float32 to count on exactly."""


@dataclass(frozen=True)
class Counter:
    """A program that counts.

    Attributes:
        ir: the program.
        feed, out: what is added in each turn, and the count after it.
        count: the variable.
        growth: by how much it grows in one run that is fed with ones.
    """

    ir: popxl.Ir
    feed: popxl.HostToDeviceStream
    out: popxl.DeviceToHostStream
    count: popxl.tensor.Variable
    growth: int


def counter(replicas: int = 1, turns: int = 1, remote: bool = False, calls: str = "auto", ipus: int = 1) -> Counter:
    """A program that counts what all replicas are fed in all turns.

    Args:
        replicas: how many there are.
        turns: of a loop that loads and stores.
        remote: the count is in a remote buffer.
        calls: the option `calledGraphs`; a call counts, four times.
        ipus: the last of so many stores.
    """
    ir = popxl.Ir(replicas)
    ir.num_host_transfers = turns
    if calls != "auto":
        ir.options.calledGraphs = calls  # type: ignore[assignment]
    ir.options.placement = "several" if ipus > 1 else "auto"

    def add(total: popxl.TensorByRef, x: popxl.Tensor) -> None:
        ops.add_(total, x)

    with ir.main_graph, popxl.in_sequence():
        feed, out = popxl.h2d_stream((2,), popxl.float32, "feed"), popxl.d2h_stream((2,), popxl.float32, "out")
        start = np.full(2, START, np.float32)
        if remote:
            buffer = popxl.remote_buffer((2,), popxl.float32)
            count = popxl.remote_variable(start, buffer, name="count")
        else:
            count = popxl.variable(start, name="count")

        def turn(total: popxl.TensorByRef) -> None:
            x = ops.host_load(feed)
            if replicas > 1:
                x = ops.collectives.replicated_all_reduce(x)
            if calls == "auto":
                ops.add_(total, x)
            else:
                graph = ir.create_graph(add, total, x)
                for _ in range(4):
                    ops.call(graph, total, x)
            shown = total + 0.0
            for ipu in range(1, ipus):
                shown = shown.copy_to_ipu(ipu)
                with popxl.ipu(ipu):
                    shown = shown + 0.0
            with popxl.ipu(ipus - 1):
                ops.host_store(out, shown)

        total = ops.remote_load(buffer, 0) if remote else count
        if turns > 1:
            ops.repeat(ir.create_graph(turn, total), turns, total)
        else:
            turn(total)
        if remote:
            ops.remote_store(buffer, 0, total)
    return Counter(ir, feed, out, count, replicas * turns * (1 if calls == "auto" else 4))


FORMS: dict[str, Callable[[], Counter]] = {
    "one program": counter,
    "plan": lambda: counter(calls="dispatched"),
    "replicas": lambda: counter(replicas=4),
    "replicas on one device": lambda: counter(replicas=9),
    "loop": lambda: counter(turns=4),
    "loop of replicas, as a plan": lambda: counter(replicas=2, turns=3, calls="dispatched"),
    "remote buffers": lambda: counter(remote=True),
    "IPUs on devices of their own": lambda: counter(ipus=2),
}
"""The forms of program, by name."""


def soak(
    program: Counter, runs: int, step: int, read: int = 100, write: int = 1000, enter: int = 10_000
) -> Iterator[int]:
    """Run a session so often, checking its numbers; gives the number of runs after each `step` of them.

    Args:
        program: what is run.
        runs: how often.
        step: after how many runs to stop and let the caller look.
        read, write: after how many runs to read the variable, and to write it.
        enter: after how many runs to leave the session and enter it again.

    Raises:
        AssertionError: if a number is wrong.
    """
    session = popxl.Session(program.ir, "ipu_hw")
    inputs = {program.feed: np.ones(session.host_shape((2,)), np.float32)}
    expected = START
    done = 0
    while done < runs:
        with session:
            for _ in range(min(enter, runs - done)):
                done += 1
                outputs = session.run(inputs)
                expected += program.growth
                found = outputs[program.out][-1]
                assert (found == expected).all(), f"run {done}: expected {expected}; got {found}"
                if done % read == 0:
                    assert (session.get_tensor_data(program.count) == expected).all(), f"run {done}"
                if done % write == 0:
                    expected = START
                    session.write_variable_data(program.count, np.full(2, START, np.float32))
                if done % step == 0:
                    yield done


@dataclass(frozen=True)
class Footprint:
    """What is in memory.

    Attributes:
        resident: bytes of the process.
        arrays: arrays of JAX.
        objects: objects of Python that may take part in cycles.
    """

    resident: int
    arrays: int
    objects: int

    @classmethod
    def now(cls) -> Self:
        """What is there, after what nobody holds has been let go."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(jax.live_arrays()), len(gc.get_objects()))


def main() -> None:
    """Soak the forms one after the other, and print what was in memory meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000, help="of each form")
    parser.add_argument("--reports", type=int, default=10, help="how often to look at the memory")
    parser.add_argument("--form", action="append", choices=list(FORMS), help="of these forms only")
    arguments = parser.parse_args()
    step = max(1, arguments.runs // arguments.reports)
    for name in arguments.form or FORMS:
        print(f"\n{name}\n{'runs':>10} {'µs a run':>10} {'resident':>10} {'arrays':>8} {'objects':>9}")
        start = perf_counter()
        for done in soak(FORMS[name](), arguments.runs, step):
            took = (perf_counter() - start) / step * 1e6
            now = Footprint.now()
            print(f"{done:10} {took:10.1f} {megabytes(now.resident):>10} {now.arrays:8} {now.objects:9}", flush=True)
            start = perf_counter()


if __name__ == "__main__":
    main()
