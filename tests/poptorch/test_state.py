"""Optimisers of wrapped models: their numbers, their state on the device, and the dictionaries that hold both."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch import optim
from poptorch.run.compiled import Compiled
from poptorch.run.executor import PoplarExecutor


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


def test_a_loaded_state_without_step_counts_keeps_those_of_the_program() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.b = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(((self.w + self.b) * x).sum(), "sum")

    _, optimizer, model = wrapped(lambda p: optim.Adam(p, lr=0.1, betas=(0.5, 0.5)), Two())
    model(X)
    model(X)
    optimizer.load_state_dict(optimizer.state_dict() | {"ipu_state": {"Accl1___w": torch.zeros(3)}})
    model(X)
    merged = optimizer.state_dict()["ipu_state"]
    assert merged["Step"].item() == 3
    for name, expected in {"Accl1___w": 0.5 * X[0], "Accl1___b": 0.875 * X[0], "Accl2___w": 0.875 * X[0] ** 2}.items():
        torch.testing.assert_close(merged[name], expected)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
    ],
)
def test_changes_have_an_effect_at_the_next_call(make) -> None:
    module, optimizer, model = wrapped(make)
    model(X)
    (group,) = optimizer.param_groups
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(0.5)
    else:
        group["lr"] = 0.5
    model(X)
    model.setOptimizer(optimizer)
    model(X)
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 1.1 * X[0])


@pytest.mark.filterwarnings("error")  # PyTorch warns where it has not seen a step of the optimiser
def test_a_schedule_of_rates() -> None:
    module, optimizer, model = wrapped(lambda p: torch.optim.SGD(p, lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        model(X)
        schedule.step()
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 1.75 * X[0])


def test_constants_cannot_change() -> None:
    module, optimizer, model = wrapped(lambda p: optim.SGD(p, lr=0.1))
    model(X)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(poptorch.Error, match="'weight_decay' of group 0 is 0.1.*as a constant"):
        model.setOptimizer(optimizer)
    with pytest.raises(poptorch.Error, match="was compiled with SGD, and this optimizer is Adam"):
        model.setOptimizer(optim.Adam(module.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="'weight_decay' of group 0 is 0.1.*markAsVariable"):
        model(X)
    optimizer.param_groups[0]["weight_decay"] = 0
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


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return poptorch.identity_loss(self.a.sum() + self.b.sum(), "sum")


def test_another_optimizer_may_train_other_parameters(caplog: pytest.LogCaptureFixture) -> None:
    def of(*groups: torch.nn.Parameter, rates: tuple[float, ...] = (0.5, 0.0)) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(groups, rates, strict=False)], lr=0.1)

    module, other = Two(), torch.nn.Linear(3, 5)  # that has no like of them
    optimizer = of(module.a, module.b)
    model = poptorch.trainingModel(module, optimizer=optimizer)
    model()
    with pytest.raises(poptorch.Error, match="has none of the model's parameters that require a gradient"):
        model.setOptimizer(of(other.weight, other.bias))
    model()
    copied = copy.deepcopy(optimizer)  # it has parameters of its own, of these shapes
    copied.param_groups[1]["lr"] = 0.25
    model.setOptimizer(copied)
    model()
    assert (module.a.tolist(), module.b.tolist()) == ([-0.5] * 2, [0.75] * 3)
    for changed in (of(module.b, module.a), of(module.a)):
        model.setOptimizer(changed)
        model()
    assert (module.a.tolist(), module.b.tolist()) == ([-1.0] * 2, [0.25] * 3)
    assert not caplog.records


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
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph.*in a module around the model"):
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


class Scaled(torch.nn.Module):
    """Weights in one dtype, used in another: the loss is a sum of products."""

    def __init__(self, dtype: torch.dtype, used_in: torch.dtype) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0, -1.0], dtype=dtype))
        self.used_in = used_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((self.w.to(self.used_in) * x.to(self.used_in)).sum(), "none")


def emulated(
    dtype: torch.dtype, used_in: torch.dtype, rows: torch.Tensor, scaling: float, lr: float
) -> tuple[list[float], list[list[float]]]:
    """Factors and weights after each step, by PyTorch: rows are `[steps, micro-batches, elements]`."""
    module = Scaled(dtype, used_in)
    factor, factors, weights = 1.0, [], []
    for step in rows:
        total, largest = torch.zeros(3), 0.0
        for x in step:
            module.w.grad = None
            loss = (module.w.to(used_in) * x.to(used_in)).sum()
            loss.backward(torch.tensor(scaling * factor, dtype=used_in))
            total += module.w.grad.float()
            largest = max(largest, module.w.grad.float().abs().nan_to_num(torch.inf).max().item())
        with torch.no_grad():
            module.w.copy_(module.w.float() - lr * total / len(step) / (scaling * factor))
        if used_in is torch.half:
            scale = factor * scaling * (2.0 if largest <= 65504 / 8 else 0.5)
            factor = min(max(scale, 2.0**-15), 2.0**15) / scaling
        factors.append(factor)
        weights.append(module.w.tolist())
    return factors, weights


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(
    ("dtype", "used_in", "replicas"),
    [(torch.half, torch.half, 1), (torch.half, torch.half, 2), (torch.float, torch.half, 1), (torch.float,) * 2 + (1,)],
)
def test_automatic_loss_scaling(dtype: torch.dtype, used_in: torch.dtype, replicas: int) -> None:
    """Beside PyTorch in float16. In the third step gradients are large, in the fifth too, with a mean of 0; the last
    overflows."""
    options = poptorch.Options().replicationFactor(replicas)
    options.Training.setAutomaticLossScaling(True).gradientAccumulation(2 // replicas)
    options.anchorTensor("scale", "finalLossScale")
    module = Scaled(dtype, used_in)
    optimizer = optim.SGD(module.parameters(), lr=0.125, loss_scaling=64.0)
    model = poptorch.trainingModel(module, options, optimizer)
    rows = torch.tensor([[[0.5, -0.25, 1.0], [1.0, 0.5, 2.0]]]).repeat(6, 1, 1)
    rows[2] *= 20.0
    rows[4, 1] = -rows[4, 0]
    rows[4] *= 40.0
    rows[5] *= 1000.0
    factors, weights = emulated(dtype, used_in, rows, 64.0, 0.125)
    assert used_in is torch.float or factors == [2, 4, 2, 4, 2, 1]
    for step, factor, weight in zip(rows, factors, weights, strict=True):
        model(step)
        assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"].item() == factor
        assert model.getAnchoredTensor("scale").item() == 64 * factor
        np.testing.assert_array_equal(module.w.detach().float().numpy(), np.float32(weight))


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


# In PyTorch's form ----------------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Two layers that are trained, one that is not reached by the loss, and a parameter that is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 4, dtype=dtype)
        self.second = torch.nn.Linear(4, 2, dtype=dtype)
        self.unused = torch.nn.Linear(2, 5, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.second(self.first(x).tanh()) * self.scale, torch.ones_like(x[:, :2]))


ROWS = torch.linspace(-1, 1, 15).reshape(5, 3)


def eagerly(module: Layers, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        module(ROWS.to(module.scale.dtype)).backward()
        optimizer.step()


def trained(make, times: int, state=None, dtype: torch.dtype = torch.float32):
    """Module, optimiser and wrapper after some steps; from the states of others, if they are given."""
    module = Layers(dtype)
    optimizer = make(module.parameters())
    model = poptorch.trainingModel(module, None, optimizer)
    if state is not None:
        module.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for _ in range(times):
        model(ROWS.to(dtype))
    return module, optimizer, model


MAKES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.5), amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, betas=(0.9, 0.95)),
    "lamb": lambda p: optim.LAMB(p, lr=0.1),
    "combined": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=128.0),
}


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("name", MAKES)
def test_training_goes_on_exactly_from_a_state_and_in_pytorch_too(name: str) -> None:
    make = MAKES[name]
    whole, optimizer, model = trained(make, 3)
    state = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    for _ in range(3):
        model(ROWS)
    again, *_ = trained(make, 3, state)
    for key, expected in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], expected)

    eager = Layers()
    theirs = make(eager.parameters())
    eager.load_state_dict(state[0])
    theirs.load_state_dict(state[1])
    eagerly(eager, theirs, 3)
    torch.testing.assert_close(eager.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)
    assert {type(p) for p in theirs.state} == {torch.nn.Parameter}
    mine = {p.shape: {key: t.shape for key, t in each.items()} for p, each in optimizer.state.items()}
    assert mine == {p.shape: {key: t.shape for key, t in each.items()} for p, each in theirs.state.items()}

    back = Layers()  # the same optimiser, three steps in PyTorch, three in a wrapped model, three in PyTorch
    theirs = make(back.parameters())
    eagerly(back, theirs, 3)
    model = poptorch.trainingModel(back, None, theirs)
    for _ in range(3):
        model(ROWS)
    torch.testing.assert_close(back.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)
    eagerly(back, theirs, 3)
    model.copyWeightsToDevice()
    model(ROWS)
    reference = Layers()
    theirs = make(reference.parameters())
    eagerly(reference, theirs, 10)
    torch.testing.assert_close(back.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam, optim.Adam])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    ],
    ids=["one", "cyclic"],
)
def test_schedulers_that_cycle_the_first_beta(kind, schedule) -> None:
    ours, theirs = Layers(), Layers()
    optimizers = [kind(module.parameters(), lr=0.01) for module in (ours, theirs)]
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    model = poptorch.trainingModel(ours, optimizer=optimizers[0])
    betas = set()
    for _ in range(6):
        model(ROWS)
        eagerly(theirs, optimizers[1], 1)
        betas.add(optimizers[0].param_groups[0]["betas"][0])
        for scheduler in schedulers:
            scheduler.step()
    assert len(betas) > 3
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)


class Head(torch.nn.Module):
    """Layers trained by a loss of one's own; its parameters have other names than theirs."""

    def __init__(self, name: str, layers: Layers, loss) -> None:
        super().__init__()
        self.add_module(name, layers)
        self.layers, self.loss = [layers], loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (layers,) = self.layers
        return self.loss(layers.second(layers.first(x).tanh()), torch.ones_like(x[:, :2]))


