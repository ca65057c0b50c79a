"""Numbers of a module that `forward` changes: where it can be done surely, they are carried, as PyTorch does."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch

ROWS = 2
"""In a micro-batch."""


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.beta *= 0.9
        return self.beta * x


class Annealed(torch.nn.Module):
    """It anneals its loss by two numbers: one is a float of a module within, the other an integer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.inner, self.step = torch.nn.Linear(3, 2), Inner(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.step
        self.step += 1
        loss = (self.inner(self.layer(x)) ** 2).mean() * (1 - 0.5**self.step) + before / 10
        return poptorch.identity_loss(loss, "none")


class Changing(torch.nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change, self.step, self.rate, self.last, self.seen = change, 0, 1.0, 0, list[Any]()

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self, x)


def eager(module: torch.nn.Module, rows: torch.Tensor, accumulation: int = 1, trains: bool = True) -> torch.Tensor:
    """The losses of the micro-batches of these rows, in PyTorch."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for batch in rows.split(ROWS * accumulation):
        optimizer.zero_grad()
        for micro_batch in batch.split(ROWS):
            losses.append(module(micro_batch))
            (losses[-1] / accumulation).backward()
        if trains:
            optimizer.step()
    return torch.stack(losses).detach()


def wrapped(module: torch.nn.Module, iterations: int = 1, accumulation: int = 1, trains: bool = True) -> Any:
    options = poptorch.Options().deviceIterations(iterations).outputMode(poptorch.OutputMode.All)
    if not trains:
        return poptorch.inferenceModel(module, options)
    options.Training.gradientAccumulation(accumulation)
    return poptorch.trainingModel(module, options, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("iterations", "accumulation", "trains"), [(1, 1, True), (2, 1, True), (1, 2, True), (2, 1, False)]
)
def test_a_loss_is_annealed_over_calls_and_micro_batches(
    iterations: int, accumulation: int, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = Annealed()
    expected = copy.deepcopy(module)
    model = wrapped(module, iterations, accumulation, trains)
    for _ in range(5):
        x = torch.rand(ROWS * iterations * accumulation, 3)
        torch.testing.assert_close(model(x).reshape(-1), eager(expected, x, accumulation, trains))
    assert (module.step, module.inner.beta) == (0, 1.0) and not caplog.text
    model.destroy()
    assert type(module.step) is int and module.step == expected.step
    assert type(module.inner.beta) is float and module.inner.beta == pytest.approx(expected.inner.beta)
    x = torch.rand(ROWS * iterations * accumulation, 3)
    torch.testing.assert_close(model(x).reshape(-1), eager(expected, x, accumulation, trains))


def _alias(self: Any, x: torch.Tensor) -> torch.Tensor:
    before, y = self.step, x.clone()
    self.step += 1
    whole = y
    y *= self.step
    y[0] += before
    return whole - self.step // 2 + (self.step - x) - 1 / (self.step + x)


def _derived(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.rate = 0.5**self.step  # 1.0, as before, in the first call
    self.step += 1
    return x * self.rate


def _reset(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = 0
    self.last += 1
    self.step += 1
    return x * self.step + self.last


def _dtypes(self: Any, x: torch.Tensor) -> Any:
    self.step += 1
    self.rate *= 0.5
    whole = (x * 10).int()
    return x.half() * self.rate, x.bfloat16() * self.step, whole * self.step, whole * self.rate, whole / self.step


def _cyclic(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last, self.step = self.step, (self.step + 1) % 3
    return x * self.step + self.last


def _arithmetic(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    self.rate -= 0.1
    numbers = 1 / (1 + self.step), -self.rate, -self.step % 3, abs(-self.step) // 2, self.rate**2, self.step**0.5
    return x * sum(numbers) + 2.0**-self.step * self.rate


@pytest.mark.parametrize("change", [_alias, _derived, _reset, _dtypes, _cyclic, _arithmetic])
def test_numbers_are_those_of_python(change: Callable[..., Any]) -> None:
    module, x = Changing(change), torch.rand(2, 3)
    expected, model = copy.deepcopy(module), poptorch.inferenceModel(module)
    for _ in range(4):
        torch.testing.assert_close(model(x), expected(x))
    model.destroy()
    assert module.step == expected.step and module.rate == pytest.approx(expected.rate)


def _branch(step: int, x: torch.Tensor) -> torch.Tensor:
    return x if step % 2 else x * 2


_LOOKS: list[Callable[[Any, torch.Tensor], Any]] = [
    _branch,
    lambda step, x: x * int(step),
    lambda step, x: x * math.exp(step),
    lambda step, x: sum(x for _ in range(step)),
    lambda step, x: x * {0: 3, 1: 2.0}.get(step, 5),
    lambda step, x: x * (step if isinstance(step, int) else 100),
    lambda step, x: x * min(1.0, step / 10),
    lambda step, x: x[:, step % 3],
    lambda step, x: x + torch.full((3,), step),
    lambda step, x: x * len(f"{step:>{9}}"),
    lambda step, x: (x, step),
    lambda step, x: x.clamp(max=step / 4),
]


@pytest.mark.parametrize("look", _LOOKS)
def test_a_number_that_is_looked_at_is_told(
    look: Callable[[Any, torch.Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def change(self: Any, x: torch.Tensor) -> Any:
        self.step += 1
        return look(self.step, x)

    module, x = Changing(change), torch.rand(2, 3)
    model, first = poptorch.inferenceModel(module), copy.deepcopy(module)(x)
    for _ in range(2):
        torch.testing.assert_close(model(x), first)
    model.destroy()
    assert module.step == 0
    assert caplog.text.count("`forward` changes model.step (test_counters.py:") == 1


def _twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step = self.step * 2 + 1
    return x * self.step


def _set(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * self.step
    self.step = 1
    return y


def _large(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step = (self.step + 5) % 2**40
    return x * self.step


def _rounded(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.rate -= 0.1
    self.step += 1
    return x * (self.rate // 0.3 + self.step)


def _in_blocks(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    with poptorch.Block(ipu_id=0):
        return x * self.step


def _held(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    self.seen.append(self.step)
    return x * self.step


@pytest.mark.parametrize("change", [_twice, _set, _large, _rounded, _in_blocks, _held])
def test_what_cannot_be_carried_surely_is_told(
    change: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    module, x = Changing(change), torch.rand(2, 3)
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(x), model(x))
    assert "model.step (test_counters.py:" in caplog.text and module.seen == []


def test_smaller_batches_count_too() -> None:
    module = Annealed()
    expected = copy.deepcopy(module)
    model = wrapped(module, iterations=2)
    for rows in (4, 2, 4, 2):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(model(x).reshape(-1), eager(expected, x))
    model.destroy()
    assert module.step == expected.step == 6


def test_a_model_that_is_compiled_again_goes_on() -> None:
    module = Annealed()
    module.layer.bias.requires_grad_(False)
    expected = copy.deepcopy(module)
    model = wrapped(module)
    for _ in range(2):
        x = torch.rand(ROWS, 3)
        torch.testing.assert_close(model(x).reshape(-1), eager(expected, x))
        module.layer.bias.requires_grad_(True)
        expected.layer.bias.requires_grad_(True)
    model.detachFromDevice()
    torch.testing.assert_close(model(x).reshape(-1), eager(expected, x))


def test_what_the_user_sets_counts_once_it_is_compiled_again() -> None:
    module = Annealed()
    model, x = wrapped(module), torch.rand(ROWS, 3)
    model(x)
    model.step = 10
    model.destroy()
    expected = copy.deepcopy(module)
    assert module.step == 10 and module.inner.beta == pytest.approx(0.9)
    torch.testing.assert_close(model(x).reshape(-1), eager(expected, x))


def test_saved_models_go_on_and_executables_begin_with_the_module(tmp_path: Path) -> None:
    module = Annealed()
    expected, fresh = copy.deepcopy(module), copy.deepcopy(module)
    model, x = wrapped(module), torch.rand(ROWS, 3)
    for _ in range(2):
        model(x)
        eager(expected, x)
    model.save(tmp_path / "model.poptorch")
    torch.testing.assert_close(poptorch.load(tmp_path / "model.poptorch")(x).reshape(-1), eager(expected, x))
    other = wrapped(fresh)
    plain = copy.deepcopy(fresh)
    other.loadExecutable(tmp_path / "model.poptorch")
    for _ in range(2):
        torch.testing.assert_close(other(x).reshape(-1), eager(plain, x))
    other.destroy()
    assert fresh.step == 2
