"""A deep model: one transformer-like block called many times, each time with its own weights.

Ours has one graph for the block and one for its gradient. Plain JAX is written in both of its idioms: unrolled, and
as a scan over stacked weights. Each does a forward pass, a backward pass and an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, megabytes, time_of, times

RATE = 0.05


@dataclass(frozen=True)
class Model:
    """Sizes: blocks, rows and columns of what passes through them, heads of attention."""

    blocks: int
    rows: int = 128
    width: int = 256
    heads: int = 4

    def weights(self) -> list[list[np.ndarray]]:
        """First weights of each block; always the same."""
        random = np.random.default_rng(0)
        n = self.width
        shapes = ((n, 3 * n), (n, n), (n, 4 * n), (4 * n, n))
        return [[random.normal(0, 0.02, shape).astype(np.float32) for shape in shapes] for _ in range(self.blocks)]

    def data(self) -> np.ndarray:
        """What is fed; always the same."""
        return np.random.default_rng(1).normal(size=(self.rows, self.width)).astype(np.float32)


def model(size: Size, blocks: int) -> Model:
    """So many blocks; a quarter of them for a look, and three tiny ones to see that it works."""
    if size is Size.TINY:
        return Model(3, rows=6, width=8, heads=2)
    return Model(blocks // 4 if size is Size.QUICK else blocks)


# Ours ---------------------------------------------------------------------------------------------------------------


def block(x: popxl.Tensor, qkv: popxl.Tensor, out: popxl.Tensor, up: popxl.Tensor, down: popxl.Tensor, heads: int):
    """Attention and a feed-forward layer, each added to its input."""
    rows, width = x.shape
    q, k, v = (t.reshape((rows, heads, width // heads)).transpose((1, 0, 2)) for t in ops.split(x @ qkv, 3, axis=1))
    shares = ops.softmax((q @ k.transpose((0, 2, 1))) * (width // heads) ** -0.5, -1)
    x = x + (shares @ v).transpose((1, 0, 2)).reshape((rows, width)) @ out
    return x + ops.gelu(x @ up) @ down


class Ours:
    """The Ir, and sessions of it."""

    def __init__(self, m: Model) -> None:
        self.ir = popxl.Ir()
        with self.ir.main_graph:
            self.feed = popxl.h2d_stream((m.rows, m.width), popxl.float32, "x")
            self.loss = popxl.d2h_stream((), popxl.float32, "loss")
            self.variables = [
                [popxl.variable(w, name=f"block{i}/w{k}") for k, w in enumerate(weights)]
                for i, weights in enumerate(m.weights())
            ]
            x = ops.host_load(self.feed)
            forward = self.ir.create_graph(block, x, *self.variables[0], m.heads)
            backward = popxl.transforms.autodiff(forward)
            calls = []
            for variables in self.variables:
                calls.append(ops.call_with_info(forward, x, *variables))
                x = calls[-1].outputs[0]
            ops.host_store(self.loss, ops.mean(x * x))
            gradient = x * (2 / (m.rows * m.width))
            for variables, call in zip(reversed(self.variables), reversed(calls), strict=True):
                gradient, *gradients = ops.call(backward.graph, gradient, inputs_dict=backward.inputs_dict(call))
                for w, g in zip(variables, gradients, strict=True):
                    ops.scaled_add_(w, g, b=-RATE)

    def compile(self) -> popxl.Session:
        return popxl.Session(self.ir, "ipu_hw")


# Plain JAX ----------------------------------------------------------------------------------------------------------


def jax_block(x: Any, weights: Any, heads: int) -> Any:
    qkv, out, up, down = weights
    rows, width = x.shape
    q, k, v = (t.reshape(rows, heads, width // heads).transpose(1, 0, 2) for t in jnp.split(x @ qkv, 3, axis=1))
    shares = jax.nn.softmax((q @ k.transpose(0, 2, 1)) * (width // heads) ** -0.5, axis=-1)
    x = x + (shares @ v).transpose(1, 0, 2).reshape(rows, width) @ out
    return x + jax.nn.gelu(x @ up) @ down


def unrolled(weights: Any, x: Any, heads: int) -> Any:
    """The mean square of what comes out of the last block. `weights` is a list of those of each block."""
    for w in weights:
        x = jax_block(x, w, heads)
    return (x * x).mean()


def scanned(weights: Any, x: Any, heads: int) -> Any:
    """The same. `weights` is one tuple, stacked over the blocks."""
    x, _ = jax.lax.scan(lambda x, w: (jax_block(x, w, heads), None), x, weights)
    return (x * x).mean()


class PlainJax:
    """A way of writing the model in plain JAX: a loss, and how its weights are kept."""

    def __init__(self, m: Model, loss: Callable[..., Any], stacked: bool) -> None:
        self.model, self.loss = m, loss
        weights = m.weights()
        self.weights = jax.tree.map(
            jnp.asarray, [np.stack(w) for w in zip(*weights, strict=True)] if stacked else weights
        )

    def compile(self) -> Any:
        def step(weights: Any, x: Any) -> Any:  # a new function each time, or JAX would remember what it traced
            loss, gradients = jax.value_and_grad(self.loss)(weights, x, self.model.heads)
            return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), loss

        return jax.jit(step, donate_argnums=0).lower(self.weights, self.model.data()).compile()


# Rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A compiled party: what compiles it anew, its executable and the text it was made of, and one step of it."""

    compile: Callable[[], Any]
    executable: Any
    run: Callable[[], np.ndarray]


