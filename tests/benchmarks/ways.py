"""What each way of compiling called graphs costs, over the number of layers: the blocks of `blocks`, or a GPT.

    python tests/benchmarks/ways.py [--model blocks|gpt] [--layers 2 4 8 16 64] [--ways rolled kept ...] [--width 256]

Each row is one program: seconds to compile it, milliseconds of a step, and the bytes that it needs besides variables
and streams. `inlined` takes minutes for many layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
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

WAYS = ("rolled", "kept", "dispatched", "inlined")
JAX = ("JAX", "scan")
STEPS = 9
HEADER = ["layers", "way", "compile", "a step", "temporaries", "text"]


def row(layers: int, way: str, compile: Callable[[], tuple[Callable[[], object], int, int]]) -> list[str]:
    """One program: how long it takes to compile, the median of some steps, bytes of temporaries, letters of text."""
    progress(f"{layers} layers: {way}")
    structure.forget()  # or what was compiled before would be found
    start = time.perf_counter()
    step, temporaries, text = compile()
    compiling = time.perf_counter() - start
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return [str(layers), way, seconds(compiling), seconds(float(np.median(times))), megabytes(temporaries), str(text)]


def of_blocks(layers: int, way: str, width: int) -> list[str]:
    model = blocks.Model(layers, width=width)
    if way in JAX:
        plain = blocks.PlainJax(model, {"JAX": blocks.unrolled, "scan": blocks.scanned}[way], way == "scan")

        def in_jax() -> tuple[Callable[[], object], int, int]:
            lowered = plain.lower()
            executable, x = lowered.compile(), model.data()

            def step() -> np.ndarray:
                plain.weights, loss = executable(plain.weights, x)
                return np.asarray(loss)

            return step, executable.memory_analysis().temp_size_in_bytes, len(lowered.as_text())

        return row(layers, way, in_jax)
    ours, x = blocks.Ours(model, recompute=True, calls=way), model.data()

    def compile() -> tuple[Callable[[], object], int, int]:
        session = ours.compile()
        session.__enter__()
        program = session.program
        return lambda: np.asarray(session.run({ours.feed: x})[ours.loss]), program.temporaries(), len(program.text())

    return row(layers, way, compile)


def of_gpt(layers: int, way: str, width: int) -> list[str]:
    config = Config(vocabulary=512, width=width, layers=layers, sequence=64, batch=4)
    session = VARIANTS["recomputed"](config)  # compiled here for the first time, in the way that is the default
    (batch,) = batches(config, 1)
    ir = session.ir
    ir.options.calledGraphs = way  # type: ignore[assignment]

    def compile() -> tuple[Callable[[], object], int, int]:
        again = popxl.Session(ir, "ipu_hw")
        session.start(first_weights(config))
        again.__enter__()
        streams = {s.tensor_id: s for s in again.expected_inputs()}
        feed = {stream: _fitting(stream, batch) for stream in streams.values()}
        program = again.program
        (loss,) = program.outputs
        return lambda: np.asarray(again.run(feed)[loss]), program.temporaries(), len(program.text())

    return row(layers, way, compile)


def _fitting(stream: popxl.HostToDeviceStream, batch: Sequence[np.ndarray]) -> np.ndarray:
    """Tokens or labels, whichever the stream is for."""
    tokens, labels = batch
    return (labels if "label" in stream.tensor_id else tokens).reshape(stream.shape).astype(stream.dtype.as_numpy())


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["blocks", "gpt"], default="blocks")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *JAX], default=[*WAYS, *JAX])
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    of_model = of_blocks if arguments.model == "blocks" else of_gpt
    ways = [way for way in arguments.ways if arguments.model == "blocks" or way not in JAX]
    rows = [of_model(layers, way, arguments.width) for layers in arguments.layers for way in ways]
    print(table_to_string([HEADER, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
