"""Training steps of a BERT on several GPUs or TPUs by PopTorch's execution strategies, compiled and estimated.

    python -m tests.targets.torch_pipeline [--target "gpu h100:4"] [--layers 12] [--micro-batches 16] [--into FILE]

A stage on each device, in bfloat16, with AdamW. The time is estimated from the compiled stages and the order in which
the host queues them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import poptorch
from tests.targets import plugin  # noqa: F401  # XLA's flags
from tests.targets.tables import Table
from tests.targets.torch_models import Classifier

ROWS, TOKENS = 4, 512

HEAD = """\
| | strategy | `autoRecomputation` | ms | devices compute, % of the time | temporaries of a device, MB |
|---|---|---|---|---|---|"""


def model_of(layers: int, stages: int) -> nn.Module:
    """A BERT of width 768: as many layers on each IPU, the embeddings on the first and the classifier on the last."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=8192, num_labels=4, num_hidden_layers=layers)
    config.attention_probs_dropout_prob = config.hidden_dropout_prob = 0.0
    model = BertForSequenceClassification(config)
    for k, layer in enumerate(model.bert.encoder.layer):
        poptorch.BeginBlock(layer, f"layer{k}", ipu_id=k * stages // layers)
    poptorch.BeginBlock(model.bert.embeddings, "embeddings", ipu_id=0)
    poptorch.BeginBlock(model.bert.pooler, "classifier", ipu_id=stages - 1)
    return Classifier(model, "input_ids").train().to(torch.bfloat16)


def costs(strategy: str, kind: str, target: str, layers: int, micro_batches: int) -> list[str]:
    """Estimated milliseconds, share of computing, and temporaries of the device that needs most."""
    stages = int(target.rpartition(":")[2])
    torch.manual_seed(0)
    model = model_of(layers, stages)
    options = poptorch.Options().useOfflineIpuTarget(target)
    options.setExecutionStrategy(getattr(poptorch, strategy)())
    options.Training.gradientAccumulation(micro_batches)
    options._Popart.set("autoRecomputation", kind)
    run = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=1e-3))
    rows = ROWS * micro_batches
    run.compile(torch.randint(0, 8192, (rows, TOKENS)), torch.arange(rows) % 4)
    cost = poptorch.sessionOf(run).cost()
    run.destroy()
    assert cost.seconds is not None
    share = sum(ipu.seconds for ipu in cost.ipus) / (stages * cost.seconds)
    return [f"{1e3 * cost.seconds:.1f}", f"{100 * share:.0f}", f"{cost.temporary_bytes / 1e6:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.targets.torch_pipeline", description=__doc__)
    parser.add_argument("--target", default="gpu h100:4")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--into", type=Path, help="a file or page that keeps the rows")
    asked = parser.parse_args()
    table = Table(HEAD, asked.into)
    for strategy in ("ShardedExecution", "PipelinedExecution"):
        for kind in ("NoRecompute", "Standard", "Pipeline"):
            if strategy == "PipelinedExecution" or kind != "Pipeline":
                about = [asked.target, strategy, kind]
                table.add(about, lambda: costs(strategy, kind, asked.target, asked.layers, asked.micro_batches))  # noqa: B023


if __name__ == "__main__":
    main()
