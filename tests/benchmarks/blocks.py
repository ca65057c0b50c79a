"""A deep model: one transformer-like block called many times, each time with its own weights.

Ours has a graph for the block, and one for its gradient, which keeps the projections for attention and computes the
rest of the block again: what is kept is what one writes down, see `recomputing`. The session compiles each graph by
itself, if there are many calls. Beside it are ours as one program, ours without computing anything again, and plain JAX
in its idioms: unrolled, unrolled with `jax.checkpoint`, and as a scan over stacked weights. Each does a forward pass, a
backward pass and an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from popxl.ops.call import CallSiteInfo
from popxl.transforms import GradGraphInfo
from runtime.plan import structure
from tests.benchmarks.harness import (
    OURS,
    Measure,
    Row,
    Size,
    Target,
    at_most,
    check_agreement,
    megabytes,
    progress,
    seconds,
    time_of,
    times,
)

RATE = 0.05


@dataclass(frozen=True)
class Model:
    """Sizes: blocks, rows and columns of what passes through them.

    Attributes:
        heads: of attention; 0 in blocks that have none.
        block: what a block does, one of `KINDS`.
        precision: that of the products.
    """

    blocks: int
    rows: int = 128
    width: int = 256
    heads: int = 4
    block: str = "attention"
    precision: str = "highest"

    @property
    def kind(self) -> Kind:
        return KINDS[self.block]

    @property
    def settings(self) -> Mapping[str, int]:
        """What a block has to be told besides its weights."""
        return {"heads": self.heads} if self.heads else {}

    def __str__(self) -> str:
        kind = f"blocks of {self.heads} heads" if self.heads else f"{self.block} blocks"
        return f"{self.blocks} {kind}, {self.rows} rows of width {self.width}"

    def weights(self) -> list[list[np.ndarray]]:
        """First weights of each block; always the same."""
        random = np.random.default_rng(0)
        shapes = [(self.width * rows, self.width * columns) for rows, columns in self.kind.shapes]
        return [[random.normal(0, 0.02, shape).astype(np.float32) for shape in shapes] for _ in range(self.blocks)]

    def data(self) -> np.ndarray:
        """What is fed; always the same."""
        return np.random.default_rng(1).normal(size=(self.rows, self.width)).astype(np.float32)


def tiny(size: Size, m: Model) -> Model:
    """These blocks, or two tiny ones."""
    return replace(m, blocks=2, rows=6, width=8, heads=min(m.heads, 2)) if size is Size.TINY else m


Passes = tuple[popxl.Graph, Callable[[CallSiteInfo, popxl.Tensor], tuple[popxl.Tensor, ...]]]
"""The graph of a block, and what makes the gradients at a call of it from the gradient of its result."""

Block = Callable[[Any, Any], Any]
"""A block in plain JAX, of its input and its weights."""

# Ours ---------------------------------------------------------------------------------------------------------------


def norm(x: popxl.Tensor) -> popxl.Tensor:
    """Each row with mean 0 and variance 1."""
    centred = x - ops.mean(x, -1, keepdims=True)
    return centred / ops.sqrt(ops.mean(centred * centred, -1, keepdims=True) + 1e-5)


def project(x: popxl.Tensor, qkv: popxl.Tensor) -> popxl.Tensor:
    """Queries, keys and values, beside each other."""
    return norm(x) @ qkv


def attend(
    x: popxl.Tensor, projected: popxl.Tensor, out: popxl.Tensor, up: popxl.Tensor, down: popxl.Tensor, heads: int
) -> popxl.Tensor:
    """Attention and a feed-forward layer, each added to its input."""
    rows, width = x.shape
    q, k, v = (t.reshape((rows, heads, width // heads)).transpose((1, 0, 2)) for t in ops.split(projected, 3, axis=1))
    shares = ops.softmax((q @ k.transpose((0, 2, 1))) * (width // heads) ** -0.5, -1)
    x = x + (shares @ v).transpose((1, 0, 2)).reshape((rows, width)) @ out
    return x + ops.gelu(norm(x) @ up) @ down


def attention(
    x: popxl.Tensor, qkv: popxl.Tensor, out: popxl.Tensor, up: popxl.Tensor, down: popxl.Tensor, heads: int
) -> popxl.Tensor:
    """Attention to what it projects itself."""
    return attend(x, project(x, qkv), out, up, down, heads)


def plain(x: popxl.Tensor, first: popxl.Tensor, second: popxl.Tensor) -> popxl.Tensor:
    """Two products, and the rows weighed by their likeness."""
    shares = ops.softmax((x @ x.transpose((1, 0))) * x.shape[1] ** -0.5, -1)
    return x + ops.tanh((shares @ x) @ first) @ second


def feed_forward(x: popxl.Tensor, up: popxl.Tensor, down: popxl.Tensor) -> popxl.Tensor:
    """A feed-forward layer alone, added to its input."""
    return x + ops.gelu(x @ up) @ down


def storing(ir: popxl.Ir, m: Model, x: popxl.Tensor, *weights: popxl.Tensor) -> Passes:
    """A block, and its gradient: that is given all that it needs of the forward pass."""
    forward = ir.create_graph(m.kind.ours, x, *weights, **m.settings)
    return forward, partial(gradients_at, popxl.transforms.autodiff(forward))


def recomputing(ir: popxl.Ir, m: Model, x: popxl.Tensor, *weights: popxl.Tensor) -> Passes:
    """A block, and its gradient: that is given what went in, and computes the rest again."""
    forward = ir.create_graph(m.kind.ours, x, *weights, **m.settings)
    info = popxl.transforms.autodiff(forward)
    backward = ir.create_graph(again, x, x, list(weights), info=info)
    return forward, lambda call, dy: ops.call(backward, dy, *call.inputs)


def recomputing_attention(ir: popxl.Ir, m: Model, x: popxl.Tensor, *weights: popxl.Tensor) -> Passes:
    """A block, and its gradient: that is given what went in and the projections, and computes the rest again."""

    def block(x: popxl.Tensor, qkv: popxl.Tensor, out: popxl.Tensor, up: popxl.Tensor, down: popxl.Tensor):
        projected = project(x, qkv)
        return attend(x, projected, out, up, down, m.heads), projected

    forward = ir.create_graph(block, x, *weights)
    projecting = popxl.transforms.autodiff(ir.create_graph(project, x, weights[0]))
    attending = popxl.transforms.autodiff(
        ir.create_graph(attend, x, forward.outputs[1].spec, *weights[1:], heads=m.heads)
    )

    def gradient(
        gradient: popxl.Tensor,
        projected: popxl.Tensor,
        x: popxl.Tensor,
        qkv: popxl.Tensor,
        out: popxl.Tensor,
        up: popxl.Tensor,
        down: popxl.Tensor,
    ) -> tuple[popxl.Tensor, ...]:
        dx, dprojected, *others = again(gradient, x, [projected, out, up, down], attending)
        more, dqkv = again(dprojected, x, [qkv], projecting)
        return dx + more, dqkv, *others

    backward = ir.create_graph(gradient, x, *(t.spec for t in forward.outputs[1:]), x, *weights)
    return forward, lambda call, dy: ops.call(backward, dy, call.outputs[1], *call.inputs)


def again(
    gradient: popxl.Tensor, x: popxl.Tensor, others: list[popxl.Tensor], info: GradGraphInfo
) -> tuple[popxl.Tensor, ...]:
    """The gradients of what goes into a graph, which is called once more for them."""
    return gradients_at(info, ops.call_with_info(info.forward_graph, x, *others), gradient)


def gradients_at(info: GradGraphInfo, call: CallSiteInfo, gradient: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
    """The gradients of what went into a call."""
    return ops.call(info.graph, gradient, inputs_dict=info.inputs_dict(call))


class Ours:
    """The Ir, and sessions of it.

    Args:
        m: the sizes.
        recompute: let the backward pass compute most of each block again. Otherwise what it needs is kept.
        calls: how called graphs are compiled; see the option `calledGraphs`.
    """

    def __init__(self, m: Model, recompute: bool, calls: Any = "auto") -> None:
        ir = self.ir = popxl.Ir()
        ir.options.calledGraphs = calls
        ir.options.precision = m.precision
        with ir.main_graph:
            self.feed = popxl.h2d_stream((m.rows, m.width), popxl.float32, "x")
            self.loss = popxl.d2h_stream((), popxl.float32, "loss")
            self.variables = [
                [popxl.variable(w, name=f"block{i}/w{k}") for k, w in enumerate(weights)]
                for i, weights in enumerate(m.weights())
            ]
            x = ops.host_load(self.feed)
            blocks = m.kind.recomputing if recompute else storing
            forward, backward = blocks(ir, m, x, *self.variables[0])
            calls = []
            for variables in self.variables:
                calls.append(ops.call_with_info(forward, x, *variables))
                (x, *_) = calls[-1].outputs
            ops.host_store(self.loss, ops.mean(x * x))
            gradient = x * (2 / (m.rows * m.width))
            for variables, call in zip(reversed(self.variables), reversed(calls), strict=True):
                gradient, *gradients = backward(call, gradient)
                for w, g in zip(variables, gradients, strict=True):
                    ops.scaled_add_(w, g, b=-RATE)

    def compile(self) -> popxl.Session:
        structure.clear_cache()  # or what was compiled before would be found
        return popxl.Session(self.ir, "ipu_hw")


# Plain JAX ----------------------------------------------------------------------------------------------------------


def jax_norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def jax_attention(x: Any, weights: Any, heads: int) -> Any:
    rows, width = x.shape
    qkv, out, up, down = weights
    q, k, v = (
        t.reshape(rows, heads, width // heads).transpose(1, 0, 2) for t in jnp.split(jax_norm(x) @ qkv, 3, axis=1)
    )
    shares = jax.nn.softmax((q @ k.transpose(0, 2, 1)) * (width // heads) ** -0.5, axis=-1)
    x = x + (shares @ v).transpose(1, 0, 2).reshape(rows, width) @ out
    return x + jax.nn.gelu(jax_norm(x) @ up) @ down


def jax_plain(x: Any, weights: Any) -> Any:
    first, second = weights
    return x + jnp.tanh(jax.nn.softmax((x @ x.T) * x.shape[1] ** -0.5, axis=-1) @ x @ first) @ second


def jax_feed_forward(x: Any, weights: Any) -> Any:
    up, down = weights
    return x + jax.nn.gelu(x @ up) @ down


def unrolled(weights: Any, x: Any, block: Block) -> Any:
    """The mean square of what comes out of the last block. `weights` is a list of those of each block."""
    for w in weights:
        x = block(x, w)
    return (x * x).mean()


def checkpointed(weights: Any, x: Any, block: Block) -> Any:
    """The same, with blocks that are computed again in the backward pass."""
    return unrolled(weights, x, jax.checkpoint(block))


def scanned(weights: Any, x: Any, block: Block) -> Any:
    """The same. `weights` is one tuple, stacked over the blocks."""
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)
    return (x * x).mean()


def scanned_again(weights: Any, x: Any, block: Block) -> Any:
    """The same, with blocks that are computed again in the backward pass."""
    return scanned(weights, x, jax.checkpoint(block))


class PlainJax:
    """A way of writing the model in plain JAX: a loss, and how its weights are kept."""

    def __init__(self, m: Model, loss: Callable[..., Any], stacked: bool) -> None:
        self.model, self.loss = m, loss
        weights = m.weights()
        self.weights = jax.tree.map(
            jnp.asarray, [np.stack(w) for w in zip(*weights, strict=True)] if stacked else weights
        )

    def step(self) -> Callable[..., Any]:
        """A new function each time, or JAX would remember what it traced."""
        m = self.model

        @jax.default_matmul_precision(m.precision)
        def step(weights: Any, x: Any) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(weights, x, partial(m.kind.jax, **m.settings))
            return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), loss

        return step

    def lower(self) -> Any:
        return jax.jit(self.step(), donate_argnums=0).lower(self.weights, self.model.data())


class Kind(NamedTuple):
    """What a block does.

    Attributes:
        shapes: of its weights, in widths.
        ours: the result of a block, of its input and its weights.
        jax: the same in plain JAX, of its input and a tuple of its weights.
        recomputing: the graph of a block, and its gradients, for which most is computed again.
    """

    shapes: tuple[tuple[int, int], ...]
    ours: Callable[..., popxl.Tensor]
    jax: Callable[..., Any]
    recomputing: Callable[..., Passes]


KINDS: Mapping[str, Kind] = {
    "attention": Kind(((1, 3), (1, 1), (1, 4), (4, 1)), attention, jax_attention, recomputing_attention),
    "plain": Kind(((1, 1), (1, 1)), plain, jax_plain, storing),
    "feed-forward": Kind(((1, 4), (4, 1)), feed_forward, jax_feed_forward, recomputing),
}
"""Attention and a feed-forward layer, with norms; few ops; and a feed-forward layer alone."""

# Rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A compiled party: what compiles it anew, the text that was compiled, what it needs, and one step of it."""

    compile: Callable[[], Any]
    text: Callable[[], str]
    temporaries: Callable[[], int]
    run: Callable[[], np.ndarray]


