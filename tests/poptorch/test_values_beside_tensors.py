"""Values beside tensors that change from call to call: they go around the program, if `forward` only hands them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch

X = torch.arange(6.0).reshape(3, 2)


@pytest.fixture
def compilations() -> Iterator[list[None]]:
    found: list[None] = []
    handle = poptorch.registerPostCompileHook(lambda: found.append(None))
    yield found
    handle.remove()


@dataclass
class Named:
    value: Any
    name: str


@dataclass
class Tag:
    name: str


@pytest.mark.parametrize(
    "forward, given",
    [
        (lambda x, u: (x * 2, u, [{"k": u}]), ["a", "b", "c"]),
        (lambda x, u: {"y": x * 2, "texts": u}, [["a", "b"], ["c", "d"], ["e"], []]),
        (lambda x, u: (x * 2, u["id"], u["of"][0]), [{"id": i, "of": [i / 2]} for i in range(3)]),
        (lambda x, u: (x * u["scale"], u["id"]), [{"scale": 2.0, "id": i} for i in range(3)]),
        (lambda x, u: Named(x * 2, u), ["a", "b"]),
        (lambda x, u: Named(u.value * 2, u.name), [Named(X, "a"), Named(X + 1, "b")]),
        (lambda x, u: (x * len(u), u), [["a", "b"], ["c", "d"]]),
        (lambda x, u: (x * 2, Tag(u)), ["a", "b"]),
        (lambda x, u: (x * 2, u), [0.5, 1.5]),
        (lambda x, u: x * 2, [{"id": i} for i in range(3)]),
    ],
)
def test_what_is_handed_on(forward: Callable[..., Any], given: list[Any], compilations: list[None]) -> None:
    model = poptorch.inferenceModel(forward)
    for number, each in enumerate(given):
        assert _plain(model(X + number, each)) == _plain(forward(X + number, each))
    assert len(compilations) == 1


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return _plain(vars(value)) if isinstance(value, Named | Tag) else value


class Graph:
    def __init__(self, x: torch.Tensor, name: str) -> None:
        self.x, self.name = x, name


def test_objects_keep_theirs() -> None:
    def forward(graph: Graph) -> Graph:
        graph.y, graph.tag = graph.x * 2, graph.name
        return graph

    model = poptorch.inferenceModel(forward)
    for name in ("a", "b", "c"):
        given = Graph(X, name)
        result = model(given)
        assert result is given and (result.name, result.tag, result.y.tolist()) == (name, name, (X * 2).tolist())


def caught(x: torch.Tensor, u: str) -> torch.Tensor:
    try:
        return x * float(u)
    except Exception:
        return x


@pytest.mark.parametrize(
    "forward, first, second",
    [
        (lambda x, u: x + u, 1, 2),
        (lambda x, u: x if u == "a" else x + 1, "a", "b"),
        (lambda x, u: x + 1 if u in ("a", "c") else x + 2, "a", "b"),
        (lambda x, u: sum(x[i] for i in range(u)), 1, 2),
        (lambda x, u: x * len(u), ["a"], ["b", "c"]),
        (lambda x, u: x + int("".join(u)), ["1"], ["2"]),
        (lambda x, u: x * 2 if isinstance(u, str) else x * 3, "a", 3),
        (lambda x, u: x.reshape(u), (3, 2), (2, 3)),
        (lambda x, u: {u: x * 2}, "a", "b"),
        (lambda x, u: (x * 2, f"{u}!"), "a", "b"),
        (lambda x, u: x * 2 if u else x * 3, True, False),
        (lambda x, u: x * 2 if u is None else x * 3, None, "a"),
        (caught, "1", "2"),
    ],
)
def test_what_the_model_looks_at_is_a_part_of_the_program(forward: Any, first: Any, second: Any) -> None:
    model = poptorch.inferenceModel(forward)
    expected = _plain(forward(X, first))
    assert _plain(model(X, first)) == expected
    with pytest.raises(poptorch.Error, match="mismatch for u"):
        model(X, second)
    assert _plain(model(X, first)) == expected


class Trained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
        return poptorch.identity_loss(self.layer(x).square().mean(), "none"), ids


def test_training_with_ids_and_a_smaller_batch(compilations: list[None]) -> None:
    ours, theirs = Trained(), Trained()
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (ours, theirs))
    model = poptorch.trainingModel(ours, optimizer=optimizer)
    for epoch in range(4):
        for begin, rows in ((0, 2), (1, 1)):
            reference.zero_grad()
            loss, _ = theirs(X[begin : begin + rows], [])
            loss.backward()
            reference.step()
            found, ids = model(X[begin : begin + rows], [epoch] * rows)
            torch.testing.assert_close(found, loss.detach())
            assert ids == [epoch] * rows
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert len(compilations) == 3  # once more for the smaller batch, whose ids were not known to change then
