"""Losses of large logits in chunks: which losses of PyTorch models, with the numbers of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
import popxl_addons as addons
from popxl.ops import linear_cross_entropy
from tests.tolerances import assert_near

WORDS, WIDTH = 13, 6
IDS = torch.arange(24).reshape(3, 8) * 5 % WORDS


class Language(nn.Module):
    """A layer, a head, and a loss of its logits."""

    def __init__(
        self, loss: Callable[[torch.Tensor, torch.Tensor], Any], dtype: torch.dtype = torch.float32, bias: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias)
        self.loss = loss
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.layer(self.embedding(ids)))), ids)


def shifted(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def in_float32(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, labels = logits.float().view(-1, WORDS), F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(rows, labels.view(-1), ignore_index=-100)


def summed(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, WORDS), ids[..., 1:].flatten(), reduction="sum")


LOSSES = [shifted, in_float32, summed]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 100 logits in a chunk."""
    monkeypatch.setitem(linear_cross_entropy.__globals__, "LOGITS_OF_CHUNK", 100)


def trained(model: Language, plan: addons.MemoryPlan | None = None) -> tuple[list[float], list[int]]:
    """Losses of three steps, and the chunks of each loss op; the model has the trained parameters."""
    options = poptorch.Options()
    if plan is not None:
        options.Training.setMemoryPlan(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = poptorch.trainingModel(model, options, optimizer=optimizer)
    losses = [torch.as_tensor(run(IDS)).item() for _ in range(3)]
    run.copyWeightsToHost()
    ops = [op for graph in poptorch.sessionOf(run).ir.graphs for op in graph.ops]
    assert any(op.op_type == "LinearCrossEntropy" for op in ops) != any(op.op_type == "LogSoftmax" for op in ops)
    run.destroy()
    return losses, [op.attributes["chunks"] for op in ops if op.op_type == "LinearCrossEntropy"]


def in_torch(model: Language) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_large_logits_are_computed_in_chunks(small_chunks: None, loss: Any, dtype: torch.dtype) -> None:
    model = Language(loss, dtype, bias=loss is not shifted)
    reference = copy.deepcopy(model)
    losses, chunks = trained(model)
    assert chunks == [-(-(24 if loss is in_float32 else 21) * WORDS // 100)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert_near(losses, in_torch(reference), tolerance)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.detach().float(), theirs.detach().float(), tolerance)


def test_a_loss_of_many_logits_is_computed_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_cross_entropy.__globals__, "FUSED_FROM", 100)
    model = Language(in_float32)
    reference = copy.deepcopy(model)
    losses, chunks = trained(model)
    assert chunks == [1]
    assert_near(losses, in_torch(reference), 1e-5)


def test_few_logits_are_computed_at_once() -> None:
    assert trained(Language(shifted))[1] == []


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_plan_states_the_number_of_chunks(loss: Any) -> None:
    """A plan without treatments: the paths of a whole model are those of its plan."""
    model = Language(loss)
    reference = copy.deepcopy(model)
    losses, chunks = trained(model, addons.MemoryPlan(graphs=(), logit_chunks=5))
    assert chunks == [5]
    assert_near(losses, in_torch(reference), 1e-5)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, ids: F.cross_entropy(logits.reshape(-1, WORDS), ids.reshape(-1), label_smoothing=0.1),
        lambda logits, ids: F.cross_entropy(logits.reshape(-1, WORDS), ids.reshape(-1), torch.arange(float(WORDS))),
        lambda logits, ids: F.cross_entropy(torch.tanh(logits).reshape(-1, WORDS), ids.reshape(-1)),
        lambda logits, ids: F.cross_entropy(logits.half().reshape(-1, WORDS), ids.reshape(-1)),
        lambda logits, ids: F.cross_entropy(logits[..., :-1].reshape(-1, WORDS - 1), ids.reshape(-1) % (WORDS - 1)),
        lambda logits, ids: F.cross_entropy(logits.transpose(1, 2), ids),
        lambda logits, ids: F.cross_entropy(logits.reshape(-1, WORDS), ids.reshape(-1)) + 0.1 * logits.mean(),
    ],
    ids=["smoothed", "weighted", "computed", "rounded", "fewer words", "classes second", "read"],
)
def test_other_losses_stay(small_chunks: None, loss: Any) -> None:
    model = Language(lambda *given: poptorch.identity_loss(loss(*given), "none"))
    reference = copy.deepcopy(model)
    reference.loss = loss
    losses, chunks = trained(model)
    assert chunks == []
    assert_near(losses, in_torch(reference), 1e-3)


def test_a_vector_in_place_of_the_weight(small_chunks: None) -> None:
    """A linear function of one result: its input has the classes."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 5))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(F.linear(x, self.weight), target)

    x, target, model = torch.linspace(-1, 2, 60 * WORDS).reshape(12, WORDS, 5), IDS.flatten()[:12], Scores()
    run = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert_near(run(x, target).item(), model(x, target).item(), 1e-5)
    run.destroy()


def test_logits_that_the_model_returns_stay_whole(small_chunks: None) -> None:
    model = Language(lambda logits, ids: (shifted(logits, ids), logits))
    run = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    expected = model(IDS)[1].detach()
    assert_near(run(IDS)[1], expected, 1e-5)
    ops = [op.op_type for graph in poptorch.sessionOf(run).ir.graphs for op in graph.ops]
    assert "LinearCrossEntropy" not in ops
    run.destroy()