def ours(m: Model, recompute: bool, calls: Any = "auto") -> Compiled:
    model, x = Ours(m, recompute, calls), m.data()
    session = model.compile()
    session.__enter__()  # and never left: all rows use it
    program = session.program
    return Compiled(model.compile, program.text, program.temporaries, lambda: session.run({model.feed: x})[model.loss])


def plain_jax(m: Model, loss: Callable[..., Any], stacked: bool = False) -> Compiled:
    program, x = PlainJax(m, loss, stacked), m.data()
    lowered = program.lower()
    executable = lowered.compile()

    def run() -> np.ndarray:
        program.weights, loss = executable(program.weights, x)
        return np.asarray(loss)

    return Compiled(
        lambda: program.lower().compile(),
        lowered.as_text,
        lambda: executable.memory_analysis().temp_size_in_bytes,
        run,
    )


PARTIES: dict[str, Callable[[Model], Compiled]] = {
    OURS: lambda m: ours(m, recompute=True),
    "JAX": lambda m: plain_jax(m, unrolled),
    "checkpoint": lambda m: plain_jax(m, checkpointed),
    "scan": lambda m: plain_jax(m, scanned, stacked=True),
    "one program": lambda m: ours(m, recompute=True, calls="kept"),
    "popxl, stored": lambda m: ours(m, recompute=False),
}


