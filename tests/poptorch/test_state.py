"""Optimisers of wrapped models: their numbers, their state on the device, and the dictionaries that hold both."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch import optim
from poptorch.executor import PoplarExecutor


class Model(torch.nn.Module):
    """The gradient of `w` is the sum of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((self.w * x).sum(), "sum")


X = torch.tensor([[0.5, -0.25, 0.1]])


def wrapped(make, module: Model | None = None, options: poptorch.Options | None = None):
    module = module or Model()
    optimizer = make(module.parameters())
    return module, optimizer, poptorch.trainingModel(module, options, optimizer)


def stepped(module: Model, optimizer: torch.optim.Optimizer, times: int) -> torch.Tensor:
    """What PyTorch makes of the weights on the CPU."""
    for _ in range(times):
        optimizer.zero_grad()
        (module.w * X).sum().backward()
        optimizer.step()
    return module.w.detach()


def test_the_dictionary_before_and_after_compilation() -> None:
    _, optimizer, model = wrapped(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01))
    state = optimizer.state_dict()
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None
    assert not optimizer.has_state()
    model(X)
    state = optimizer.state_dict()
    assert state.keys() == {"ipu_state", "ipu_param", "state", "param_groups"}
    torch.testing.assert_close(state["ipu_state"]["Accl1___w"], 0.5 * (X[0] + 0.01 * torch.tensor([1.0, 2.0, 3.0])))
    numbers = {name: value.item() for name, value in state["ipu_param"].items()}
    assert numbers["learningRate___specific___w"] == pytest.approx(0.1)
    assert numbers["scaledLearningRate0___specific___w"] == pytest.approx(0.05)
    assert numbers["weightDecayScaleFactor0___specific___w"] == pytest.approx(1 - 0.05 * 0.01)
    assert numbers["lossScaling_FLOAT"] == 1
    assert optimizer.has_state()


def test_plain_sgd_has_no_state() -> None:
    _, optimizer, model = wrapped(lambda p: optim.SGD(p, lr=0.1))
    model(X)
    assert optimizer.state_dict()["ipu_state"] == {}


def test_reading_twice_reads_the_device_once() -> None:
    _, optimizer, model = wrapped(lambda p: optim.Adam(p, lr=0.1))
    model(X)
    first = optimizer.state_dict()["ipu_state"]["Accl1___w"]
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"] is first
    model(X)
    second = optimizer.state_dict()["ipu_state"]["Accl1___w"]
    torch.testing.assert_close(first, 0.1 * X[0])
    torch.testing.assert_close(second, 0.19 * X[0])


def test_loading_a_state_continues_training() -> None:
    _, first, model = wrapped(lambda p: optim.Adam(p, lr=0.1))
    for _ in range(3):
        model(X)
    weights = {name: t.clone() for name, t in model.model.state_dict().items()}
    state = first.state_dict()
    model(X)
    expected = model.model.w.detach().clone()

    module, second, again = wrapped(lambda p: optim.Adam(p, lr=0.1))
    module.load_state_dict(weights)
    second.load_state_dict(state)
    assert second.state_dict()["ipu_state"] is state["ipu_state"]
    again(X)
    torch.testing.assert_close(module.w.detach(), expected)


def test_missing_names_keep_what_the_device_has() -> None:
    _, optimizer, model = wrapped(lambda p: optim.Adam(p, lr=0.1))
    model(X)
    state = optimizer.state_dict()
    state["ipu_state"] = {"Accl1___w": torch.full((3,), 2.0)}
    optimizer.load_state_dict(state)
    assert list(optimizer.state_dict()["ipu_state"]) == ["Accl1___w"]
    model(X)
    merged = optimizer.state_dict()["ipu_state"]
    torch.testing.assert_close(merged["Accl1___w"], 1.8 + 0.1 * X[0])
    torch.testing.assert_close(merged["Accl2___w"], (0.999 * 0.001 + 0.001) * X[0] ** 2)
    assert merged["Step"].item() == 2


def test_state_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, model = wrapped(lambda p: optim.Adam(p, lr=0.1))
    model(X)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state | {"ipu_state": {"Accl1___w": torch.zeros(2)}})
    with pytest.raises(poptorch.Error, match=r"Accl1___w has the shape \[2\], expected \[3\]"):
        model(X)
    optimizer.load_state_dict(state | {"ipu_state": {"Accl7___w": torch.zeros(2)}})
    model(X)
    assert "Ignoring optimizer state that the program does not have: Accl7___w" in caplog.text
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded onto the IPU"):
        optimizer.load_state_dict(torch.optim.Adam([torch.zeros(1)]).state_dict())
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        optimizer.load_state_dict({})


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)])
def test_changes_have_an_effect_when_set(make) -> None:
    module, optimizer, model = wrapped(make)
    model(X)
    optimizer.param_groups[0]["lr"] = 0.5
    model(X)
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.2 * X[0])
    model.setOptimizer(optimizer)
    model(X)
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.7 * X[0])


