"""The default beside the best way to compile called graphs, over a grid of models, sizes, dtypes, replicas and targets.

    python -m tests.targets.grid [--only "llama|bert"] [--every 4] [--into grid.md]

Each point is a training step as users write it, by the kit or by `poptorch`, compiled for its target with calls written
out and with calls in loops, with updates of all layers at once where there are some. It prints a table: what the
default takes, and its estimated time beside that of the faster way. The points cover each pair of settings rather than
all combinations. Nothing runs.
Models by `poptorch` from `transformers` are left out where that is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax

import popxl
import popxl_addons as addons
from popxl.base.version import VERSION
from popxl.ir import Ir
from popxl_addons import layers, optimizers
from runtime import machine, mode_selection
from runtime.plan.segmentation import SegmentationPolicy
from runtime.program.build_layout import layout_for
from runtime.program.compiled import CompiledProgram, Precompiled, compile_program
from runtime.targets.devices import Device
from tests.targets.steps import Sizes
from tests.targets.tables import Table

HEAD = f"""\
Written by `python -m tests.targets.grid`, with popxl {VERSION} and jax {jax.__version__}.

| | layers | width | | replicas | target | default | ops | inlined | loops | default ÷ best | compiled in | loops |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

CHIPS = {
    "tpu v5e": ("tpu v5e", "tpu v5e:2x4"),
    "tpu v5p": ("tpu v5p", "tpu v5p:2x2x2"),
    "gpu h100": ("gpu h100", "gpu h100:8"),
}
"""For each kind of chip the machine with one of them, and with eight."""


class Point(NamedTuple):
    """One combination of settings."""

    model: str
    layers: int
    width: int
    dtype: str
    replicas: int
    chip: str

    @property
    def target(self) -> str:
        """The machine that it is compiled for."""
        one, eight = CHIPS[self.chip]
        return one if self.replicas == 1 else eight

    @property
    def package(self) -> str:
        """What it needs that may be missing."""
        return "transformers" if self.model in ("BERT", "ViT") else "torch"


POINTS = [
    Point("blocks", 2, 256, "float32", 1, "tpu v5e"),
    Point("blocks", 8, 512, "bfloat16", 8, "tpu v5e"),
    Point("blocks", 24, 256, "bfloat16", 1, "tpu v5e"),
    Point("blocks", 2, 2048, "bfloat16", 1, "tpu v5p"),
    Point("blocks", 96, 256, "bfloat16", 8, "gpu h100"),
    Point("blocks", 16, 2048, "float32", 1, "gpu h100"),
    Point("blocks", 2, 8192, "float32", 8, "gpu h100"),
    Point("GPT", 4, 256, "bfloat16", 8, "tpu v5p"),
    Point("GPT", 12, 256, "float32", 1, "tpu v5e"),
    Point("GPT", 12, 1024, "bfloat16", 8, "gpu h100"),
    Point("GPT", 96, 256, "float32", 1, "gpu h100"),
    Point("Llama", 2, 1024, "bfloat16", 1, "tpu v5e"),
    Point("Llama", 8, 256, "float32", 8, "tpu v5p"),
    Point("Llama", 24, 256, "bfloat16", 8, "tpu v5p"),
    Point("Llama", 96, 256, "bfloat16", 1, "tpu v5e"),
    Point("Llama", 2, 8192, "float32", 1, "gpu h100"),
    Point("Llama", 32, 1024, "bfloat16", 1, "gpu h100"),
    Point("Llama", 96, 512, "bfloat16", 8, "gpu h100"),
    Point("experts", 4, 256, "bfloat16", 8, "tpu v5e"),
    Point("experts", 12, 1024, "bfloat16", 8, "gpu h100"),
    Point("BERT", 2, 256, "float32", 1, "tpu v5e"),
    Point("BERT", 12, 256, "bfloat16", 1, "tpu v5p"),
    Point("BERT", 12, 768, "float32", 8, "gpu h100"),
    Point("BERT", 24, 1024, "bfloat16", 1, "gpu h100"),
    Point("ViT", 4, 256, "bfloat16", 8, "tpu v5e"),
    Point("ViT", 12, 768, "float32", 1, "gpu h100"),
    Point("ResNet-50", 50, 256, "float32", 1, "gpu h100"),
    Point("ResNet-50", 50, 256, "bfloat16", 8, "gpu h100"),
]


# Programs ------------------------------------------------------------------------------------------------------------


