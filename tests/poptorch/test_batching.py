"""How the rows of a call are dealt, and which results come back: the worked examples, with their numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch import OutputMode, ReductionType


class Same(torch.nn.Module):
    """Returns its input, and something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return x * 1, poptorch.identity_loss(self.weight * x.sum(), "sum")
        return x * 1


class Linear(torch.nn.Module):
    """A layer and a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, torch.nn.functional.mse_loss(y, target)


class Product(torch.nn.Module):
    """One weight, whose product with the input is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((self.w * x).sum(), "sum")


def options_of(d: int = 1, g: int = 1, r: int = 1) -> poptorch.Options:
    options = poptorch.Options().deviceIterations(d).replicationFactor(r)
    options.Training.gradientAccumulation(g)
    return options


@pytest.mark.parametrize(
    ("mode", "rows", "first"),
    [
        ((OutputMode.All,), 10, 0),
        ((OutputMode.Final,), 1, 9),
        ((OutputMode.EveryN, 5), 2, 4),
        ((OutputMode.Sum,), 1, None),
    ],
)
def test_inference_of_ten_iterations(mode: tuple, rows: int, first: int | None) -> None:
    layer = torch.nn.Linear(6, 20)
    model = poptorch.inferenceModel(layer, options_of(10).outputMode(*mode))
    x = torch.randn(10, 1, 5, 6)
    expected = layer(x).detach()
    out = model(x)
    assert out.shape == (rows, 1, 5, 20)
    wanted = expected.sum(0) if first is None else expected[first]
    torch.testing.assert_close(out[0], wanted)
    if mode[0] is OutputMode.EveryN:
        torch.testing.assert_close(out[1], expected[9])


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    ("d", "g", "r", "rows", "mode", "out", "loss"),
    [
        (10, 1, 1, 10, (OutputMode.Default,), (1, 10), ()),
        (1000, 1, 1, 1000, (OutputMode.All,), (1000, 10), (1000,)),
        (1000, 1, 1, 1000, (OutputMode.EveryN, 20), (50, 10), (50,)),
        (1000, 1, 1, 1000, (OutputMode.Sum,), (1, 10), ()),
        (2, 3, 1, 24, (OutputMode.All,), (24, 10), (6,)),
        (2, 3, 4, 96, (OutputMode.All,), (96, 10), (24,)),
        (2, 3, 4, 96, (OutputMode.Final,), (16, 10), (4,)),
        (2, 3, 4, 96, (OutputMode.Sum,), (16, 10), (4,)),
        (4, 2, 1, 8, (OutputMode.EveryN, 2), (4, 10), (4,)),
    ],
)
def test_shapes_in_training(d: int, g: int, r: int, rows: int, mode: tuple, out: tuple, loss: tuple) -> None:
    model = poptorch.trainingModel(Linear(), options_of(d, g, r).outputMode(*mode))
    y, error = model(torch.randn(rows, 10), torch.randn(rows, 10))
    assert (y.shape, error.shape) == (out, loss)


@pytest.mark.parametrize(("mode", "out", "loss"), [(OutputMode.All, 192, 48), (OutputMode.Final, 32, 8)])
def test_shapes_with_input_groups(mode: OutputMode, out: int, loss: int) -> None:
    options = options_of(2, 3, 8).outputMode(mode)
    options.inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive)
    y, error = poptorch.trainingModel(Linear(), options)(torch.randn(48, 10), torch.randn(48, 10))
    assert (y.shape, error.shape) == ((out, 10), (loss,))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ((OutputMode.All,), list(range(24))),
        ((OutputMode.Final,), [20, 21, 22, 23]),
        ((OutputMode.Sum,), [60, 66, 72, 78]),
        ((OutputMode.EveryN, 2), list(range(12, 24))),
    ],
)
def test_which_rows_come_back(mode: tuple, expected: list[int]) -> None:
    model = poptorch.trainingModel(Same(), options_of(2, 3, 4).outputMode(*mode))
    y, _ = model(torch.arange(24.0))
    assert y.tolist() == expected