def test_a_schedule_of_rates() -> None:
    module, optimizer, model = wrapped(lambda p: torch.optim.SGD(p, lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()  # PyTorch wants to see one
    for _ in range(3):
        model(X)
        schedule.step()
        model.setOptimizer(optimizer)
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 1.75 * X[0])


def test_constants_cannot_change() -> None:
    module, optimizer, model = wrapped(lambda p: optim.SGD(p, lr=0.1))
    model(X)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(poptorch.Error, match="'weight_decay' of group 0 is 0.1.*as a constant"):
        model.setOptimizer(optimizer)
    with pytest.raises(poptorch.Error, match="was compiled with SGD, and this optimizer is Adam"):
        model.setOptimizer(optim.Adam(module.parameters(), lr=0.1))
    model(X)  # goes on as before
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.2 * X[0])


def test_another_optimizer_takes_over() -> None:
    module, old, model = wrapped(lambda p: optim.SGD(p, lr=0.1, momentum=0.5))
    model(X)
    new = optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    model.setOptimizer(new)
    model(X)
    torch.testing.assert_close(old.state_dict()["ipu_state"]["Accl1___w"], X[0])  # as it was then
    torch.testing.assert_close(new.state_dict()["ipu_state"]["Accl1___w"], 1.5 * X[0])
    model.setOptimizer(old)
    assert model(X).isfinite()
    torch.testing.assert_close(old.state_dict()["ipu_state"]["Accl1___w"], 1.5 * X[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_take_the_state_along(duplicate) -> None:
    _, optimizer, model = wrapped(lambda p: optim.SGD(p, lr=0.1, momentum=0.5))
    model(X)
    copied = duplicate(optimizer)
    module = Model()
    copied.param_groups[0]["params"] = [module.w]
    again = poptorch.trainingModel(module, None, copied)
    again(X)
    torch.testing.assert_close(copied.state_dict()["ipu_state"]["Accl1___w"], 1.5 * X[0])


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    ],
)
@pytest.mark.parametrize("leave", [PoplarExecutor.destroy, PoplarExecutor.detachFromDevice])
def test_state_survives_leaving_the_device(make, leave) -> None:
    module, optimizer, model = wrapped(make)
    model(X), model(X)
    leave(model)
    model(X)
    reference = Model()
    torch.testing.assert_close(module.w.detach(), stepped(reference, _torchs(optimizer, reference), 3))


def _torchs(optimizer: torch.optim.Optimizer, module: Model) -> torch.optim.Optimizer:
    kind = torch.optim.SGD if isinstance(optimizer, torch.optim.SGD) else type(optimizer)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name in ("lr", "momentum")}
    return kind(module.parameters(), **group)


def test_destroying_brings_the_state_home() -> None:
    _, optimizer, model = wrapped(lambda p: optim.SGD(p, lr=0.1, momentum=0.5))
    model(X)
    model.destroy()
    torch.testing.assert_close(optimizer.get_state_dict()["ipu_state"]["Accl1___w"], X[0])


def test_the_default_optimizer() -> None:
    module = Model()
    model = poptorch.trainingModel(module)
    model(X)
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.01 * X[0])


def test_a_model_without_parameters_has_a_loss() -> None:
    model = poptorch.trainingModel(lambda x: poptorch.identity_loss(x, "mean"))
    assert model(torch.tensor([1.0, 2.0])).item() == 1.5
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        poptorch.trainingModel(lambda x: x + 1)(torch.ones(1))


def test_half_accumulators_need_a_running_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    running, post = poptorch.MeanReductionStrategy.Running, poptorch.MeanReductionStrategy.Post

    def strategy(model: PoplarExecutor) -> poptorch.MeanReductionStrategy:
        return model.options.Training.mean_accumulation_and_replication_reduction_strategy

    module, _, model = wrapped(lambda p: optim.SGD(p, lr=0.1, accum_type=torch.half))
    assert strategy(model) is running
    model.destroy()
    combined = optim.SGD(module.parameters(), lr=0.1, momentum=0.9, accum_type=torch.half, use_combined_accum=True)
    model = poptorch.trainingModel(module, None, combined)
    assert strategy(model) is post
    half = optim.SGD(module.parameters(), lr=0.1, accum_type=torch.half)
    model.setOptimizer(half)
    assert strategy(model) is running
    model.destroy()
    model = poptorch.trainingModel(module, None, optim.SGD(module.parameters(), lr=0.1))
    model(X)
    with pytest.raises(ValueError, match="is already compiled"):
        model.setOptimizer(half)


def test_a_running_mean_does_not_overflow() -> None:
    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1, dtype=torch.half))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(self.w * x, "sum")

    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    module, _, model = wrapped(lambda p: optim.SGD(p, lr=1e-3, accum_type=torch.half), Large(), options)
    model(torch.full((4,), 30000.0, dtype=torch.half))
    assert module.w.item() == -30


def test_automatic_loss_scaling_is_state() -> None:
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(True)
    options.anchorTensor("scale", "finalLossScale")
    module = Model().half()
    optimizer = optim.SGD(module.parameters(), lr=0.1, loss_scaling=8.0)
    model = poptorch.trainingModel(module, options, optimizer)
    model(X.half())
    assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"].item() == 2
    assert model.getAnchoredTensor("scale").item() == 16