@cache
def compiled(m: Model, kinds: tuple[str, ...]) -> Mapping[str, Compiled]:
    """Ours and rivals, compiled once for all rows, after checking that the losses of three steps agree."""
    makers = {OURS: ours, "JAX": lambda m: plain_jax(m, unrolled, False), "scan": lambda m: plain_jax(m, scanned, True)}
    parties = {kind: makers[kind](m) for kind in kinds}
    losses = {name: [party.run() for _ in range(3)] for name, party in parties.items()}
    check_agreement(**{"expected" if name == OURS else name: seen for name, seen in losses.items()})
    return parties


def ours(m: Model) -> Compiled:
    program, x = Ours(m), m.data()
    session = program.compile()
    session.__enter__()  # kept as long as the process: other rows use it too
    return Compiled(program.compile, session.program.executable, lambda: session.run({program.feed: x})[program.loss])


def plain_jax(m: Model, loss: Callable[..., Any], stacked: bool) -> Compiled:
    program, x = PlainJax(m, loss, stacked), m.data()
    executable = program.compile()

    def run() -> np.ndarray:
        program.weights, loss = executable(program.weights, x)
        return np.asarray(loss)

    return Compiled(program.compile, executable, run)


def row(what: str, blocks: int, of_party: Callable[[Compiled], Measure], *targets: Any, **more: Any) -> Row:
    """A row that measures something of each compiled party."""
    kinds = (OURS, *(target.rival for target in targets))

    @contextmanager
    def parties(size: Size) -> Iterator[Mapping[str, Measure]]:
        yield {name: of_party(party) for name, party in compiled(model(size, blocks), kinds).items()}

    return Row(f"blocks{blocks}_{what}", parties, targets, **more)


def compile_time(party: Compiled) -> Measure:
    return time_of(lambda: bool(party.compile()))


def run_time(party: Compiled) -> Measure:
    return time_of(party.run)


def temporaries(party: Compiled) -> Measure:
    return lambda: float(party.executable.memory_analysis().temp_size_in_bytes)


ROWS = (
    row("compile", 64, compile_time, times(3), rounds=3),
    row("run", 64, run_time, times(1)),
    row("temporaries", 64, temporaries, times(5), rounds=1, show=megabytes),
    row(
        "program", 64, lambda party: lambda: float(len(party.executable.as_text())), times(1), rounds=1, show=megabytes
    ),
)
