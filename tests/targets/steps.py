"""What a step of training costs on TPUs and GPUs, as users write it: a language model of the kit in mixed precision.

    python -m tests.targets.steps [--layers 8 16] [--width 1024] [--targets "gpu h100" "tpu v5e"] [--ways auto unrolled]
                                  [--hidden 2816] [--vocabulary 8192] [--memory nothing] [--into steps.md] [--limit 900]

It prints a table: of each way to compile called graphs, of the default, and of the same in plain JAX with Optax, what
XLA for the target says. Nothing runs. A file given with `--into` keeps each row as soon as it is made: a table may be
made in several runs. Seconds are those of the CPU. With `--limit`, a row that needs more of them says so, and the next
one begins.
On a target of several devices, such as "gpu h100:8", each has 4 texts, and a part of the parameters and of the
optimiser's state: in JAX by shardings.
The sizes are a Llama's of the width: heads of 128 channels, a SwiGLU of 11/4 the width, 4 texts of 512. Those of 1.2
and of 6.7 billion parameters: `--layers 22 --width 2048 --vocabulary 32000`, `--layers 32 --width 4096 --hidden 11008
--vocabulary 32000`.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import popxl
import popxl_addons as addons
from popxl.base.version import VERSION
from popxl_addons import optimizers
from popxl_addons.layers import LanguageConfig, LanguageModel, NextTokenLoss
from runtime.costs.hlo import parse_hlo
from runtime.costs.work import Collective, account_of
from runtime.targets.compile_target import DoesNotFit
from tests.targets import llama_in_jax
from tests.targets.tables import Table

TARGETS = ("gpu h100", "tpu v5e")
WAYS = ("auto", "inlined", "batched", "rolled", "dispatched")
CUDNN = ("unrolled, cuDNN", "scan, checkpoint, cuDNN")  # with its kernels of attention, on GPUs alone
IN_JAX = ("unrolled", "scan", "scan, checkpoint", *CUDNN)
HEAD = f"""\
Written by `python -m tests.targets.steps`, with popxl {VERSION} and jax {jax.__version__}.

| | layers | width | way | compiled | GB moved | kernels | M cycles | temporaries, MB | GB sent | CPU seconds |
|---|---|---|---|---|---|---|---|---|---|---|"""


class Sizes(NamedTuple):
    """Those of a language model, and of what it is trained with."""

    layers: int
    width: int = 1024
    heads: int = 8
    hidden: int = 2816
    vocabulary: int = 8192
    texts: int = 4
    length: int = 512

    @property
    def config(self) -> LanguageConfig:
        """Such a Llama."""
        return LanguageConfig(
            vocabulary=self.vocabulary,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            context=self.length,
            rotary=10000.0,
            norm="rms",
            activation="swiglu",
            bias=False,
            mlp_bias=False,
            tied=False,
        )


def program(sizes: Sizes, replicas: int = 1, clip: float | None = None, memory: Any = None) -> popxl.Ir:
    """A step in bfloat16, of float32 variables. Replicas share these out. A policy says what layers keep."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        tokens = popxl.h2d_stream((sizes.texts, sizes.length + 1), popxl.int32, "tokens")
        optimizer = partial(optimizers.adamw, lr=3e-4, weight_decay=0.1, clip_norm=clip)
        bfloat16 = addons.MixedPrecision(popxl.bfloat16)
        how = {"optimizer": optimizer, "precision": bfloat16, "sharded": replicas > 1, "memory": memory}
        step = addons.train_step(NextTokenLoss(LanguageModel(sizes.config)), tokens, **how)
        addons.host_store(step.loss)
    return ir


def session_of(sizes: Sizes, calls: Any, target: str, **how: Any) -> popxl.Session:
    """The step, compiled for a machine with called graphs in some way."""
    ir = program(sizes, replicas=len(popxl.Target(target).devices), **how)
    ir.options.calledGraphs = calls
    return popxl.Session(ir, target)


class Found(NamedTuple):
    """What a compiled step costs."""

    compiled: str
    bytes: int
    kernels: int
    cycles: int
    temporaries: int
    sent: int


def sent_in(collectives: Iterable[Collective]) -> int:
    """The bytes that one device gives to collectives, or takes."""
    return sum(each.bytes * each.runs for each in collectives)