@pytest.mark.parametrize(
    ("group_type", "expected"),
    [
        (poptorch.CommGroupType.Consecutive, [0, 0, 1, 1, 2, 2, 3, 3]),
        (poptorch.CommGroupType.Orthogonal, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_rows_are_dealt_to_groups_in_each_turn(group_type: poptorch.CommGroupType, expected: list[int]) -> None:
    options = options_of(2, 1, 4)
    options.inputReplicaGrouping(2, group_type)
    assert poptorch.inferenceModel(Same().eval(), options)(torch.arange(4.0)).tolist() == expected


@pytest.mark.parametrize(
    ("reduction", "mode", "weight", "losses"),
    [
        (ReductionType.Mean, OutputMode.All, 0.1, [1, 2, 3, 4, 3.75, 4.5, 5.25, 6]),
        (ReductionType.Mean, OutputMode.Final, 0.1, [5.25, 6]),
        (ReductionType.Mean, OutputMode.Sum, 0.1, [13, 16.5]),
        (ReductionType.Sum, OutputMode.Final, -2.6, [0, 0]),
    ],
)
def test_steps_by_mean_and_sum(reduction: ReductionType, mode: OutputMode, weight: float, losses: list[float]) -> None:
    module = Product()
    options = options_of(2, 2, 2).outputMode(mode)
    options.Training.accumulationAndReplicationReductionType(reduction)
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    result = model(torch.arange(1.0, 9.0))
    if any(losses):
        torch.testing.assert_close(result, torch.tensor(losses))
    torch.testing.assert_close(module.w.detach(), torch.tensor(weight))


@pytest.mark.parametrize("strategy", list(poptorch.MeanReductionStrategy))
def test_schedules_of_the_mean_agree(strategy: poptorch.MeanReductionStrategy) -> None:
    module = Product()
    options = options_of(2, 2, 2)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))(torch.arange(1.0, 9.0))
    torch.testing.assert_close(module.w.detach(), torch.tensor(0.1))


@pytest.mark.parametrize(("reduction", "rate"), [(ReductionType.Mean, 0.1), (ReductionType.Sum, 0.05)])
def test_accumulating_is_like_a_larger_batch(reduction: ReductionType, rate: float) -> None:
    x, target = torch.randn(4, 10), torch.randn(4, 10)
    whole, parts = Linear(), Linear()
    parts.load_state_dict(whole.state_dict())
    poptorch.trainingModel(whole, None, torch.optim.SGD(whole.parameters(), lr=0.1))(x, target)
    options = options_of(g=2)
    options.Training.accumulationAndReplicationReductionType(reduction)
    poptorch.trainingModel(parts, options, torch.optim.SGD(parts.parameters(), lr=rate))(x, target)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict())


def test_rows_that_make_up_no_micro_batches() -> None:
    with pytest.raises(AssertionError, match=r"Invalid batch dimension: the argument x has 7 rows.*deviceIterations"):
        poptorch.inferenceModel(Same().eval(), options_of(2))(torch.zeros(7))
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        poptorch.inferenceModel(Same().eval(), options_of(2))(torch.zeros(()))
    assert poptorch.inferenceModel(Same().eval())(torch.tensor(3.0)).item() == 3


def test_a_period_divides_the_iterations() -> None:
    with pytest.raises(AssertionError, match="should be a divisor of deviceIterations"):
        poptorch.inferenceModel(Same().eval(), options_of(4).outputMode(OutputMode.EveryN, 3))(torch.zeros(4))


def test_buffers_of_each_micro_batch() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.register_buffer("count", torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.count += 1
            return self.count * 1, poptorch.identity_loss(self.weight * x.sum(), "sum")

    module = Counting()
    model = poptorch.trainingModel(module, options_of(2, 2).outputMode(OutputMode.All))
    count, loss = model(torch.ones(4))
    assert count.tolist() == [2, 3, 4, 5]
    torch.testing.assert_close(loss, torch.tensor([1, 1, 0.99, 0.99]))
    assert module.count.item() == 5