def losses_in_turn(layers: Layers) -> list[Head]:
    functional = torch.nn.functional
    return [Head("a", layers, functional.mse_loss), Head("b", layers, functional.l1_loss)]


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam"])
def test_the_state_of_one_optimizer_is_where_it_was_used_last(name: str) -> None:
    ours, theirs = Layers(), Layers()
    optimizer, reference = MAKES[name](ours.parameters()), MAKES[name](theirs.parameters())
    models = [poptorch.trainingModel(head, optimizer=optimizer) for head in losses_in_turn(ours)]
    for step, which in enumerate((0, 1, 0, 0, 1)):
        expected = losses_in_turn(theirs)[which](ROWS)
        reference.zero_grad()
        expected.backward()
        reference.step()
        torch.testing.assert_close(models[which](ROWS), expected.detach(), rtol=1e-5, atol=1e-5)
        if step == 1:  # somebody looks
            optimizer.state_dict()
    models[1].destroy()
    models[0](ROWS)
    reference.zero_grad()
    losses_in_turn(theirs)[0](ROWS).backward()
    reference.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-5)


def test_an_optimizer_of_poptorch_has_state_in_each_wrapper(caplog: pytest.LogCaptureFixture) -> None:
    """As in PopTorch; and each wrapper says so."""
    ours, theirs = Layers(), Layers()
    optimizer = optim.Adam(ours.parameters(), lr=0.1)
    references = [torch.optim.Adam(theirs.parameters(), lr=0.1) for _ in range(2)]
    models = [poptorch.trainingModel(head, optimizer=optimizer) for head in losses_in_turn(ours)]

    def step(which: int) -> None:
        models[which](ROWS)
        references[which].zero_grad()
        losses_in_turn(theirs)[which](ROWS).backward()
        references[which].step()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)

    step(0)
    references[1].load_state_dict(copy.deepcopy(references[0].state_dict()))  # what is compiled begins with the newest
    step(1)
    told = "has trained some parameters in another wrapper meanwhile"
    assert told not in caplog.text
    for which in (0, 0, 1, 0):
        step(which)
    assert caplog.text.count(told) == 2  # once by each


