"""Programs on the CPUs that are here: the time that a session tells after `popxl calibrate`, beside the time of a run.

    python -m popxl calibrate --save cpu.json
    POPXL_CHIP=cpu.json python -m tests.benchmarks.foreseen

It wants a machine that does nothing else, and takes three minutes or so. Each measured time is the fastest of the runs
of two seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, LanguageConfig, LanguageModel, NextTokenLoss, TransformerBlock


def stored(t: popxl.Tensor) -> None:
    """Store a sum, so that a run waits for all."""
    ops.host_store(popxl.d2h_stream((), popxl.float32, "sum"), ops.sum(ops.cast(t, popxl.float32)))


def products(rows: int, width: int, layers: int) -> popxl.Ir:
    """Products with an activation, one after the other."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((rows, width)), popxl.float32, "x")
        for i in range(layers):
            x = ops.relu(x @ popxl.variable(np.ones((width, width)) / width, popxl.float32, f"w{i}"))
        stored(x)
    return ir


def elements(count: int, turns: int) -> popxl.Ir:
    """Element-wise ops in a loop."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones(count), popxl.float32, "x")
        body = ir.create_graph(lambda x: x * 0.5 + 1.0, x)
        stored(ops.repeat(body, turns, x)[0])
    return ir


def block(batch: int, length: int, width: int, heads: int) -> popxl.Ir:
    """A transformer block, forwards."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((batch, length, width)), popxl.float32, "x")
        facts, graph = TransformerBlock(Attention(heads), MLP()).create_graph(x)
        stored(graph.bind(facts.init()).call(x)[0])
    return ir


def one_op(compute: Callable[[popxl.Tensor], popxl.Tensor], *shape: int) -> popxl.Ir:
    """An op on an array."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.random.default_rng(0).normal(size=shape), popxl.float32, "x")
        stored(compute(x))
    return ir


def attention(heads: int, length: int, channels: int) -> popxl.Ir:
    """Causal attention of one text."""
    return one_op(lambda x: ops.attention(x, x, x, causal=True), 1, heads, length, channels)


def convolution(images: int, size: int, channels: int) -> popxl.Ir:
    """A convolution with filters of 3 by 3."""
    filters = np.ones((channels, channels, 3, 3), np.float32)
    return one_op(lambda x: ops.conv(x, popxl.constant(filters), padding=(1, 1, 1, 1)), images, channels, size, size)


def lookup(rows: int, width: int, count: int) -> popxl.Ir:
    """Rows of a table, in no order."""
    chosen = np.random.default_rng(0).integers(0, rows, count)
    return one_op(lambda x: ops.gather(x, popxl.constant(chosen, popxl.int32)), rows, width)


def training(layers: int, width: int, batch: int, length: int) -> popxl.Ir:
    """A step of training of a small language model."""
    config = LanguageConfig(layers=layers, width=width, heads=4, vocabulary=512, context=length)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        tokens = popxl.h2d_stream((batch, length + 1), popxl.int32, "tokens")
        step = addons.train_step(
            NextTokenLoss(LanguageModel(config)), tokens, optimizer=partial(optimizers.adamw, lr=1e-3)
        )
        addons.host_store(step.loss)
    return ir


PROGRAMS: dict[str, Callable[[], popxl.Ir]] = {
    "2 products of (64, 256)": partial(products, 64, 256, 2),
    "8 products of (256, 256)": partial(products, 256, 256, 8),
    "4 products of (512, 1024)": partial(products, 512, 1024, 4),
    "a product of (2048, 2048)": partial(products, 2048, 2048, 1),
    "64 products of (64, 64) in a batch": partial(one_op, lambda x: x @ x, 64, 64, 64),
    "200 iterations over 4 096 elements": partial(elements, 4096, 200),
    "20 iterations over 4 million elements": partial(elements, 1 << 22, 20),
    "tanh of 4 million elements": partial(one_op, ops.tanh, 1 << 22),
    "sum of 16 million elements": partial(one_op, ops.sum, 1 << 24),
    "softmax of (64, 128)": partial(one_op, lambda x: ops.softmax(x, -1), 64, 128),
    "softmax of (1024, 4096)": partial(one_op, lambda x: ops.softmax(x, -1), 1024, 4096),
    "transpose of (2048, 2048)": partial(one_op, lambda x: ops.tanh(x.transpose((1, 0))) + x, 2048, 2048),
    "16 384 rows of 65 536": partial(lookup, 65536, 64, 16384),
    "3 × 3 convolution of 8 images, 32 channels": partial(convolution, 8, 32, 32),
    "attention of 4 heads, 512 tokens": partial(attention, 4, 512, 64),
    "block of width 128, 2 texts of 64": partial(block, 2, 64, 128, 4),
    "block of width 512, 4 texts of 128": partial(block, 4, 128, 512, 8),
    "training step, 2 layers of width 64": partial(training, 2, 64, 4, 32),
    "training step, 4 layers of width 128": partial(training, 4, 128, 8, 64),
    "training step, 2 layers of width 512": partial(training, 2, 512, 4, 128),
}


def done(session: popxl.Session) -> None:
    """Run a program, on zeros, and wait for what it gives."""
    inputs = {stream: np.zeros(stream.shape, np.int32) for stream in session.expected_inputs()}
    for array in session.run(inputs).values():
        np.asarray(array)


def compared(seconds: float) -> Iterator[tuple[str, float, float]]:
    """Names of programs, with foreseen and measured seconds."""
    for name, build in PROGRAMS.items():
        with popxl.Session(build(), "cpu") as session:
            foreseen = session.cost().seconds
            if foreseen is None:
                raise SystemExit("`POPXL_CHIP` names no figures of this device; `popxl calibrate` measures them.")
            done(session)
            times, end = list[float](), time.perf_counter() + seconds
            while len(times) < 3 or time.perf_counter() < end:
                begin = time.perf_counter()
                done(session)
                times.append(time.perf_counter() - begin)
        yield name, foreseen, min(times)


if __name__ == "__main__":
    print(f"With the figures of {os.environ.get('POPXL_CHIP')}, on {os.cpu_count()} cores.\n")
    print("| program | estimated | measured | estimated / measured |\n|---|---|---|---|")
    for name, foreseen, measured in compared(2.0):
        print(f"| {name} | {1e3 * foreseen:.3f} ms | {1e3 * measured:.3f} ms | {foreseen / measured:.2f} |", flush=True)