@cache
def compiled(m: Model, names: tuple[str, ...]) -> Mapping[str, Compiled]:
    """Some parties, compiled once for all rows, after checking that the losses of three steps agree."""
    parties = {}
    for name in names:
        progress(f"{m.blocks} blocks: compiling {name}")
        parties[name] = PARTIES[name](m)
    losses = {name: [party.run() for _ in range(3)] for name, party in parties.items()}
    check_agreement(losses[names[-1]], **losses)
    return parties


def row(what: str, m: Model | int, of_party: Callable[[Compiled], Measure], *targets: Target, **more: Any) -> Row:
    """A row that measures something of each compiled party. A number means so many blocks of the usual shape."""
    name = f"blocks{m}_{what}" if isinstance(m, int) else f"shape_{m.blocks}x{m.rows}x{m.width}x{m.heads}_{what}"
    m = Model(m) if isinstance(m, int) else m
    names = (OURS, *(target.rival for target in targets))

    @contextmanager
    def parties(size: Size) -> Iterator[Mapping[str, Measure]]:
        yield {name: of_party(party) for name, party in compiled(tiny(size, m), names).items()}

    more = {"slow": m.blocks > 16, "about": f"{ABOUT[what]}: {m}"} | more
    return Row(name, parties, targets, **more)


