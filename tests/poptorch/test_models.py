"""Whole models, trained ten steps beside PyTorch: losses and weights agree after each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)
from tests.poptorch.models import CASES, Batch, Case, Encoder  # noqa: E402
from tests.tolerances import tolerances  # noqa: E402

STEPS = 10
torch.set_num_threads(1)  # models are tiny: threads of PyTorch would only wait for each other
ROWS = 4
# The gradient by biases of keys is 0, but for rounding. With a tiny eps Adam would make as much of that as of others.
OPTIMISERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


def batches(case: Case, rows: int, count: int = STEPS) -> list[Batch]:
    """What each step is given; always the same."""
    random = torch.Generator().manual_seed(1)
    return [case.data(random, rows) for _ in range(count)]


def first_model(case: Case) -> torch.nn.Module:
    """The model, with the same weights whenever it is made."""
    torch.manual_seed(0)
    return case.make()


class Reference:
    """A model that PyTorch trains, with a step's micro-batches one after the other."""

    def __init__(self, model: torch.nn.Module, optimiser: str = "SGD") -> None:
        self.model = model
        self._optimiser = OPTIMISERS[optimiser](model)

    def step(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        """One step of the optimiser, by the mean of the losses. Returns these."""
        self._optimiser.zero_grad()
        losses = [self.model(*batch)[1] for batch in micro_batches]
        (sum(losses) / len(losses)).backward()
        self._optimiser.step()
        return [loss.detach() for loss in losses]


def divided(batch: Batch, parts: int) -> list[Batch]:
    """Rows, dealt in order."""
    return list(zip(*(t.chunk(parts) for t in batch), strict=True))


def close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    wanted = expected.detach().to(ours.dtype)
    torch.testing.assert_close(ours, wanted, **tolerances(wanted.double(), tolerance), check_dtype=False)


def same_weights(ours: torch.nn.Module, expected: torch.nn.Module, tolerance: float) -> None:
    """Parameters and buffers agree."""
    wanted = expected.state_dict()
    for name, t in ours.state_dict().items():
        close(t, wanted[name], tolerance)


def both(case: Case, optimiser: str = "SGD", **ways: int) -> tuple[poptorch.PoplarExecutor, Reference]:
    """A model of each, with equal weights; ours with so many `deviceIterations`, `replicationFactor` and so on."""
    model = first_model(case)
    reference = Reference(copy.deepcopy(model), optimiser)
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.deviceIterations(ways.get("iterations", 1)).replicationFactor(ways.get("replicas", 1))
    options.Training.gradientAccumulation(ways.get("accumulation", 1))
    return poptorch.trainingModel(model, options, OPTIMISERS[optimiser](model)), reference


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(("name", "optimiser"), [("MLP", "SGD"), *((name, "AdamW") for name in CASES)])
def test_step_by_step(name: str, optimiser: str) -> None:
    case = CASES[name]
    ours, reference = both(case, optimiser)
    for batch in batches(case, ROWS):
        _, loss = ours(*batch)
        close(loss, reference.step([batch])[0], 1e-5)
        same_weights(ours.model, reference.model, 1e-5)


WAYS = {
    "iterations": {"iterations": STEPS},
    "accumulation": {"accumulation": 3},
    "replicas": {"replicas": 2},
    "all": {"iterations": 2, "accumulation": 3, "replicas": 2},
}


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize(("name", "way"), [*(("MLP", way) for way in reversed(WAYS)), ("GPT", "all"), ("BERT", "all")])
def test_ways(name: str, way: str) -> None:
    """Ten steps, each of which is dealt to micro-batches and replicas; several of them in one call."""
    case, ways = CASES[name], WAYS[way]
    ours, reference = both(case, **ways)
    iterations = ways.get("iterations", 1)
    micro_batches = ways.get("accumulation", 1) * ways.get("replicas", 1)
    for batch in batches(case, ROWS * micro_batches * iterations, STEPS // iterations):
        _, losses = ours(*batch)
        expected = [
            loss for step in divided(batch, iterations) for loss in reference.step(divided(step, micro_batches))
        ]
        close(losses.reshape(-1), torch.stack(expected), 1e-5)
        same_weights(ours.model, reference.model, 1e-5)


@pytest.mark.thorough
def test_batch_norm_sees_micro_batches() -> None:
    case = CASES["ResNet"]
    ours, reference = both(case, iterations=2, accumulation=2)
    for batch in batches(case, 4 * ROWS, 5):
        ours(*batch)
        for step in divided(batch, 2):
            reference.step(divided(step, 2))
    same_weights(ours.model, reference.model, 1e-5)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("name", ["MLP", "LeNet", "encoder"])
def test_halves_with_a_scaled_loss(name: str) -> None:
    """All in float16. PyTorch, in float32, is as close as halves are."""
    case = CASES[name]
    model = first_model(case)
    reference = Reference(copy.deepcopy(model))
    model.half()
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, loss_scaling=128.0, use_combined_accum=False
    )
    ours = poptorch.trainingModel(model, optimizer=optimizer)
    for x, labels in batches(case, ROWS):
        _, loss = ours(x.half(), labels)
        assert loss.dtype is torch.float16
        close(loss, reference.step([(x, labels)])[0], 1e-2)
    same_weights(ours.model, reference.model, 2e-2)


def test_halves_of_activations_alone() -> None:
    """Inputs are float16, weights stay float32, and so do their updates."""
    case = CASES["MLP"]
    ours, reference = both(case)
    for x, labels in batches(case, ROWS):
        scores, loss = ours(x.half(), labels)
        assert scores.dtype is torch.float16
        close(loss, reference.step([(x, labels)])[0], 1e-2)
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    same_weights(ours.model, reference.model, 5e-3)


@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize("units", [2, 4])
def test_pipeline(units: int) -> None:
    """The layers of the encoder are on several units; numbers are those of one."""
    case = Case(lambda: Encoder(layers=units), CASES["encoder"].data)
    ours, reference = both(case, accumulation=2 * units - 1)
    layers = ours.model.encoder.layers
    for unit in range(1, units):
        first = unit * len(layers) // units
        layers[first] = poptorch.BeginBlock(layers[first], ipu_id=unit)
    for batch in batches(case, ROWS * (2 * units - 1), 3):
        _, losses = ours(*batch)
        close(losses, torch.stack(reference.step(divided(batch, 2 * units - 1))), 1e-5)
    same_weights(ours.model, reference.model, 1e-5)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    """What was trained is right in inference, too, several micro-batches in a call."""
    case = CASES[name]
    model = first_model(case).eval()
    (batch,) = batches(case, 3 * ROWS, 1)
    with torch.no_grad():
        expected = [model(*part) for part in divided(batch, 3)]
    outputs, losses = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(3))(*batch)
    close(outputs, torch.cat([out for out, _ in expected]), 1e-5)
    close(losses, torch.stack([loss for _, loss in expected]), 1e-5)