def sizes(point: Point) -> Sizes:
    """Those of a model of the kit: few tokens, for what matters here is what repeats."""
    wide = point.width
    return Sizes(point.layers, wide, max(2, wide // 128), wide * 11 // 4 // 8 * 8, 512, texts=2, length=128)


class Layers(addons.Module):
    """The same layer so many times, each with variables of its own: it is outlined, and called."""

    def __init__(self, layer: addons.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count, self.rows = layer, count, addons.Module()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = self.layer.create_graph(x)
        losses = []
        for i in range(self.count):
            x, *more = graph.bind(self.rows.add_variable_inputs(i, facts)).call(x)
            losses += more
        return sum(losses, popxl.ops.mean(x * x).astype(popxl.float32))


class Mixture(addons.Module):
    """Attention, and a mixture of experts; and the loss that spreads tokens among these."""

    def __init__(self, heads: int, hidden: int, group: str | None) -> None:
        super().__init__()
        self.attention = layers.Attention(heads)
        self.experts = layers.Experts(8, hidden, group=group)

    def build(self, x: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        x = x + self.attention(x)
        y, balance = self.experts(x)
        return x + y, balance


def layer_of(point: Point) -> addons.Module:
    """A layer of the models that have nothing else."""
    made = sizes(point)
    if point.model == "blocks":
        return layers.TransformerBlock(layers.Attention(made.heads), layers.MLP(made.hidden))
    return Mixture(made.heads, 2 * point.width, "all" if point.replicas > 1 else None)


def of_the_kit(point: Point) -> None:
    """A step of a model of the kit, for its target."""
    made = sizes(point)
    ir = popxl.Ir(axes={"all": point.replicas}) if point.replicas > 1 else popxl.Ir()
    with ir.main_graph:
        if point.model in ("GPT", "Llama"):
            fed = popxl.h2d_stream((made.texts, made.length + 1), popxl.int32, "tokens")
            config = made.config
            if point.model == "GPT":
                plain: dict[str, Any] = dict(rotary=None, norm="layer", activation="gelu", bias=True, mlp_bias=True)
                config = config.model_copy(update=plain | dict(tied=True, hidden=4 * point.width))
            module: addons.Module = layers.NextTokenLoss(layers.LanguageModel(config))
        else:
            fed = popxl.h2d_stream((made.texts, made.length, point.width), popxl.float32, "x")
            module = Layers(layer_of(point), point.layers)
        precision = addons.MixedPrecision(popxl.bfloat16) if point.dtype == "bfloat16" else None
        optimizer = partial(optimizers.adamw, lr=3e-4, weight_decay=0.1)
        addons.host_store(addons.train_step(module, fed, optimizer=optimizer, precision=precision).loss)
    popxl.Session(ir, point.target)


def of_poptorch(point: Point) -> None:
    """A step of a model of PyTorch, for its target."""
    import torch

    import poptorch
    from tests.targets.torch_models import MADE

    torch.manual_seed(0)
    module, inputs = MADE[point.model](point.layers, point.width)
    if point.dtype == "bfloat16":
        module = module.to(torch.bfloat16)
        inputs = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs)
    options = poptorch.Options().useOfflineIpuTarget(point.target).replicationFactor(point.replicas)
    options.broadcastBuffers(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    inputs = tuple(torch.cat([t] * point.replicas) for t in inputs)
    poptorch.trainingModel(module.train(), options, optimizer).compile(*inputs)


# What it costs -------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What became of a point: what the default takes, and how many ops there are; for each way what a run costs, in a
    number and in words, and in how many seconds it was compiled."""

    default: str
    ops: int
    costs: dict[str, tuple[float, str]]
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        """The time of the default, in times of the best way."""
        return self.costs[self.default][0] / min(cost for cost, _ in self.costs.values())


def found(point: Point) -> Found:
    """What a step costs in each way, and which way the default takes."""
    results: list[Found] = []
    with _comparing(results):
        (of_poptorch if point.package != "torch" or point.model == "ResNet-50" else of_the_kit)(point)
    (result,) = results
    return result


@contextmanager
def _comparing(results: list[Found]) -> Iterator[None]:
    """Within the block programs are compiled in both ways, and what the default would take is found out."""

    def compile_fastest(ir: Ir, device: Device) -> CompiledProgram:
        layout = layout_for(ir, device)
        rolling = layout_for(ir, device, "batched").rerolling
        loops = "batched" if rolling is not None and rolling.has_batches else "rolled"
        both = ("inlined", loops) if rolling is not None and rolling.loops else ("inlined",)
        made = {way: compile_program(ir, device, Precompiled(way)) for way in both}

        def known(ir: Ir, device: Device, precompiled: Precompiled | None = None) -> CompiledProgram:
            return made[layout.mode if precompiled is None else precompiled.mode]

        with patch.object(mode_selection, "compile_program", known):
            program = mode_selection.compile_fastest(ir, device)
        results.append(
            Found(
                program.layout.mode,
                SegmentationPolicy(layout.main).total_size,
                {way: mode_selection.run_cost(each) for way, each in made.items()},
                {way: each.seconds for way, each in made.items()},
            )
        )
        return program

    with patch.object(machine, "compile_fastest", compile_fastest):
        yield


def cells(result: Found) -> list[str]:
    """What was found, as cells of the table."""
    both = ("inlined", next((way for way in result.costs if way != "inlined"), ""))
    costs = [result.costs[way][1].removesuffix(" a run") if way in result.costs else "–" for way in both]
    seconds = [f"{result.seconds[way]:.0f}" if way in result.seconds else "–" for way in both]
    return [result.default, str(result.ops), *costs, f"{result.ratio:.2f}", *seconds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the points, and print the table. Rows come as soon as they are known."""
    parser = argparse.ArgumentParser("python -m tests.targets.grid", description="The default beside the best way.")
    parser.add_argument("--only", metavar="PATTERN", default="", help="points in whose text this pattern is found")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take each Nth of them")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="keeps the rows; those that it has are not made again"
    )
    given = parser.parse_args(arguments)
    points = [p for p in POINTS if re.search(given.only, " ".join(map(str, p)), re.IGNORECASE)]
    table = Table(HEAD, given.into)
    for point in points[:: given.every]:
        if importlib.util.find_spec(point.package) is not None:
            table.add([*map(str, point)], lambda point=point: cells(found(point)))


if __name__ == "__main__":
    main()
