"""The command that tries models of others: what it says of one, and that it goes on where it was stopped."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)
from tests.poptorch import zoo  # noqa: E402  (it needs torch)
from tests.poptorch.zoo import Found, Model  # noqa: E402


def layer(name: str, forward: Any = None) -> Model:
    def make() -> Any:
        module, inputs = torch.nn.Linear(3, 2), {"input": torch.ones(4, 3)}
        if forward is not None:
            module.forward = forward
        return module, inputs, inputs

    return Model("ours", name, make)


def test_a_model_that_is_as_eager_and_one_that_is_not() -> None:
    *before, found = zoo.tried(layer("linear"))
    assert [each.inference for each in before] == ["Eager fails here, too.", "It took too long.", ""]
    assert (found.inference, found.training, found.millions) == ("", "", 0.0) and found.difference < 1e-5
    *_, found = islice(zoo.tried(layer("new numbers", lambda input: input + torch.rand(4, 3))), 3)
    assert found.inference.startswith("The numbers differ by")


class Unsteady(torch.nn.Module):
    """A small change of its weights shows. On the device the first of them are `steps` of float32 larger."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64,), 0.3))
        self.register_buffer("before", torch.full((64,), 0.3))
        self.register_buffer("more", torch.where(torch.arange(64) < 16, steps * 2.0**-25, 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.more * poptorch.isRunningOnIpu()
        return x + (weight - self.before).detach().abs() * 1e7 + 0 * self.weight


@pytest.mark.parametrize(("steps", "is_rounding"), [(1, True), (10, False)])
def test_losses_that_rounding_decides_on(steps: int, is_rounding: bool) -> None:
    inputs = {"x": torch.ones(1)}
    *_, found = zoo.tried(Model("ours", "unsteady", lambda: (Unsteady(steps), inputs, inputs)))
    assert 0.2 < found.rounding < 0.4
    assert found.training == "" if is_rounding else found.training.startswith("The losses differ by")
    assert f"(± {found.rounding:.0e})" in zoo.page([found]) or not is_rounding


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def try_it(model: Model, is_short: bool, write: Any) -> None:
        tried.append(model.name)
        if len(tried) == 2:
            raise KeyboardInterrupt
        reason = "Error: a | b" if model.name == "a" else ""
        write(Found("ours", model.name, 1.5, "", reason, 0.0, 3.2, 4.0, is_short=is_short))

    monkeypatch.setattr(zoo, "KEPT", tmp_path / "models.jsonl")
    monkeypatch.setattr(zoo, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(zoo, "PACKAGES", {"ours": lambda: iter(map(layer, "abc"))})
    monkeypatch.setattr(zoo, "_in_a_process", try_it)
    with pytest.raises(KeyboardInterrupt):
        zoo.main([])
    zoo.main([])
    assert tried == ["a", "b", "b", "c"]
    page = (tmp_path / "models.md").read_text()
    assert "| `ours` | 3 | 3 | 2 |" in page and "| `a` | 1.5 | 3 | Error: a \\| b |" in page
    zoo.main(["--again", "--short", "a"])
    assert tried[4:] == ["a"] and "| `a`, short | 1.5 |" in (tmp_path / "models.md").read_text()


def test_of_equal_layers_in_a_row_one_is_kept() -> None:
    linear, parts = torch.nn.Linear, torch.nn.Sequential
    same = parts(linear(3, 3), torch.nn.ReLU(), linear(3, 3), torch.nn.ReLU(), linear(3, 4), linear(4, 4), linear(4, 4))
    module = parts(same, torch.nn.ModuleList([linear(3, 3), linear(3, 3)]), parts(parts(linear(3, 3)), linear(3, 3)))
    zoo.shorten(module)
    assert [getattr(layer, "out_features", 0) for layer in same] == [3, 0, 4, 4]
    assert same(torch.ones(2, 3)).shape == (2, 4)
    assert list(map(len, module)) == [4, 2, 2]
    recurrent = parts(torch.nn.LSTM(3, 3), torch.nn.LSTM(3, 3))  # with lists of tensors
    zoo.shorten(recurrent)
    assert len(recurrent) == 1


def test_the_page_is_made_of_what_was_found() -> None:
    assert zoo.PAGE.read_text(encoding="utf-8") == zoo.page(list(zoo.kept().values()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("transformers", "LlamaForCausalLM"),  # with a cache among its results
        ("transformers", "BartForConditionalGeneration"),
        ("transformers", "MixtralForCausalLM"),  # grouped_mm
        ("transformers", "OlmoeForCausalLM"),
        ("timm", "resnet18"),
        ("torchvision", "mobilenet_v3_small"),
    ],
)
def test_models_of_others(package: str, name: str) -> None:
    pytest.importorskip(package)
    model = next(model for model in zoo.PACKAGES[package]() if model.name == name)
    *_, found = zoo.tried(model)
    assert (found.inference, found.training) == ("", "")
