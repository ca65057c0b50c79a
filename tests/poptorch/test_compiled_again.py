"""What has a wrapped model compiled again: other parameters or modules, and others that are trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.head(self.norm(self.body(x)).tanh()).square().mean(), "none")


def eagerly(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = module(X)
    loss.backward()
    optimizer.step()
    return loss.detach()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: poptorch.optim.AdamW(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
}


def thaw(module: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Train the head, then the norm with it, then all; then leave the head for a while, and the norm."""
    module.body.requires_grad_(step >= 3)
    module.norm.requires_grad_(2 <= step < 6)
    module.head.requires_grad_(step != 4)


def add_groups(module: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        optimizer.add_param_group({"params": module.body.parameters(), "lr": 0.01})
    if step == 4:
        optimizer.param_groups[0]["params"] += module.norm.parameters()


@pytest.mark.thorough(but_each=12)
@pytest.mark.parametrize("change, parts", [(thaw, ("body", "norm", "head")), (add_groups, ("head",))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_trained_may_change(
    name: str, change: Any, parts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Net(), Net()
    optimizer, reference = (
        OPTIMIZERS[name]([p for part in parts for p in net.get_submodule(part).parameters()]) for net in (ours, theirs)
    )
    change(ours, optimizer, 0)
    model = poptorch.trainingModel(ours, optimizer=optimizer)
    for step in range(7):
        change(ours, optimizer, step)
        change(theirs, reference, step)
        torch.testing.assert_close(model(X), eagerly(theirs, reference), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            optimizer.state_dict()["state"], reference.state_dict()["state"], rtol=1e-4, atol=1e-5
        )
    assert not caplog.records


def test_an_optimizer_with_other_groups_goes_on_with_the_state() -> None:
    ours, theirs = Net(), Net()
    model = poptorch.trainingModel(ours, optimizer=OPTIMIZERS["adam"](ours.head.parameters()))
    reference = OPTIMIZERS["adam"](theirs.head.parameters())
    for _ in range(2):
        model(X), eagerly(theirs, reference)
    model.setOptimizer(OPTIMIZERS["adam"]([*ours.head.parameters(), *ours.body.parameters()]))
    reference.param_groups[0]["params"] += theirs.body.parameters()
    for _ in range(2):
        model(X), eagerly(theirs, reference)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_model_that_was_saved_counts_steps_as_before(tmp_path: Any) -> None:
    ours, theirs = Net(), Net()
    optimizer, reference = (OPTIMIZERS["adam"](net.parameters()) for net in (ours, theirs))
    model = poptorch.trainingModel(ours, optimizer=optimizer)
    for step in (0, 1, 2):
        thaw(ours, optimizer, step)
        thaw(theirs, reference, step)
        model(X), eagerly(theirs, reference)
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    torch.testing.assert_close(loaded(X), eagerly(theirs, reference), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(loaded.model.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-6)


def test_nothing_is_compiled_again_where_only_numbers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations: list[None] = []
    handle = poptorch.registerPostCompileHook(lambda: compilations.append(None))
    module = Net()
    module.body.requires_grad_(False)
    optimizer = OPTIMIZERS["adam"](module.parameters())
    model = poptorch.trainingModel(module, optimizer=optimizer)
    model(X)
    optimizer.param_groups[0]["lr"] = 0.1
    module.body.requires_grad_(False)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict(module.state_dict())
    model(X)
    model.setOptimizer(OPTIMIZERS["adam"](module.parameters()))
    model(X)
    handle.remove()
    assert len(compilations) == 1


def test_random_numbers_go_on() -> None:
    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.dropout(x, 0.5))

    module = Noisy()
    module.norm.requires_grad_(False)
    model = poptorch.trainingModel(
        module, poptorch.Options().randomSeed(3), torch.optim.SGD(module.parameters(), lr=0.0)
    )
    first = model(X), model(X)
    module.norm.requires_grad_(True)
    assert model(X) not in first


# Parameters that come and go ------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
        self.mid: torch.nn.Module = torch.nn.Linear(4, 4)
        if is_tied:
            self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(self.mid(self.emb(x)), self.out.weight.t())
        y = self.extra(y) if hasattr(self, "extra") else y
        return poptorch.identity_loss((y - x).square().mean(), "none")


def untie(module: Tied) -> None:
    module.out.weight = torch.nn.Parameter(module.out.weight.detach() / 2)


def tie(module: Tied) -> None:
    module.out.weight = module.emb.weight


def add(module: Tied) -> None:
    torch.manual_seed(1)
    module.extra = torch.nn.Linear(3, 3)


def take_out(module: Tied) -> None:
    module.mid = torch.nn.Identity()


@pytest.mark.thorough(but_each=5)  # each change, with and without training, at each time
@pytest.mark.parametrize("change", [untie, tie, add, take_out])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("when", ["before", "copy", "load"])
def test_parameters_that_come_and_go(change: Callable[[Tied], None], training: bool, when: str) -> None:
    ours, theirs = Tied(change is not tie), Tied(change is not tie)
    optimizer, reference = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs))
    model = poptorch.trainingModel(ours, optimizer=optimizer) if training else poptorch.inferenceModel(ours)

    def check() -> None:
        with torch.set_grad_enabled(training):
            expected = eagerly(theirs, reference) if training else theirs(X)
        torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-6)

    if when != "before":
        check()
    change(ours), change(theirs)
    if when == "load":
        state = {name: t / 2 for name, t in theirs.state_dict().items()}
        theirs.load_state_dict(state)
        assert not any(model.load_state_dict(state))
    elif when == "copy":
        model.copyWeightsToDevice()
    check(), check()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_wrapper_for_inference_follows_a_model_that_grows() -> None:
    ours, theirs = Tied(True), Tied(True)
    optimizer, reference = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    model, other = poptorch.trainingModel(ours, optimizer=optimizer), poptorch.inferenceModel(ours)
    model(X), other(X), eagerly(theirs, reference)
    for net, stepper in ((ours, optimizer), (theirs, reference)):
        add(net)
        stepper.add_param_group({"params": net.extra.parameters()})
    model.copyWeightsToDevice()
    model(X), eagerly(theirs, reference)
    torch.testing.assert_close(other(X), theirs(X).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


def test_what_is_new_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module = Tied(True)
    model = poptorch.inferenceModel(module)
    model(X)
    add(module)
    model(X), model(X)
    (record,) = caplog.records
    assert "The module has another extra than when the device took its numbers" in record.message
