"""Programs whose memory is planned within budgets, other than stacks of layers: a pipeline, and models of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, TransformerBlock

MICRO_BATCHES = 6
LAYERS, WIDTH, HEADS, TOKENS, PATCHES = 12, 768, 12, 512, 196
"""Those of base models: BERT, a vision transformer and an MLP-Mixer of images of 224 by 224 pixels."""


class Stage(addons.Module):
    """Half of the transformer blocks."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, block = TransformerBlock(Attention(HEADS), MLP(4 * WIDTH, activation="gelu"), norm="layer").create_graph(
            x
        )
        for i in range(LAYERS // 2):
            (x,) = block.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return x


def pipeline(dtype: popxl.dtype, memory: Any) -> popxl.Ir:
    """A training step of two stages on two devices, each with a stage's variables, by one schedule."""
    ir = popxl.Ir()
    ir.num_host_transfers = MICRO_BATCHES
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((4, TOKENS, WIDTH), dtype, "x")
        facts, graph = Stage().create_graph(x.spec)
        names, outputs = graph.args.keys_flat(), graph.graph.outputs
        trained = [graph.args[name] for name in names]
        sums, backward = addons.autodiff_with_accumulation(
            graph, trained, outputs, graph.graph.inputs[:1], dtype=popxl.float32, memory=memory
        )
        weights, means = [], []
        for i in range(2):
            with popxl.ipu(i):
                weights.append(facts.init(f"stage{i}"))
                means.append(sums.init(f"means{i}"))
        with addons.pipelined_execution(MICRO_BATCHES, "1f1b") as p:
            with p.stage(0), popxl.ipu(0):
                first = graph.bind(weights[0]).call_with_info(ops.host_load(x))
                h = first.outputs[0].copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                last = graph.bind(weights[1]).call_with_info(h)
                given = backward.grad_graph_info.inputs_dict(last)
                (g,) = backward.bind(means[1]).call(last.outputs[0] * 1e-3, args=given)
                g = g.copy_to_ipu(0)
            with p.stage(2), popxl.ipu(0):
                backward.bind(means[0]).call(g, args=p.stash_and_restore_activations(first, backward.grad_graph_info))
        for i in range(2):
            with popxl.ipu(i):
                optimizers.sgd(weights[i], means[i].accum, lr=0.1)
                ops.var_updates.accumulator_zero_(means[i].mean_accum_counter)
    return ir


def encoder() -> tuple[Any, tuple[int, ...]]:
    """A transformer for sequences, in PyTorch, and the shape of its input."""
    import torch
    from torch.nn import functional as F

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
            self.heads, self.mix = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (
                self.heads(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).movedim(-3, 0).transpose(-3, -2)
            )
            x = x + self.mix(F.scaled_dot_product_attention(*heads).transpose(-3, -2).flatten(-2))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    return _summed([Block() for _ in range(LAYERS)]), (16, TOKENS, WIDTH)


def mixer() -> tuple[Any, tuple[int, ...]]:
    """Multilayer perceptrons over tokens and over channels in turn, in PyTorch, and the shape of their input."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
            self.tokens, self.channels = (
                torch.nn.Sequential(torch.nn.Linear(n, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, n))
                for n, hidden in ((PATCHES, WIDTH // 2), (WIDTH, 4 * WIDTH))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norms[1](x))

    return _summed([Block() for _ in range(LAYERS)]), (64, PATCHES, WIDTH)


def _summed(blocks: Any) -> Any:
    """Blocks that follow each other, and a loss."""
    import torch

    import poptorch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(*blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss((self.blocks(x) ** 2).mean(), "none")

    return Model()


def torch_session(
    made: Callable[[], tuple[Any, tuple[int, ...]]], target: str, calls: str, memory: Any
) -> popxl.Session:
    """The session of a model of PyTorch that `poptorch` trains: in bfloat16 on TPUs, and in float32 elsewhere."""
    import torch

    import poptorch

    torch.manual_seed(0)
    model, shape = made()
    options = poptorch.Options()
    if target != "cpu":
        options.useOfflineIpuTarget(target)
    options._Popart.set("calledGraphs", calls)
    options.Training.setMemoryPlan(memory)
    dtype = torch.bfloat16 if target.startswith("tpu") else torch.float32
    model.to(dtype)
    run = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    run.compile(torch.zeros(shape, dtype=dtype))
    return poptorch.sessionOf(run)


OF_PYTORCH: Mapping[str, Callable[[], tuple[Any, tuple[int, ...]]]] = {
    "poptorch encoder": encoder,
    "poptorch mixer": mixer,
}
