"""What each way of compiling called graphs costs, over the number of layers: the blocks of `blocks`, or a GPT.

    python tests/benchmarks/ways.py [--model blocks|plain|gpt] [--layers 2 4 8 16 64] [--ways auto rolled ...]
        [--width 256] [--rows 128]

Each row is one program: seconds to compile it, milliseconds of a step, and the bytes that it needs besides variables
and streams. The ways take turns, step by step, and a row has the median of its steps. `inlined` takes minutes for many
layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import popxl
from popxl.utils import table_to_string
from runtime.plan import structure
from tests.benchmarks import blocks
from tests.benchmarks.harness import megabytes, progress, seconds
from tests.popxl_addons.gpt.model import Config, batches, first_weights
from tests.popxl_addons.gpt.variants import VARIANTS

WAYS = ("auto", "rolled", "kept", "dispatched", "inlined")
JAX = ("JAX", "scan")
STEPS = 15
HEADER = ["layers", "way", "compile", "a step", "temporaries", "text"]


@dataclass(frozen=True)
class Sizes:
    """How large a model is: in `rows`, a GPT has sequences of 64 tokens."""

    model: str
    layers: int
    width: int
    rows: int


@dataclass(frozen=True)
class Compiled:
    """A program: how to run a step of it, and wait for it; bytes of its temporaries, letters of its text."""

    way: str
    step: Callable[[], object]
    temporaries: int
    text: int


def of_blocks(sizes: Sizes, way: str, open_until: ExitStack) -> Callable[[], Compiled]:
    """Ready to be compiled."""
    model = blocks.Model(sizes.layers, sizes.rows, sizes.width, 0 if sizes.model == "plain" else 4)
    x = model.data()
    if way not in JAX:
        ours = blocks.Ours(model, recompute=True, calls=way)
        return lambda: _ours(way, open_until.enter_context(ours.compile()), {ours.feed: x}, ours.loss)
    plain = blocks.PlainJax(model, {"JAX": blocks.unrolled, "scan": blocks.scanned}[way], way == "scan")

    def in_jax() -> Compiled:
        lowered = plain.lower()
        executable = lowered.compile()

        def step() -> np.ndarray:
            plain.weights, loss = executable(plain.weights, x)
            return np.asarray(loss)

        return Compiled(way, step, executable.memory_analysis().temp_size_in_bytes, len(lowered.as_text()))

    return in_jax


def of_gpt(sizes: Sizes, way: str, open_until: ExitStack) -> Callable[[], Compiled]:
    """Ready to be compiled."""
    batch = max(1, sizes.rows // 64)
    config = Config(vocabulary=512, width=sizes.width, layers=sizes.layers, sequence=64, batch=batch)
    session = VARIANTS["recomputed"](config)  # compiled here for the first time, in the way that is the default
    ir = session.ir
    ir.options.calledGraphs = way  # type: ignore[assignment]
    session.start(first_weights(config))
    (data,) = batches(config, 1)

    def compile() -> Compiled:
        again = open_until.enter_context(popxl.Session(ir, "ipu_hw"))
        feed = {stream: _fitting(stream, data) for stream in again.expected_inputs()}
        (loss,) = again.program.outputs
        return _ours(way, again, feed, loss)

    return compile


def _ours(way: str, session: popxl.Session, feed: popxl.HostToDeviceData, loss: popxl.DeviceToHostStream) -> Compiled:
    """A session, and which way `auto` took."""
    program = session.program
    told = f"auto: {program.calls}" if way == "auto" else way
    return Compiled(told, lambda: np.asarray(session.run(feed)[loss]), program.temporaries(), len(program.text()))


def _fitting(stream: popxl.HostToDeviceStream, batch: Sequence[np.ndarray]) -> np.ndarray:
    """Tokens or labels, whichever the stream is for."""
    tokens, labels = batch
    return (labels if "label" in stream.tensor_id else tokens).reshape(stream.shape).astype(stream.dtype.as_numpy())


def measured(sizes: Sizes, ways: Sequence[str]) -> list[list[str]]:
    """A row for each way."""
    ready = of_gpt if sizes.model == "gpt" else of_blocks
    all_compiled, compiling = [], []
    with ExitStack() as open_until:
        for way in ways:
            progress(f"{sizes.layers} layers: {way}")
            compile = ready(sizes, way, open_until)
            structure.forget()  # or what was compiled before would be found
            start = time.perf_counter()
            all_compiled.append(compile())
            compiling.append(time.perf_counter() - start)
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(STEPS):
            for own, compiled in zip(times, all_compiled, strict=True):
                start = time.perf_counter()
                compiled.step()
                own.append(time.perf_counter() - start)
    rows = []
    for each, spent, own in zip(all_compiled, compiling, times, strict=True):
        took = [seconds(spent), seconds(float(np.median(own)))]
        rows.append([str(sizes.layers), each.way, *took, megabytes(each.temporaries), str(each.text)])
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["blocks", "plain", "gpt"], default="blocks")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *JAX], default=[*WAYS, *JAX])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128)
    arguments = parser.parse_args()
    ways = [way for way in arguments.ways if arguments.model != "gpt" or way not in JAX]
    rows = []
    for layers in arguments.layers:
        rows += measured(Sizes(arguments.model, layers, arguments.width, arguments.rows), ways)
    print(table_to_string([HEADER, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
