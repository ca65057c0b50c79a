"""What a step of training costs on TPUs and GPUs, as users write it: a language model of the kit in mixed precision.

    python -m tests.targets.steps [--layers 8 16] [--width 1024] [--targets "gpu h100" "tpu v5e"] [--calls auto inlined]

It prints a table: of each way to compile called graphs, and of the default, what XLA for the target says. Nothing runs.
The sizes are a Llama's of the width: heads of 128 channels, a SwiGLU of 11/4 the width, 8192 tokens, 4 texts of 512.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import popxl
import popxl_addons as addons
from popxl.utils import table_to_string
from popxl_addons import optimizers
from popxl_addons.layers import LanguageConfig, LanguageModel

TARGETS = ("gpu h100", "tpu v5e")
WAYS = ("auto", "inlined", "rolled", "dispatched")
HEADER = ["", "layers", "way", "compiled", "GB moved", "kernels", "copies", "cycles, million", "temporaries, MB", "s"]


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


class Loss(addons.Module):
    """How well a language model says what comes next."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.model = LanguageModel(config)

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        logits = self.model(tokens[:, :-1]).astype(popxl.float32)
        return addons.cross_entropy(logits.reshape((-1, logits.shape[-1])), tokens[:, 1:].flatten())


def program(sizes: Sizes, replicas: int = 1, clip: float | None = None) -> popxl.Ir:
    """A step in bfloat16, of float32 variables."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        tokens = popxl.h2d_stream((sizes.texts, sizes.length + 1), popxl.int32, "tokens")
        optimizer = partial(optimizers.adamw, lr=3e-4, weight_decay=0.1, clip_norm=clip)
        bfloat16 = addons.MixedPrecision(popxl.bfloat16)
        step = addons.train_step(Loss(sizes.config), tokens, optimizer=optimizer, precision=bfloat16)
        addons.host_store(step.loss)
    return ir


def session_of(sizes: Sizes, calls: Any, target: str, **how: Any) -> popxl.Session:
    """The step, compiled for a machine with called graphs in some way."""
    ir = program(sizes, **how)
    ir.options.calledGraphs = calls
    return popxl.Session(ir, target)


def row(sizes: Sizes, calls: str, target: str, **how: Any) -> list[str]:
    """A line of the table."""
    begun = perf_counter()
    session = session_of(sizes, calls, target, **how)
    seconds, cost = perf_counter() - begun, session.cost()
    cycles = "" if cost.cycles is None else f"{cost.cycles / 1e6:.1f}"
    return [
        *(target, str(sizes.layers), calls, session.report.calls, f"{cost.bytes_accessed / 1e9:.1f}"),
        *(str(cost.kernels), str(cost.copies), cycles, f"{cost.temporary_bytes / 1e6:.0f}", f"{seconds:.0f}"),
    ]


def main(arguments: Sequence[str] | None = None) -> Iterable[list[str]]:
    """Compile all that is asked for, and print the table. Rows come as soon as they are known."""
    parser = argparse.ArgumentParser(description="What a step of training costs on TPUs and GPUs.")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--calls", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--clip", type=float, help="the norm that gradients are clipped to")
    given = parser.parse_args(arguments)
    rows = []
    for target in given.targets:
        for layers in given.layers:
            for calls in given.calls:
                sizes = Sizes(layers, given.width, max(1, given.width // 128), given.width * 11 // 4)
                rows.append(row(sizes, calls, target, replicas=given.replicas, clip=given.clip))
                print(" | ".join(rows[-1]), flush=True)
    print(table_to_string([HEADER, *rows]))
    return rows


if __name__ == "__main__":
    main()
