"""Random numbers of whole models: which are the same, and which are not."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch

X = torch.zeros(64)


class Drawing(torch.nn.Module):
    """A model that draws numbers."""

    def __init__(self, draw: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._draw = draw

    def forward(self, x: torch.Tensor) -> Any:
        return self._draw(x)


def _drawn(draw: Callable[[torch.Tensor], Any], seed: int, times: int = 1) -> list[Any]:
    options = poptorch.Options().randomSeed(seed)
    model = poptorch.inferenceModel(Drawing(draw), options)
    results = [model(X) for _ in range(times)]
    model.destroy()
    return results


def _noise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + torch.rand(64), torch.rand_like(x), torch.randperm(64)


def test_a_seed_gives_the_same_numbers_in_each_run_of_a_program() -> None:
    first, second = _drawn(_noise, seed=3, times=2)
    again, _ = _drawn(_noise, seed=3, times=2)
    (others,) = _drawn(_noise, seed=4)
    for mine, same, next_run, other in zip(first, again, second, others, strict=True):
        assert torch.equal(mine, same)
        assert not torch.equal(mine, next_run)
        assert not torch.equal(mine, other)


def test_ops_draw_numbers_of_their_own() -> None:
    ((a, b, _),) = _drawn(_noise, seed=3)
    assert not torch.equal(a, b)


def test_a_seed_set_in_a_model_has_no_effect() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.rand(64)

    first, second = _drawn(draw, seed=3, times=2)
    assert not torch.equal(first, second)


def test_distributions_do_not_look_at_numbers_and_look_again_afterwards() -> None:
    (sample,) = _drawn(lambda x: torch.distributions.Normal(x, 1 + x).sample(), seed=1)
    assert sample.std() > 0.5
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, torch.tensor(-1.0))


def test_integers_have_32_bits() -> None:
    with pytest.raises(
        poptorch.Error, match=r"integers from 0 to 4294967296 are asked for; those of the device have 32"
    ):
        _drawn(lambda x: torch.randint(2**32, (3,)), seed=1)