@pytest.mark.parametrize("name", ["adagrad", "adamw"])
def test_state_of_parameters_that_the_loss_does_not_reach_stays(name: str) -> None:
    module, reference = Layers(), Layers()
    optimizer, theirs = MAKES[name](module.parameters()), MAKES[name](reference.parameters())
    for each, stepper in ((module, optimizer), (reference, theirs)):
        sum(p.sum() for p in each.parameters()).backward()
        stepper.step()
    model = poptorch.trainingModel(module, optimizer=optimizer)
    for _ in range(2):
        model(ROWS)
        eagerly(reference, theirs, 1)
        torch.testing.assert_close(optimizer.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)


def test_an_adagrad_goes_on_with_layers_that_are_thawed() -> None:
    """Without decay of its rate it is all the same to it how many steps there were."""
    ours, theirs = Layers(), Layers()
    optimizer, reference = (torch.optim.Adagrad(layers.parameters(), lr=0.1) for layers in (ours, theirs))
    for layers in (ours, theirs):
        layers.second.requires_grad_(False)
    model = poptorch.trainingModel(ours, optimizer=optimizer)
    for _ in range(2):
        model(ROWS)
    eagerly(theirs, reference, 2)
    for layers in (ours, theirs):
        layers.second.requires_grad_(True)
    model.destroy()
    model(ROWS)
    eagerly(theirs, reference, 1)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)


