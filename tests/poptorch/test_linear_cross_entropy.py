"""`F.linear_cross_entropy` with options: chunks as in PyTorch, its numbers, and less memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import poptorch

functional: Any = nn.functional
if not hasattr(functional, "linear_cross_entropy"):
    pytest.skip("this PyTorch has no linear_cross_entropy", allow_module_level=True)
CLASSES, WIDTH, SAMPLES = 30, 5, 12
IGNORING = [1, 2, -100, 4, -100, 3, 0, 0, 29, 7, 8, 9]


class Head(nn.Module):
    def __init__(self, sizes: tuple[int, int] = (CLASSES, WIDTH), **how: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.weight = nn.Linear(3, sizes[1]), nn.Parameter(torch.randn(sizes))
        self.how = how

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.linear_cross_entropy(self.layer(x), self.weight, target, **self.how)


def trained(model: Head, target: torch.Tensor) -> tuple[list[float], list[torch.Tensor], list[int | None]]:
    """Losses of three steps, parameters after them, and chunks of each loss op."""
    x = torch.linspace(-1, 1, 3 * SAMPLES).reshape(SAMPLES, 3)
    run = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [run(x, target).item() for _ in range(3)]
    run.copyWeightsToHost()
    ops = (op for graph in poptorch.sessionOf(run).ir.graphs for op in graph.ops)
    chunks = [op.attributes["chunks"] for op in ops if op.op_type == "LinearCrossEntropy"]
    run.destroy()
    return losses, [*model.parameters()], chunks


def in_torch(model: Head, target: torch.Tensor) -> tuple[list[float], list[torch.Tensor]]:
    x = torch.linspace(-1, 1, 3 * SAMPLES).reshape(SAMPLES, 3)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [*model.parameters()]


def options(**settings: Any) -> Any:
    return nn.LinearCrossEntropyOptions(**settings)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "how", "chunks"),
    [
        ({}, {}, 6),
        ({"chunking_method": "aspect_ratio:2"}, {"reduction": "sum"}, 12),
        ({"batch_chunk_size": 5, "chunking_method": None}, {}, 3),
        ({"batch_chunk_size": 4, "chunking_method": None}, {"ignore_index": 3}, 3),
        ({"chunking_method": None}, {}, 1),
    ],
    ids=str,
)
def test_numbers_and_chunks(settings: dict[str, Any], how: dict[str, Any], chunks: int) -> None:
    target = torch.tensor(IGNORING if "ignore_index" not in how else [abs(n) % 30 for n in IGNORING])
    losses, parameters, found = trained(Head(**how, options=options(**settings)), target)
    expected, theirs = in_torch(Head(**how), target)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(parameters, theirs)
    assert found == [chunks]


def test_options_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Label smoothing is computed of all logits."""
    target = torch.arange(SAMPLES)
    with caplog.at_level(logging.WARNING):
        losses, _, found = trained(Head(label_smoothing=0.1, options=options()), target)
    expected, _ = in_torch(Head(label_smoothing=0.1), target)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    assert not found and "linear_cross_entropy: `options` have no effect here" in caplog.text


@pytest.mark.compiled_whole
def test_memory() -> None:
    """All logits are 2 MB."""

    def temporaries(model: Head) -> int:
        run = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        run.compile(torch.zeros(1024, 3), torch.zeros(1024, dtype=torch.int64))
        return poptorch.sessionOf(run).memory().temporaries

    plain, chunked = temporaries(Head((512, 8))), temporaries(Head((512, 8), options=options()))
    assert plain > 2e6 and chunked < 0.25 * plain
