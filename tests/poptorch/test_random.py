"""Random numbers of whole models: which are the same, and which are not."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

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


def test_a_seed_set_in_a_model_gives_the_same_numbers_in_each_run() -> None:
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = torch.rand(64)
        torch.manual_seed(2**40 + 5)
        first, state = torch.rand(64), torch.get_rng_state()
        second = torch.rand(64)
        torch.set_rng_state(state)
        again = torch.rand(64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            other = torch.rand(64)
        return before, first, second, other, again, torch.rand(64)

    one, two = _drawn(draw, seed=3, times=2)
    (elsewhere,) = _drawn(draw, seed=4)
    host = torch.get_rng_state()  # `randomSeed` sets it, and `forward` does not
    torch.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(one[0], two[0])
    for i in range(1, 6):
        assert torch.equal(one[i], two[i]) and torch.equal(one[i], elsewhere[i])
    assert torch.equal(one[2], one[4])
    *different, _, last = one
    assert len({tuple(t.tolist()) for t in (*different, last)}) == 5


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: (torch.set_rng_state(torch.zeros(5056, dtype=torch.uint8)), x)[1], "only a state can be set that"),
        (lambda x: poptorch.for_loop(2, lambda x: (torch.manual_seed(1), x)[1], [x])[0], "seeded in a body of a loop"),
    ],
)
def test_seeds_that_the_device_cannot_have(draw: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(poptorch.Error, match=message):
        _drawn(draw, seed=1)


def test_draws_of_python_and_numpy_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(draw: Callable[[torch.Tensor], Any]) -> list[str]:
        caplog.clear()
        model = Drawing(draw)
        for _ in range(2):  # once for each module
            poptorch.inferenceModel(model)(X)
        return [record.message.partition(". ")[0] for record in caplog.records]

    assert told(lambda x: x + torch.rand(64)) == []
    assert told(lambda x: x + random.random()) == ["`forward` draws random numbers of `random`"]
    assert told(lambda x: x + float(np.random.rand())) == ["`forward` draws random numbers of `numpy.random`"]


def test_a_generator_of_ones_own_draws_what_it_draws_on_the_host() -> None:
    """One from outside goes on from run to run; one that `forward` makes begins anew."""

    def draw(x: torch.Tensor, outer: Any) -> list[Any]:
        drawn = [x + torch.rand(64, generator=outer), torch.randperm(5, generator=outer)]
        drawn += [torch.bernoulli(x + 0.5, generator=outer), x.clone().normal_(generator=outer)]
        own = torch.Generator().manual_seed(7)
        assert isinstance(own, torch.Generator) and isinstance(outer, torch.Generator)
        drawn += [torch.rand(2, generator=own), torch.bernoulli(x + 0.5, generator=own)]
        own.manual_seed(8)
        return [*drawn, torch.empty(3).normal_(generator=own)]

    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    runs = _drawn(lambda x: draw(x, one), seed=1, times=2)
    for run in runs:
        for ours, expected in zip(run, draw(X, other), strict=True):
            torch.testing.assert_close(ours, expected, check_dtype=False)
    assert not torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][4], runs[1][4])


def test_distributions_do_not_look_at_numbers_and_look_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    # `torch.compile` switches it off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    (sample,) = _drawn(lambda x: torch.distributions.Normal(x, 1 + x).sample(), seed=1)
    assert sample.std() > 0.5
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, torch.tensor(-1.0))


def test_integers_have_32_bits() -> None:
    with pytest.raises(
        poptorch.Error, match=r"integers from 0 to 4294967296 are asked for; those of the device have 32"
    ):
        _drawn(lambda x: torch.randint(2**32, (3,)), seed=1)