class Switched(torch.nn.Module):
    """A trunk, and the head that is used now."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = torch.nn.Linear(3, 4), torch.nn.ModuleList([torch.nn.Linear(4, 2) for _ in range(2)])
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.heads[self.which](self.trunk(x)).square().sum(), "sum")


def test_state_of_a_head_waits_until_it_is_used_again() -> None:
    ours, theirs = Switched(), Switched()
    optimizer, reference = (torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9) for module in (ours, theirs))
    for ours.which in (0, 1, 0):
        theirs.which = ours.which
        model = poptorch.trainingModel(ours, optimizer=optimizer)
        for _ in range(2):
            reference.zero_grad()
            loss = theirs(ROWS)
            loss.backward()
            reference.step()
            torch.testing.assert_close(model(ROWS), loss.detach(), rtol=1e-5, atol=1e-5)
        model.destroy()
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-5)


def test_an_adagrad_that_is_new_goes_on_with_the_state_of_the_device() -> None:
    """It has state before its first step, which is not taken for what somebody has loaded."""
    module, _, model = trained(MAKES["adagrad"], 2)
    model.setOptimizer(MAKES["adagrad"](module.parameters()))
    model(ROWS)
    reference = Layers()
    eagerly(reference, MAKES["adagrad"](reference.parameters()), 3)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)


def test_state_is_read_when_somebody_looks_and_what_is_changed_in_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer, model = trained(MAKES["sgd"], 1)
    reads = []
    state = Compiled.state
    monkeypatch.setattr(Compiled, "state", lambda self: reads.append(self) or state(self))
    for _ in range(3):
        model(ROWS)
    assert not reads
    assert len(optimizer.state) == 4 and len(optimizer.state_dict()["state"]) == 4
    kept = optimizer.state[module.first.bias]["momentum_buffer"]
    assert len(reads) == 1
    model(ROWS)  # nobody has changed anything
    assert not torch.equal(optimizer.state[module.first.bias]["momentum_buffer"], kept)
    assert len(reads) == 2
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["momentum"] = 1.0
    before = optimizer.state[module.second.bias]["momentum_buffer"].clone()
    optimizer.state[module.second.bias]["momentum_buffer"].add_(1000)
    model(ROWS)
    after = optimizer.state[module.second.bias]["momentum_buffer"]
    torch.testing.assert_close(after, before + 1000, rtol=0, atol=2)
    optimizer.state.clear()  # as in PyTorch, training begins anew
    model(ROWS)
    assert optimizer.state[module.second.bias]["momentum_buffer"].abs().max() < 2


def test_a_state_that_is_loaded_between_calls_counts() -> None:
    module, optimizer, model = trained(MAKES["adam"], 2)
    state = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    model(ROWS)
    expected = copy.deepcopy(module.state_dict())
    model(ROWS)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    model(ROWS)
    assert all(torch.equal(t, expected[name]) for name, t in module.state_dict().items())
    optimizer.load_state_dict(state[1])
    del optimizer.state[module.second.bias]
    theirs = Layers()  # whose bias begins anew
    reference = MAKES["adam"](theirs.parameters())
    theirs.load_state_dict(module.state_dict())
    reference.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        model(ROWS)
    eagerly(theirs, reference, 2)
    torch.testing.assert_close(module.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_torchs_optimizers_have_plain_state(duplicate) -> None:
    module, optimizer, _ = trained(MAKES["adamw"], 2)
    copied = duplicate((module, optimizer))[1]
    assert type(copied.state).__name__ == "defaultdict"
    assert [each["step"].item() for each in copied.state.values()] == [2] * 4
    assert {p.shape for p in copied.state} == {(4, 3), (4,), (2, 4), (2,)}


def test_two_wrappers_share_an_optimizer() -> None:
    one, other = Model(), Model()
    optimizer = torch.optim.SGD([one.w, other.w], lr=0.1, momentum=0.5)
    models = [poptorch.trainingModel(each, None, optimizer) for each in (one, other)]
    models[0](X), models[1](X), models[0](X)
    state = optimizer.state_dict()["state"]
    torch.testing.assert_close(state[0]["momentum_buffer"], 1.5 * X[0])
    torch.testing.assert_close(state[1]["momentum_buffer"], X[0])


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
def test_a_wrapper_that_is_forgotten_leaves_the_state(make) -> None:
    module, optimizer, model = wrapped(lambda p: make(p, lr=0.1, momentum=0.5))
    model(X), model(X)
    del model
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["momentum_buffer"], 1.5 * X[0])


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_of_narrow_parameters_is_exact_if_it_is_loaded_into_a_wrapper(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    whole, optimizer, model = trained(MAKES["adamw"], 2, dtype=dtype)
    state = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    model(ROWS.to(dtype))
    again, *_ = trained(MAKES["adamw"], 1, state, dtype)
    assert all(torch.equal(t, whole.state_dict()[name]) for name, t in again.state_dict().items())
    assert "is rounded" not in caplog.text
    plain = Layers(dtype)
    other = MAKES["adamw"](plain.parameters())
    other.load_state_dict(state[1])  # PyTorch itself does, before there is a wrapper
    poptorch.trainingModel(plain, None, other)(ROWS.to(dtype))
    assert "is rounded to the type of its parameters" in caplog.text


def test_state_is_saved_before_a_run(tmp_path) -> None:
    _, optimizer, model = trained(MAKES["adam"], 2)
    state = copy.deepcopy(optimizer.state_dict())
    model(ROWS)
    optimizer.load_state_dict(state)
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    loaded(ROWS)
    (found, *_) = loaded._trainer.optimizer.state.values()
    assert found["step"].item() == 3


# What PyTorch does with gradients -------------------------------------------------------------------------------------


def test_gradients_are_not_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    module, optimizer, model = wrapped(lambda p: torch.optim.SGD(p, lr=0.1))
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0) == 0  # there has been no call
    model(X)
    with pytest.raises(poptorch.Error, match="cannot be clipped after its call.*max_grad_norm=1.0"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    with pytest.raises(poptorch.Error, match="cannot be clipped after its call"):
        torch.nn.utils.clip_grad_value_(module.parameters(), 1.0)
    optimizer.zero_grad(), optimizer.step(), module.zero_grad()  # as programs do; nothing is left to be done
    assert "grad" not in caplog.text
    for _ in range(2):
        assert module.w.grad is None
    assert caplog.text.count("gradients of a wrapped model stay in its program") == 1
    torch.testing.assert_close(module.w.detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.1 * X[0])


def test_training_within_inference_mode_and_without_gradients(caplog: pytest.LogCaptureFixture) -> None:
    module, optimizer, model = wrapped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    with torch.inference_mode():
        model(X)
        torch.testing.assert_close(optimizer.state[module.w]["momentum_buffer"], X[0])
    model(X)
    torch.testing.assert_close(optimizer.state[module.w]["momentum_buffer"], 1.5 * X[0])
    assert not caplog.text
    module = Model()
    module.forward = torch.no_grad()(module.forward)
    _, optimizer, model = wrapped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), module)
    model(X)
    assert "Nothing is trained" in caplog.text
    assert not optimizer.state


def test_what_is_told_of_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, model = wrapped(lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer.register_step_post_hook(lambda *given: None)
    model(X)
    assert "Hooks of SGD's step" in caplog.text
