"""What PopTorch's memory settings save of a BERT on a target: the table of docs/memory.md.

    python -m tests.targets.torch_memory --layers 2 --width 128
    python -m tests.targets.torch_memory --into docs/memory.md     # 12 layers for an H100, a minute for a row

Nothing is run: all sizes are the compiler's own. It needs `transformers`, and the compiler of the target. Rows that the
page has are not made again: leave a line out, and the command makes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import poptorch
from tests.targets import torch_models
from tests.targets.programs import compile_faster
from tests.targets.tables import Table

ROWS, TOKENS = 16, 128

Setting = Callable[[torch.nn.Module, poptorch.Options], Any]


def location(*kinds: str, sharded: bool = False) -> Setting:
    """Tensors of some kinds off chip, or in pieces."""
    settings = poptorch.TensorLocationSettings()
    settings = settings.useReplicatedTensorSharding() if sharded else settings.useOnChipStorage(False)
    settings.minElementsForOffChip(1000).minElementsForReplicatedTensorSharding(1000)

    def choose(model: torch.nn.Module, options: poptorch.Options) -> None:
        for kind in kinds:
            getattr(options.TensorLocations, f"set{kind}Location")(settings)

    return choose


def phased(liveness: poptorch.Liveness) -> Setting:
    """A phase for every quarter of the layers."""

    def choose(model: torch.nn.Module, options: poptorch.Options) -> None:
        layers: Any = model.model.bert.encoder.layer  # type: ignore[union-attr]
        quarter = -(-len(layers) // 4)
        starts = range(quarter, len(layers), quarter)
        for i in starts:
            poptorch.BeginBlock(layers[i], str(i))
        poptorch.BeginBlock(model.model.bert.embeddings, "embeddings")  # type: ignore[union-attr,arg-type]
        strategy = poptorch.SerialPhasedExecution(*(["embeddings"], *([str(i)] for i in starts)))
        options.setExecutionStrategy(strategy.setTensorsLiveness(liveness))

    return choose


def accumulating(setting: Setting) -> Setting:
    """A setting, with gradients of two micro-batches."""

    def choose(model: torch.nn.Module, options: poptorch.Options) -> None:
        options.Training.gradientAccumulation(2)
        setting(model, options)

    return choose


def replicated(setting: Setting) -> Setting:
    """A setting, on four replicas."""

    def choose(model: torch.nn.Module, options: poptorch.Options) -> None:
        options.replicationFactor(4)
        setting(model, options)

    return choose


def nothing(model: torch.nn.Module, options: poptorch.Options) -> None:
    """No setting at all."""


SETTINGS: dict[str, Setting] = {
    "none": nothing,
    "`torch.utils.checkpoint` of each layer": lambda model, options: model.model.gradient_checkpointing_enable(),  # type: ignore[union-attr,operator]
    '`autoRecomputation` `"Standard"`': lambda model, options: options._Popart.set("autoRecomputation", "Standard"),
    "state of the optimiser off chip": location("Optimizer"),
    "weights off chip": location("Weight"),
    "activations off chip": location("Activation"),
    "weights, state, activations off chip": location("Weight", "Optimizer", "Activation"),
    "four phases, `OffChipAfterFwd`": phased(poptorch.Liveness.OffChipAfterFwd),
    "four phases, `OffChipAfterEachPhase`": phased(poptorch.Liveness.OffChipAfterEachPhase),
    "two micro-batches": accumulating(nothing),
    "two micro-batches, accumulators off chip": accumulating(location("Accumulator")),
    "four replicas": replicated(nothing),
    "four replicas, state in pieces": replicated(location("Optimizer", sharded=True)),
    "four replicas, weights and state in pieces": replicated(location("Weight", "Optimizer", sharded=True)),
}


def sizes(setting: Setting, target: str, layers: int, width: int, calls: str = "auto") -> list[int]:
    """Bytes of temporaries and variables on the device, and of all on the host, of a step of Adam.

    Args:
        setting: what is set.
        target: the machine.
        layers, width: of the model.
        calls: `calledGraphs` of the program.
    """
    torch.manual_seed(0)
    model, _ = torch_models.bert(layers, width)
    options = poptorch.Options().useOfflineIpuTarget(target)
    options._Popart.set("calledGraphs", calls)
    setting(model, options)
    run = poptorch.trainingModel(model, options, torch.optim.Adam(model.parameters(), lr=1e-3))
    rows = ROWS * options.Training.gradient_accumulation * options.replication_factor
    run.compile(torch.randint(0, 512, (rows, TOKENS)), torch.randint(0, 4, (rows,)))
    memory = poptorch.sessionOf(run).memory()
    run.destroy()
    return [memory.temporaries, memory.variables, memory.buffers_on_host + memory.temporaries_on_host]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.targets.torch_memory", description=__doc__)
    parser.add_argument("--target", default="gpu h100")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--calls", default="rolled", help="`calledGraphs` of the programs")
    parser.add_argument("--into", type=Path, help="a file or page that keeps the rows")
    parser.add_argument("--only", nargs="*", default=(), help="parts of the names of settings")
    asked = parser.parse_args()
    compile_faster()
    about = f"{asked.layers} layers of width {asked.width}" + f", {asked.calls}" * (asked.calls != "rolled")
    head = f"| {about} | setting | temporaries | variables | on the host |\n|---|---|---|---|---|"
    table = Table(head, asked.into)
    for name, setting in SETTINGS.items():
        if not asked.only or any(part in name for part in asked.only):
            numbers = (asked.target, asked.layers, asked.width, asked.calls)
            table.add([asked.target, name], lambda: [f"{n / 1e6:.1f} MB" for n in sizes(setting, *numbers)])  # noqa: B023


if __name__ == "__main__":
    main()
