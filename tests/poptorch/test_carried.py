"""Texts, ids and other values beside tensors: they may be others in each call where a model only hands them on."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import poptorch

X = torch.arange(6.0).reshape(3, 2)


@dataclass
class Sample:
    x: torch.Tensor
    text: Any
    number: int = 0


class Pair(NamedTuple):
    x: torch.Tensor
    text: Any


class Plain:
    def __init__(self, x: torch.Tensor, text: Any) -> None:
        self.x, self.text = x, text


class Registered(Plain):
    """A type that users register."""


class Parser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct: Registered) -> Iterator[torch.Tensor]:
        yield struct.x

    def reconstruct(self, original_structure: Registered, tensor_iterator: Iterator[torch.Tensor]) -> Registered:
        return Registered(next(tensor_iterator), original_structure.text)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    poptorch.registerCustomArgParser(Registered, Parser())
    yield
    poptorch.registerCustomArgParser(Registered, None)


def seen(value: Any) -> Any:
    """What can be compared of a value."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [seen(each) for each in value]
    if isinstance(value, dict):
        return {key: seen(each) for key, each in value.items()}
    return seen(vars(value)) if hasattr(value, "__dict__") else value


def check(model: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    wrapper = poptorch.inferenceModel(model)
    for args in calls:
        assert seen(wrapper(*copy.deepcopy(args))) == seen(model(*copy.deepcopy(args)))


CARRIED: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "dictionary": (
        lambda batch: {**batch, "y": batch["x"] * 2},
        [({"x": X, "text": t, "id": i, "of": {"text": [t]}},) for i, t in enumerate("ab")],
    ),
    "list": (lambda batch: (batch["x"] + 1, batch["texts"]), [({"x": X, "texts": list(t)},) for t in ("ab", "cde")]),
    "ignored": (lambda batch: batch["x"] * 2, [({"x": X, "text": t},) for t in "ab"]),
    "asked for its class": (
        lambda batch: {key: v * 2 if isinstance(v, torch.Tensor) else v for key, v in batch.items()},
        [({"x": X, "text": t, "ids": [i, 2]},) for i, t in enumerate("ab")],
    ),
    "dataclass": (lambda s: Sample(s.x * 2, s.text, s.number), [(Sample(X, t, i),) for i, t in enumerate("ab")]),
    "named tuple": (lambda pair: Pair(pair.x * 2, pair.text), [(Pair(X, t),) for t in "ab"]),
    "object": (lambda plain: (plain.x * 2, plain.text), [(Plain(X, t),) for t in "ab"]),
    "registered": (lambda r: (Registered(r.x * 2, r.text), r.text), [(Registered(X, t),) for t in ("a", "b", "a")]),
    "the same": (lambda registered: registered, [(Registered(X, t),) for t in "ab"]),
    "argument": (lambda x, text, texts: (x * 2, text, texts), [(X, t, [t, "c"]) for t in "ab"]),
    "beside one that is looked at": (
        lambda batch: (batch["x"] * batch["n"], batch["text"]),
        [({"x": X, "n": 2, "text": t},) for t in "ab"],
    ),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_what_is_handed_on_is_that_of_each_call(kind: str) -> None:
    model, calls = CARRIED[kind]
    check(model, *calls)


def test_training_hands_on_too() -> None:
    class Fit(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 1)

        def forward(self, batch: dict[str, Any]) -> Any:
            return batch["name"], torch.nn.functional.mse_loss(self.fc(batch["x"]), batch["x"][:, :1])

    module = Fit()
    model = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.01))
    results = [model({"x": X, "name": name}) for name in "abc"]
    assert [name for name, _ in results] == list("abc") and results[2][1] < results[0][1]


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        (lambda batch: batch["x"] * (2 if batch["k"] == "a" else 3), "a", "b"),
        (lambda batch: batch["x"] * batch["k"], 2, 3),
        (lambda batch: batch["x"][: batch["k"]], 2, 1),
        (lambda batch: batch["x"] + torch.full((2,), batch["k"]), 2, 3),
        (lambda batch: batch["x"] * (2 if type(batch["k"]) is int else 3), 2, 3),
        (lambda batch: (batch["x"] * 2, f"{batch['k']}!"), "a", "b"),
        (lambda batch: batch["x"] * {"a": 1, "b": 2}[batch["k"]], "a", "b"),
        (lambda batch: sum(batch["x"] * k for k in batch["k"]), [1, 2, 3, 4], [1, 2, 3, 5]),
    ],
)
def test_what_a_model_looks_at_is_a_part_of_the_program(model: Callable[..., Any], first: Any, then: Any) -> None:
    wrapper = poptorch.inferenceModel(model)
    for _ in range(2):
        assert seen(wrapper({"x": X, "k": first})) == seen(model({"x": X, "k": first}))
    with pytest.raises(poptorch.Error, match=r"mismatch for batch\['k'\]"):
        wrapper({"x": X, "k": then})


def test_other_classes_are_refused() -> None:
    wrapper = poptorch.inferenceModel(lambda batch, number: (batch["x"] * 2, batch["text"], number))
    wrapper({"x": X, "text": "a"}, 5)
    assert wrapper({"x": X, "text": "a"}, 3)[2] == 3
    with pytest.raises(poptorch.Error, match=r"Type mismatch for batch\['text'\]: expected <class 'str'>"):
        wrapper({"x": X, "text": 1}, 5)


def test_what_is_looked_at_in_a_registered_type_is_told(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = poptorch.inferenceModel(lambda registered: registered.x * len(registered.text))
    for text in ("a", "bb", "bb"):
        torch.testing.assert_close(wrapper(Registered(X, text)), X)
    assert caplog.text.count("`registered.text` is 'bb', and was 'a' when the model was compiled.") == 1


def test_an_error_of_forward_is_its_own() -> None:
    def forward(batch: dict[str, Any]) -> torch.Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        poptorch.inferenceModel(forward)({"x": X, "text": "a"})


def test_saved_models_have_the_first(tmp_path: Path) -> None:
    model = poptorch.inferenceModel(lambda batch: (batch["x"] * 2, batch["text"]))
    model.compileAndExport(tmp_path / "model.poptorch", {"x": X, "text": "a"})
    doubled, text = poptorch.load(tmp_path / "model.poptorch")({"x": X, "text": "a"})
    assert doubled.tolist() == (2 * X).tolist() and text == "a"
