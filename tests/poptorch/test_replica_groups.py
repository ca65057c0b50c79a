"""Parameters and inputs that differ between groups of replicas, in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch import CommGroupType, VariableRetrievalMode, optim
from popxl.analysis.checking import check
from runtime.machine import LayoutMachine
from runtime.watched_runs import WatchingMachine, watched


class Columns(torch.nn.Module):
    """A product whose weight may be in shards of columns, one in each row; without, it is the whole problem."""

    def __init__(self, shards: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(shards.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(((x @ self.weight) ** 2).sum(), "sum")


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    ("of_weight", "of_input"),
    [
        (CommGroupType.Orthogonal, CommGroupType.Consecutive),
        (CommGroupType.Consecutive, CommGroupType.Orthogonal),
    ],
)
@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        (lambda p: optim.SGD(p, lr=0.05), None),
        (lambda p: optim.SGD(p, lr=0.05, momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.NAdam(p, lr=0.05), "exp_avg"),  # which keeps one number of each group, too
    ],
    ids=["sgd", "momentum", "nadam"],
)
def test_shards_train_as_the_whole(
    of_weight: CommGroupType, of_input: CommGroupType, optimizer: Callable[..., torch.optim.Optimizer], kept: str | None
) -> None:
    torch.manual_seed(1)
    whole, rows = torch.randn(3, 8) / 3, torch.randn(2, 2, 3)  # two groups of rows, of two
    module = Columns(whole.reshape(3, 4, 2).swapaxes(0, 1).contiguous())
    options = poptorch.Options().replicationFactor(8).inputReplicaGrouping(4, of_input)
    options.outputMode(poptorch.OutputMode.All)
    ours = optimizer(module.parameters())
    model = poptorch.trainingModel(module, options, ours)
    model.weight.replicaGrouping(of_weight, 2, VariableRetrievalMode.OnePerGroup)

    reference = torch.nn.Parameter(whole.clone())
    stepper = optimizer([reference])
    for _ in range(4):
        losses = model(rows.reshape(4, 3))
        stepper.zero_grad()
        loss = ((rows @ reference) ** 2).sum() / 8
        loss.backward()
        stepper.step()
        assert losses.shape == (8,)
        torch.testing.assert_close(losses.sum() / 8, loss.detach(), rtol=1e-6, atol=1e-6)
    found = module.weight.detach().swapaxes(0, 1).reshape(3, 8)
    torch.testing.assert_close(found, reference.detach(), rtol=1e-6, atol=1e-6)
    if kept:
        state = ours.state[module.weight][kept]
        assert state.shape == (4, 3, 2)
        torch.testing.assert_close(
            state.swapaxes(0, 1).reshape(3, 8), stepper.state[reference][kept], rtol=1e-5, atol=1e-6
        )


class Scale(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, rows + 1)[:, None])
        self.bias = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    ("group_type", "shards", "rows", "expected"),
    [
        (CommGroupType.Consecutive, 2, 2, [1, 1, 2, 2]),
        (CommGroupType.Orthogonal, 2, 2, [1, 2, 1, 2]),
        (CommGroupType.NoGrouping, 7, 4, [1, 2, 3, 4]),
    ],
)
def test_groups_see_their_rows(group_type: CommGroupType, shards: int, rows: int, expected: list[float]) -> None:
    model = poptorch.inferenceModel(Scale(rows), poptorch.Options().replicationFactor(4))
    model.weight.replicaGrouping(group_type, shards, VariableRetrievalMode.OnePerGroup)
    assert model(torch.ones(4)).tolist() == expected


def test_all_is_one_value() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    model = poptorch.inferenceModel(module, poptorch.Options().replicationFactor(2))
    model.weight.replicaGrouping(CommGroupType.All, 0, VariableRetrievalMode.OnePerGroup)
    assert model(torch.ones(2, 2)).shape == (2, 1)


def test_a_value_of_each_replica_comes_back() -> None:
    module = Scale(2)
    model = poptorch.inferenceModel(module, poptorch.Options().replicationFactor(4))
    model.weight.replicaGrouping(CommGroupType.Orthogonal, 2, VariableRetrievalMode.AllReplicas)
    model(torch.ones(4))
    model.copyWeightsToHost()
    assert module.weight.tolist() == [[1], [2], [1], [2]]


def test_groups_of_a_compiled_model_wait_for_the_next_program(caplog: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(Scale(4), poptorch.Options().replicationFactor(4))
    each = CommGroupType.NoGrouping, 1, VariableRetrievalMode.OnePerGroup
    model.weight.replicaGrouping(*each)
    assert model(torch.ones(4)).tolist() == [1, 2, 3, 4]
    model.weight.replicaGrouping(*each)
    assert not caplog.records
    model.weight.replicaGrouping(CommGroupType.All, 1, VariableRetrievalMode.OnePerGroup)
    assert "replicaGrouping: the model is compiled, so the groups of weight have no effect until" in caplog.text
    assert model(torch.ones(4)).tolist() == [1, 2, 3, 4]
    model.destroy()
    assert model(torch.ones(4)).shape == (16, 1)


def test_wrong_groups() -> None:
    model = poptorch.inferenceModel(Scale(2), poptorch.Options().replicationFactor(4))
    with pytest.raises(poptorch.Error, match="bias is a scalar"):
        model.bias.replicaGrouping(CommGroupType.Consecutive, 2, VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="its first dimension should be 4"):
        model.weight.replicaGrouping(CommGroupType.NoGrouping, 1, VariableRetrievalMode.OnePerGroup)
    with pytest.raises(ValueError, match="replicaGrouping: `shards` is '2'; expected the number of replicas in each"):
        model.weight.replicaGrouping(CommGroupType.Consecutive, "2", VariableRetrievalMode.OnePerGroup)


class WithBuffers(torch.nn.Module):
    """Statistics and a count that training changes, a dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.last(torch.nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.5))
        return poptorch.identity_loss((y**2).mean(), "mean")


@pytest.mark.parametrize("way", ["own buffers", "accumulated gradients", "grouped weights"])
def test_the_check_of_replicas_finds_nothing(way: str) -> None:
    options = poptorch.Options().replicationFactor(4).broadcastBuffers(False)
    module: torch.nn.Module = WithBuffers()
    x = torch.ones(16, 3)
    if way == "accumulated gradients":
        options.Training.gradientAccumulation(2)
    elif way == "grouped weights":
        options.inputReplicaGrouping(2, CommGroupType.Consecutive)
        module, x = Columns(torch.ones(2, 3, 5)), torch.ones(2, 3)
    model = poptorch.trainingModel(module, options, optim.AdamW(module.parameters(), lr=0.01))
    if way == "grouped weights":
        model.weight.replicaGrouping(CommGroupType.Orthogonal, 2, VariableRetrievalMode.OnePerGroup)
    machine = WatchingMachine(LayoutMachine())
    with watched(machine):
        model.compile(x)
    ((ir, _),) = machine.programs
    assert [str(each) for each in check(ir).findings] == []
