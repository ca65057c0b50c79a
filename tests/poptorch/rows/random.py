"""Random numbers: not those of PyTorch, but distributed as these are."""

from __future__ import annotations

import torch
from torch import distributions
from torch.nn import functional as F

from tests.poptorch.operators import Row, positive, whole

_MANY = torch.full((50, 80), 0.5)


def similar(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Mean, spread and range differ by no more than a tenth of the spread, or of the range."""
    mine, expected = mine.double(), expected.double()
    spread, reach = expected.std(), expected.max() - expected.min()
    assert (mine.mean() - expected.mean()).abs() <= 0.1 * spread + 1e-6
    assert (mine.std() - spread).abs() <= 0.1 * spread + 1e-6
    for mine_end, end in ((mine.min(), expected.min()), (mine.max(), expected.max())):
        assert (mine_end - end).abs() <= 0.1 * reach + 1e-6 or reach > 4 * spread  # a range without ends


def _permuted(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert sorted(mine.tolist()) == sorted(expected.tolist())
    assert mine.tolist() != sorted(mine.tolist())


def _seldom_twice(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Samples without repetition."""
    assert all(len(set(row)) == len(row) for row in mine.tolist())
    similar(mine, expected)


def _kept_together(x: torch.Tensor) -> torch.Tensor:
    """Whether what `dropout2d` drops are channels: of each the spread, which is 0, and the mean."""
    y = F.dropout2d(x.reshape(50, 20, 2, 2), 0.25).flatten(2)
    return torch.stack([y.amax(-1) - y.amin(-1), y.mean(-1)])


def _sampled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rate = x.clamp(min=0.1)
    return (
        distributions.Normal(x, rate).sample(),
        distributions.Uniform(x, x + 2).sample(),
        distributions.Bernoulli(probs=x).sample(),
        distributions.Exponential(rate).sample(),
        distributions.Categorical(logits=torch.zeros(4)).sample((2000,)),
    )


def _differentiable(x: torch.Tensor) -> torch.Tensor:
    """How a sample depends on what it was drawn with, in two of the ways that this is done."""
    return distributions.Normal(x, 2 * x).rsample() + distributions.Uniform(-x, x).rsample()


ROWS = [
    Row(
        "rand",
        lambda x: (torch.rand(40, 50), torch.rand(2000, dtype=x.dtype), torch.rand_like(x)),
        (_MANY,),
        like=similar,
    ),
    Row("randn", lambda x: (torch.randn(40, 50), torch.randn_like(x)), (_MANY,), like=similar),
    Row("uniform_", lambda x: (torch.empty(4000).uniform_(-1, 3), x.clone().uniform_()), (_MANY,), like=similar),
    Row(
        "normal",
        lambda x: (
            torch.normal(2.0, 0.5, (50, 40)),
            torch.normal(x, 2.0),
            torch.normal(1.0, x),
            torch.normal(x, x),
            x.clone().normal_(3, 2),
        ),
        (_MANY,),
        like=similar,
    ),
    Row(
        "bernoulli",
        lambda x: (
            torch.bernoulli(x),
            x.bernoulli(0.2),
            x.clone().bernoulli_(0.7),
            x.clone().bernoulli_(),
            torch.zeros(4000).bernoulli_(torch.tensor(0.3)),
        ),
        (_MANY,),
        like=similar,
        gradient=False,
    ),
    Row("bernoulli, 0 and 1", torch.bernoulli, (torch.tensor([0.0, 1, 0, 1]),)),
    Row("exponential_", lambda x: x.clone().exponential_(2), (_MANY,), like=similar),
    Row("cauchy_", lambda x: x.clone().cauchy_(1, 2).atan(), (_MANY,), like=similar),
    Row("log_normal_", lambda x: x.clone().log_normal_(0.5, 0.25), (_MANY,), like=similar),
    Row("geometric_", lambda x: x.clone().geometric_(0.3), (_MANY,), like=similar),
    Row("poisson", lambda x: torch.poisson(x * 6), (_MANY,), like=similar, half=False),
    Row("binomial", lambda x: torch.binomial(x * 20, x), (_MANY,), like=similar, half=False, gradient=False),
    Row(
        "randint",
        lambda x: (
            torch.randint(5, (2000,)),
            torch.randint(-3, 9, (2000,)),
            torch.randint_like(x, 7),
            torch.randint(4, (2000,), dtype=torch.uint8),
        ),
        (_MANY,),
        like=similar,
    ),
    Row(
        "random_",
        lambda x, n: (x.clone().random_(10), n.clone().random_(2, 8), n.bool().random_(), n.char().random_()),
        (_MANY, whole(3000)),
        like=similar,
    ),
    Row("randperm", lambda x: torch.randperm(20), (_MANY,), like=_permuted),
    Row(
        "multinomial",
        lambda x: torch.multinomial(x[:3, :8], 2000, replacement=True),
        (_MANY,),
        like=similar,
        half=False,
    ),
    Row(
        "multinomial without repetition",
        lambda x: torch.multinomial(x[:, :5].expand(-1, 5).repeat(20, 1), 3),
        (_MANY,),
        like=_seldom_twice,
        half=False,
    ),
    Row(
        "multinomial, weights of 0",
        lambda x: torch.multinomial(x, 2),
        (torch.tensor([[0.0, 0, 1, 2], [1, 0, 0, 1]]),),
        like=_seldom_twice,
        half=False,
    ),
    Row("dropout", lambda x: F.dropout(x, 0.25), (_MANY,), like=similar),
    Row("dropout, not training", lambda x: (F.dropout(x, 0.25, training=False), F.dropout(x, 0.0)), (positive(2, 3),)),
    Row("dropout of all", lambda x: F.dropout(x, 1.0), (positive(2, 3),)),
    Row("dropout in place", lambda x: (F.dropout(x, 0.5, inplace=True), x), (_MANY,), like=similar),
    Row("torch.dropout", lambda x: torch.dropout(x, 0.25, True), (_MANY,), like=similar),
    Row("dropout of channels", _kept_together, (_MANY,), like=similar, gradient=False),
    Row(
        "dropout1d, dropout3d",
        lambda x: (F.dropout1d(x.reshape(500, 4, 2)), F.dropout3d(x.reshape(500, 4, 1, 1, 2))),
        (_MANY,),
        like=similar,
    ),
    Row("alpha_dropout", lambda x: F.alpha_dropout(x, 0.25, training=True), (_MANY,), like=similar),
    Row(
        "feature_alpha_dropout",
        lambda x: F.feature_alpha_dropout(x.reshape(500, 4, 2), 0.25, training=True),
        (_MANY,),
        like=similar,
    ),
    Row("rrelu", lambda x: F.rrelu(-x, 0.25, 0.75, training=True), (_MANY,), like=similar, half=False),
    Row(
        "rrelu in place",
        lambda x: F.rrelu((-x).clone(), training=True, inplace=True),
        (_MANY,),
        like=similar,
        half=False,
    ),
    Row("distributions", _sampled, (_MANY,), like=similar, gradient=False, half=False),
    Row(
        "gamma, beta",
        lambda x: (distributions.Gamma(x * 4, x).rsample(), distributions.Beta(x, x).rsample()),
        (_MANY,),
        like=similar,
        half=False,
    ),
    Row("dirichlet", lambda x: distributions.Dirichlet(x.reshape(-1, 4)).rsample(), (_MANY,), like=similar, half=False),
    Row("rsample", _differentiable, (_MANY,), like=similar),
    Row("gumbel_softmax", lambda x: F.gumbel_softmax(x.reshape(-1, 4), hard=True), (_MANY,), like=similar, half=False),
]
