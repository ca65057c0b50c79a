"""Numbers of a module that `forward` changes: where it can be done surely, they are carried, as PyTorch does."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
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


F = torch.nn.functional


def _chosen(step: int, x: torch.Tensor) -> torch.Tensor:
    if step > 2:
        factor = 3.0
    else:
        factor = step / 2
    return x * factor + (1 if step % 2 else 0.25)


def _checked(step: int, x: torch.Tensor) -> torch.Tensor:
    if step < 0:
        raise ValueError("The step is negative.")
    return x * max([0.2, 1 - step / 3])


def _assigned(step: int, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0], y[1, 1] = step, 0.3 * step
    return y.masked_fill(x > 0.7, step / 7)


_CARRIED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "chosen": _chosen,
    "checked": _checked,
    "assigned": _assigned,
    "as a bool": lambda step, x: x * (step > 2) + (3 if step in (2, 4) else 1),
    "math": lambda step, x: x * math.exp(-step / 10) + math.log(step, 3) - math.floor(step / 2),
    "imported": lambda step, x: x * (0.5 * (1 + cos(pi * step / 10))),
    "built in": lambda step, x: x * min(1.0, step / 3) + int(step * 0.7) + round(step * 0.777, 1) + float(step) // 2,
    "numpy": lambda step, x: x * np.exp(-step) + float(np.minimum(1.0, step / 3)),
    "class": lambda step, x: x * (step if isinstance(step, int) and not isinstance(step, float) else 100),
    "bounds": lambda step, x: x.clamp(0.1, step / 5) + torch.clamp_min(x, step / 4),
    "where": lambda step, x: torch.where(x > 0.5, x, step * 0.1) + torch.where(x > 0.5, step, x),
    "filled": lambda step, x: x + torch.full((3,), step * 0.1) + torch.full_like(x, step),
    "tensor": lambda step, x: torch.minimum(x, torch.tensor(step * 0.1)) + torch.tensor(step),
    "powers": lambda step, x: x**step + 0.5**step * x + (1 + step) ** x,
    "compared": lambda step, x: (x * 5 > step) * torch.lerp(x, x + 1, step / 10),
    "integers": lambda step, x: ((x * 10).int() * step, (x * 10).int() / step, (x * 10).int() // step),
    "large": lambda step, x: x * (2**40 + step),
    "softmax": lambda step, x: F.softmax(x / max(0.1, 1 - step / 4), -1),
}


@pytest.mark.parametrize("kind", _CARRIED)
def test_whatever_python_computes_is_carried(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def change(self: Any, x: torch.Tensor) -> Any:
        self.step += 1
        return _CARRIED[kind](self.step, x)

    module, x = Changing(change), torch.rand(4, 3)
    expected, model = copy.deepcopy(module), wrapped(module, iterations=2, trains=False)
    for _ in range(3):
        parts = [expected(rows) for rows in x.split(ROWS)]
        whole = tuple(map(torch.cat, zip(*parts, strict=True))) if kind == "integers" else torch.cat(parts)
        torch.testing.assert_close(model(x), whole)
    model.destroy()
    assert module.step == 6 and not caplog.text


_LOOKS: list[Callable[[Any, torch.Tensor], Any]] = [
    lambda step, x: sum(x for _ in range(step)),
    lambda step, x: x * {0: 3, 1: 2.0}.get(step, 5),
    lambda step, x: x[:, step % 3],
    lambda step, x: x * (step if type(step) is int else 100),
    lambda step, x: x.sin() if step > 1 else x,
    lambda step, x: x * torch.tensor([step, 2, 3.0]),
    lambda step, x: F.leaky_relu(x - 0.5, step / 10),
    lambda step, x: (x, step),
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


def test_numbers_beside_one_that_is_looked_at_are_carried(caplog: pytest.LogCaptureFixture) -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        self.rate *= 0.5
        self.seen.append(self.step)
        return x[:, self.step % 3] * self.rate

    module, x = Changing(change), torch.rand(2, 3)
    model = poptorch.inferenceModel(module)
    for rate in (0.5, 0.25, 0.125):
        torch.testing.assert_close(model(x), x[:, 1] * rate)
    assert "`forward` changes model.step (test_counters.py:" in caplog.text and "model.rate" not in caplog.text
    assert "model.seen" in caplog.text and module.seen == []


def test_a_text_is_told_and_the_number_carried(caplog: pytest.LogCaptureFixture) -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step * len(f"step {self.step:03}, {self.rate}")

    module, x = Changing(change), torch.rand(2, 3)
    expected, model = copy.deepcopy(module), poptorch.inferenceModel(module)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected(x))
    assert caplog.text.count("`forward` makes a text of model.step (test_counters.py:") == 1
    assert "`forward` changes" not in caplog.text


def test_what_forward_raises_later_is_raised_then() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.step > 2:
            raise ValueError("That is enough.")
        return x * self.step

    model, x = poptorch.inferenceModel(Changing(change)), torch.rand(2, 3)
    for step in (1, 2):
        torch.testing.assert_close(model(x), x * step)
    with pytest.raises(poptorch.Error, match=r"ValueError in `forward`: That is enough\."):
        model(x)


def test_an_integer_beyond_the_device_is_refused() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step = (self.step + 1) * 2**16
        return (x * 10).int() * self.step

    model, x = poptorch.inferenceModel(Changing(change)), torch.rand(2, 3)
    model(x)
    with pytest.raises(poptorch.Error, match="computes the number 4295032832 .* an integer of 32 bits"):
        model(x)


def test_the_rate_of_a_dropout_is_carried() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return F.dropout(x, min(0.75, self.step / 4)), F.dropout(x, 1.0 if self.step > 1 else 1e-9)

    model, x = poptorch.inferenceModel(Changing(change)), torch.ones(40, 50)
    for rate in (0.25, 0.5, 0.75, 0.75):
        dropped, all_or_none = model(x)
        kept = dropped != 0
        assert kept.float().mean() == pytest.approx(1 - rate, abs=0.05)
        torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - rate)))
        assert all_or_none.mean() == (rate == 0.25)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_and_blocks_count_alike(replicas: int) -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        with poptorch.Block(ipu_id=0):
            y = x * self.step
        with poptorch.Block(ipu_id=1):
            return y + self.step / 4

    options = poptorch.Options().deviceIterations(2).replicationFactor(replicas)
    module, x = Changing(change), torch.rand(4 * replicas, 3)
    model = poptorch.inferenceModel(module, options)
    for step in (1, 3):
        steps = torch.tensor([step, step + 1.0]).repeat_interleave(ROWS * replicas)[:, None]
        torch.testing.assert_close(model(x), x * steps + steps / 4)
    model.destroy()
    assert module.step == 4


def _set(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * self.step
    self.step = 1
    return y


def _rounded(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.rate -= 0.1
    self.step += 1
    return x * (self.rate // 0.3 + self.step)


def _of_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step = 2 * self.step + 1
    for power in range(3):
        x = x * self.step**power + self.step
    return x


@pytest.mark.parametrize("change", [_set, _rounded, _of_layers])
def test_what_becomes_of_numbers_is_carried(change: Callable[..., torch.Tensor]) -> None:
    module, x = Changing(change), torch.rand(2, 3)
    expected, model = copy.deepcopy(module), poptorch.inferenceModel(module)
    for _ in range(6):
        torch.testing.assert_close(model(x), expected(x))


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
