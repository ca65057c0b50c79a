"""`Precision.enableStochasticRounding`: training in halves where rounding to nearest stalls, and its random state."""

from __future__ import annotations

import pytest
import torch

import poptorch

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


class Model(torch.nn.Module):
    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, dtype=dtype) for _ in range(layers)])

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return poptorch.identity_loss((x - y).float() ** 2, "mean")


def adam(parameters):
    return poptorch.optim.AdamW(parameters, lr=1e-4, accum_type=FLOAT16, first_order_momentum_accum_type=FLOAT16)


def sgd(parameters):
    return poptorch.optim.SGD(parameters, lr=1e-3, momentum=0.9, use_combined_accum=False, velocity_accum_type=FLOAT16)


class Training:
    """A training of some steps, on the same data each."""

    def __init__(
        self,
        optimizer,
        enabled=True,
        dtype=BFLOAT16,
        layers=2,
        accumulation=1,
        iterations=1,
        replicas=1,
        off_chip=False,
    ):
        torch.manual_seed(0)
        self.model = Model(layers, dtype)
        self.options = poptorch.Options().randomSeed(3).deviceIterations(iterations).replicationFactor(replicas)
        self.options.Training.gradientAccumulation(accumulation)
        self.options.Precision.enableStochasticRounding(enabled)
        if off_chip:
            self.options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
        self.wrapped = poptorch.trainingModel(self.model, self.options, optimizer(self.model.parameters()))
        rows = 4 * accumulation * iterations * replicas
        self.data = torch.randn(2, rows, 8, dtype=dtype)

    def steps(self, count: int) -> float:
        loss = [self.wrapped(*self.data) for _ in range(count)][-1]
        return loss.float().mean().item()

    def weights(self) -> list[torch.Tensor]:
        self.wrapped.copyWeightsToHost()
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": lambda ps: torch.optim.Adagrad(ps, lr=1e-3)},
        {"optimizer": adam, "accumulation": 2, "iterations": 2},
        {"optimizer": adam, "layers": 3, "accumulation": 2},
    ],
    ids=["adagrad", "loops", "layers"],
)
def test_a_training_that_stalls_with_rounding_to_nearest_goes_on(how):
    nearest, stochastic = Training(enabled=False, **how), Training(**how)
    before = nearest.steps(1), stochastic.steps(1)
    fallen = [start - each.steps(40) for start, each in zip(before, (nearest, stochastic), strict=True)]
    assert fallen[1] > 0.05 and fallen[1] > 2 * fallen[0]


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    "how",
    [{"optimizer": sgd, "dtype": FLOAT16}, {"optimizer": sgd, "off_chip": True}, {"optimizer": adam, "replicas": 2}],
    ids=["float16", "off chip", "replicas"],
)
def test_trainings_repeat_by_their_seed(how):
    one, same, nearest = Training(**how), Training(**how), Training(enabled=False, **how)
    assert one.steps(4) == same.steps(4)
    nearest.steps(4)
    assert all(map(torch.equal, one.weights(), same.weights()))
    assert not all(map(torch.equal, one.weights(), nearest.weights()))


def test_replicas_round_alike():
    """With the same rows, replicas that drew other numbers would have other weights, and losses, after a few steps."""
    training = Training(sgd, replicas=2)
    rows = training.data[:, :4].repeat(1, 2, 1)
    losses = torch.stack([training.wrapped(*rows) for _ in range(6)])
    assert torch.equal(losses[:, 0], losses[:, 1]) and losses[0, 0] != losses[-1, 0]


def test_a_restored_state_continues():
    whole, again = Training(sgd), Training(sgd)
    for each in (whole, again):
        each.steps(3)
    state = whole.wrapped.rng_state
    assert len(state) == 3  # the seed, and two words
    whole.steps(2)
    again.wrapped.rng_state = state
    again.steps(2)
    assert all(map(torch.equal, whole.weights(), again.weights()))
    again.wrapped.rng_state = [3, 1, 2]
    for each in (whole, again):
        each.steps(2)
    assert not all(map(torch.equal, whole.weights(), again.weights()))


def test_a_saved_program_continues(tmp_path):
    training = Training(sgd)
    training.steps(2)
    training.wrapped.save(str(tmp_path / "training.poptorch"))
    training.steps(2)
    loaded = poptorch.load(str(tmp_path / "training.poptorch"))
    for _ in range(2):
        loaded(*training.data)
    loaded.copyWeightsToHost()
    assert all(map(torch.equal, training.weights(), loaded.parameters()))