ABOUT = {
    "compile": "compiling",
    "run": "a training step",
    "temporaries": "memory for temporaries",
    "text": "the text that XLA is given",
}


def against_all(limit: float | None, over_scan: float | None = None) -> tuple[Target, ...]:
    """Better than plain JAX, unrolled, and maybe than its scan; the others are there to be seen."""
    others = ("checkpoint", "one program", "popxl, stored")
    return (times(limit), times(over_scan, "scan"), *(times(None, other) for other in others))


def compile_time(party: Compiled) -> Measure:
    return time_of(lambda: bool(party.compile()))


def run_time(party: Compiled) -> Measure:
    return time_of(party.run)


def needed(party: Compiled) -> Measure:
    return lambda: float(party.temporaries())


def text_size(party: Compiled) -> Measure:
    return lambda: float(len(party.text()))


def rows_of(blocks: int, *, compile: float | None, run: float, temporaries: float) -> tuple[Row, ...]:
    """What is compared with all other ways of writing the model; by how much ours is to be better than unrolled."""
    return (
        row("compile", blocks, compile_time, *against_all(compile), rounds=3),
        row("run", blocks, run_time, *against_all(run, 1.3 if blocks >= 64 else None)),
        row("temporaries", blocks, needed, *against_all(temporaries), rounds=1, show=megabytes),
        row("text", blocks, text_size, *against_all(None), rounds=1, show=megabytes),
    )


def rows_of_shape(m: Model) -> tuple[Row, ...]:
    """The same for a shape that nothing was tuned for."""
    targets = (times(None), times(None, "scan"), times(None, "popxl, stored" if m.heads else "one program"))
    return (
        row("compile", m, compile_time, *targets, rounds=3, slow=bool(m.heads)),
        row("run", m, run_time, *targets, rounds=9, slow=bool(m.heads)),
        row("temporaries", m, needed, *targets, rounds=1, show=megabytes, slow=bool(m.heads)),
    )


SHAPES = (
    Model(8, rows=16, width=64, heads=2),
    Model(8, rows=512, width=64, heads=4),
    Model(8, rows=64, width=512, heads=8),
    Model(8, rows=100, width=300, heads=5),
    Model(24, rows=32, width=128, heads=4),
    Model(64, rows=128, width=256, heads=0, block="plain"),
)
"""Few rows, long texts, wide blocks, odd sizes, small blocks that are called often, and blocks of few ops."""

ROWS = (
    *(row for m in SHAPES for row in rows_of_shape(m)),
    *rows_of(4, compile=None, run=1, temporaries=1),
    *rows_of(16, compile=3, run=1, temporaries=3),
    *rows_of(64, compile=10, run=1.2, temporaries=5),
    row("compile", 256, compile_time, at_most(2, seconds, "scan"), times(None, "one program"), rounds=3),
    row("run", 256, run_time, times(1.3, "scan"), times(None, "one program"), rounds=9),
    row("temporaries", 256, needed, times(5, "scan"), times(None, "one program"), rounds=1, show=megabytes),
    row("text", 256, text_size, times(None, "scan"), times(None, "one program"), rounds=1, show=megabytes),
)