def ours(sizes: Sizes, calls: Any, target: str, **how: Any) -> Found:
    """The kit's."""
    session = session_of(sizes, calls, target, **how)
    cost = session.cost()
    sent = sum(sent_in(account_of(parse_hlo(text)).collectives) for text in session.hlo().values())
    return Found(session.report.calls, cost.bytes_accessed, cost.kernels, cost.cycles or 0, cost.temporary_bytes, sent)


def jitted_step(sizes: Sizes, way: str, target: str, **settings: Any) -> tuple[Any, Any]:
    """The step of `llama_in_jax`, jitted, and its arguments as types."""
    devices = popxl.Target(target).devices
    mesh = Mesh(np.asarray(devices), ("data",))
    tokens = jax.ShapeDtypeStruct((len(devices) * sizes.texts, sizes.length + 1), jnp.int32)
    whole = llama_in_jax.state(sizes.config, way)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    shardings = jax.tree.map(lambda t: NamedSharding(mesh, llama_in_jax.partition(t.shape, len(devices))), whole)
    given = jax.tree.map(
        lambda t, where: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=where), (whole, tokens), (shardings, rows)
    )
    step = llama_in_jax.step(sizes.config, way, rows, **settings)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, PartitionSpec()))), given


def in_jax(sizes: Sizes, way: str, target: str) -> Found:
    """That of `llama_in_jax`."""
    jitted, given = jitted_step(sizes, way, target)
    (device, *_) = popxl.Target(target).devices
    platform = "cuda" if device.platform == "gpu" else device.platform
    compiled = jitted.trace(*given).lower(lowering_platforms=(platform,)).compile()
    account = account_of(parse_hlo(compiled.as_text()))
    work, temporaries = account.total, compiled.memory_analysis().temp_size_in_bytes
    return Found("JAX", work.bytes, work.kernels, work.cycles, temporaries, sent_in(account.collectives))


def costs(sizes: Sizes, way: str, target: str, **how: Any) -> list[str]:
    """What it costs, as cells of the table."""
    begun = process_time()
    try:
        found = in_jax(sizes, way, target) if way in IN_JAX else ours(sizes, way, target, **how)
    except (DoesNotFit, jax.errors.JaxRuntimeError) as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        return ["does not fit", *"–––––", f"{process_time() - begun:.0f}"]
    cycles = f"{found.cycles / 1e6:.1f}" if found.cycles else "–"
    return [
        *(found.compiled, f"{found.bytes / 1e9:.1f}", str(found.kernels), cycles),
        *(f"{found.temporaries / 1e6:.0f}", f"{found.sent / 1e9:.1f}" if found.sent else "–"),
        f"{process_time() - begun:.0f}",
    ]


def within(limit: int | None, sizes: Sizes, way: str, target: str, **how: Any) -> list[str]:
    """The same cells; or that a process of its own, which may use so many CPU seconds, was stopped."""
    if limit is None:
        return costs(sizes, way, target, **how)
    most = resource.RLIMIT_CPU, (limit, limit)
    with ProcessPoolExecutor(1, get_context("spawn"), resource.setrlimit, most) as pool:
        try:
            return pool.submit(costs, sizes, way, target, **how).result()
        except BrokenProcessPool:
            return [*"––––––", f"stopped at {limit}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all that is asked for, and print the table. Rows come as soon as they are known."""
    parser = argparse.ArgumentParser(description="What a step of training costs on TPUs and GPUs.")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, help="of the SwiGLU; 11/4 of the width if it is not given")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *IN_JAX), default=(*WAYS, *IN_JAX))
    parser.add_argument("--clip", type=float, help="the norm that the kit clips gradients to")
    parser.add_argument("--memory", metavar="POLICY", help="what the kit's layers keep, such as 'nothing'")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="keeps the rows; those that it has are not made again"
    )
    parser.add_argument("--limit", type=int, metavar="SECONDS", help="the most CPU seconds of a row")
    given = parser.parse_args(arguments)
    table = Table(HEAD, given.into)
    for target in given.targets:
        for layers in given.layers:
            for way in (w for w in given.ways if w not in CUDNN or target.startswith("gpu")):
                heads, hidden = max(1, given.width // 128), given.hidden or given.width * 11 // 4
                sizes = Sizes(layers, given.width, heads, hidden, given.vocabulary)
                how = {} if way in IN_JAX else {"clip": given.clip, "memory": given.memory}
                made = partial(within, given.limit, sizes, way, target, **how)
                named = f"{way}, {given.memory}" if how.get("memory") else way
                table.add((target, str(layers), str(given.width), named), made)


if __name__ == "__main__":
    main()
