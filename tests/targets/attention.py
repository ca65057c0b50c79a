"""Training steps of PyTorch models with and without kernels of attention, compiled for TPUs and GPUs.

    python -m tests.targets.attention [--targets "tpu v5e"] [--only "BERT"] [--layers 4] [--into docs/targets.md]

Models of `transformers` in bfloat16 as users train them: with padding, with the dropout of their configurations, or
with images of 197 tokens. Without kernels, attention is computed in blocks of plain JAX.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import poptorch
from popxl.ops.attention import attended_backward_anew, attention_backward, attention_forward
from tests.targets import plugin  # noqa: F401  # XLA's flags
from tests.targets.tables import Table
from tests.targets.torch_models import Classifier

Inputs = tuple[torch.Tensor, ...]

HEAD = """\
| | model | attention | GB | kernels | temporaries, MB | million cycles |
|---|---|---|---|---|---|---|"""


class Padded(nn.Module):
    """A model of `transformers` for texts with padding: gives its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, attention_mask=mask, labels=labels).loss


def texts(tokens: int, padded: bool) -> Inputs:
    """Sixteen texts, the last of which is half as long as the others."""
    mask = torch.ones(16, tokens, dtype=torch.long)
    mask[-1, tokens // 2 :] = 0
    labels = torch.arange(16) % 4
    return torch.randint(0, 512, (16, tokens)), *((mask,) if padded else ()), labels


def bert(layers: int, dropout: float, padded: bool) -> tuple[nn.Module, Inputs]:
    """A BERT of width 768 with texts of 512 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    rates = {"attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout}
    model = BertForSequenceClassification(BertConfig(vocab_size=512, num_labels=4, num_hidden_layers=layers, **rates))
    return Padded(model) if padded else Classifier(model, "input_ids"), texts(512, padded)


def vit(layers: int) -> tuple[nn.Module, Inputs]:
    """A ViT of width 768 with sixteen images of 14 x 14 patches and a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=4, num_hidden_layers=layers))
    return Classifier(model, "pixel_values"), (torch.randn(16, 3, 224, 224), torch.arange(16) % 4)


MODELS: dict[str, Callable[[int], tuple[nn.Module, Inputs]]] = {
    "BERT": lambda layers: bert(layers, 0.0, padded=False),
    "BERT, padding": lambda layers: bert(layers, 0.0, padded=True),
    "BERT, padding, dropout": lambda layers: bert(layers, 0.1, padded=True),
    "ViT": vit,
}


@contextmanager
def blocks_of_plain_jax() -> Iterator[None]:
    """A context without kernels of attention."""
    plain = {attention_forward: attention_forward.plain, attention_backward: attended_backward_anew}
    with mock.patch.multiple(attention_forward, _overrides={}), mock.patch.multiple(attention_backward, _overrides={}):
        for kernel, function in plain.items():
            for platform in ("tpu", "gpu"):
                kernel.override(platform)(function)
        yield


def costs(name: str, layers: int, target: str, with_kernels: bool) -> list[str]:
    """Bytes accessed, kernels, temporaries and cycles of a training step."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](layers)
    model = model.train().to(torch.bfloat16)
    inputs = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs)
    run = poptorch.trainingModel(
        model, poptorch.Options().useOfflineIpuTarget(target), torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    if with_kernels:
        run.compile(*inputs)
    else:
        with blocks_of_plain_jax():
            run.compile(*inputs)
    cost = poptorch.sessionOf(run).cost()
    run.destroy()
    cycles = f"{cost.cycles / 1e6:.1f}" if cost.cycles else "–"
    return [f"{cost.bytes_accessed / 1e9:.2f}", str(cost.kernels), f"{cost.temporary_bytes / 1e6:.0f}", cycles]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.targets.attention", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=["tpu v5e", "gpu h100"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="", help="part of the names of models")
    parser.add_argument("--into", type=Path, help="a file or page that keeps the rows")
    asked = parser.parse_args()
    table = Table(HEAD, asked.into)
    for target in asked.targets:
        for name in MODELS:
            for with_kernels in (True, False):
                if asked.only in name:
                    about = [target, name, "kernels" if with_kernels else "blocks"]
                    table.add(about, lambda: costs(name, asked.layers, target, with_kernels))  # noqa: B023


if __name__ == "__main__":
    main()
