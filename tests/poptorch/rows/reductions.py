"""Ops that make one number of several, and running ones."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, positive, whole

_x = normal(3, 4, 5)
_small = normal(2, 3)
_ties = torch.tensor([[2.0, 1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 3.0, 1.0, 3.0]])
_nan = torch.tensor([[2.0, torch.nan, 0.0, 1.0], [3.0, 1.0, 5.0, 2.0]])
_zeros = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
_ORDERS = (2, 1, 3, 0.5, 0, math.inf, -math.inf)
_points = torch.cat([normal(3, 2), normal(3, 2)[:1]])  # the first one is there twice


def _into_given(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, places, sums, joined = torch.empty(3), torch.empty(3, dtype=torch.int64), torch.empty(4), torch.empty(6, 4)
    torch.max(x, 1, out=(values, places))
    torch.sum(x, 0, out=sums)
    torch.cat([x, x], out=joined)
    return values, places, sums, joined


def _of_one_number(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with warnings.catch_warnings(action="ignore"):  # PyTorch says that there are too few
        return x[:1].var(0), x[:1].std()


def _forms(name: str) -> Row:
    """A reduction over no dimensions, one, and several."""

    def function(x: torch.Tensor) -> Any:
        f = getattr(torch, name)
        of_a_number = () if name in ("std", "var") else (f(x[0, 0, 0]), f(x[0, 0, 0], 0))
        return f(x), f(x, 0), f(x, (1, -1)), f(x, dim=(0, 2), keepdim=True), of_a_number

    return Row(name, function, (_x,))


ROWS = [
    *(_forms(name) for name in ("sum", "mean", "amax", "amin", "std", "var", "nansum", "nanmean")),
    *(
        Row(
            f"{name} of integers",
            lambda x, f: (f(x), f(x, 1), f(x > 4)),
            (whole(2, 3), getattr(torch, name)),
            half=False,
        )
        for name in ("sum", "prod")
    ),
    Row(
        "sum, mean, another dtype",
        lambda x: (x.sum(dtype=torch.float16), x.mean(0, dtype=torch.float32), x.int().sum(0, dtype=torch.float32)),
        (_x,),
        half_tolerance=1e-2,
    ),
    Row("sum of many", lambda x: (x.sum(), x.mean(), x.expand(300, 300).sum(0)), (torch.full((300,), 0.1),)),
    Row("sum_to_size, sum of nothing", lambda x: (x.sum_to_size(4, 1), x[:, :0].sum(1), x.sum(())), (_x,)),
    Row("prod", lambda x: (x.prod(), x.prod(0), x.prod(-1, keepdim=True), x[0, 0].prod()), (_x,)),
    Row("prod with zeros", lambda x: (x.prod(0), x.prod(1), x[1].prod()), (_zeros,)),
    Row(
        "max, min", lambda x: (x.max(), x.min(), x.max(0), x.min(-1), x.max(1, keepdim=True), x[0, 0, 0].max(0)), (_x,)
    ),
    Row("max, min with ties", lambda x: (x.max(), x.min(), x.max(0), x.min(1), x.amax(1), x.amin()), (_ties,)),
    Row("max, min with NaN", lambda x: (x.max(1), x.min(0), x.amax(1), x.argmax(1), x.max()), (_nan,), gradient=False),
    Row(
        "max, min of integers",
        lambda x: (x.max(), x.min(1), x.amax(0), x.argmin(), (x > 4).max(1)),
        (whole(2, 3),),
        half=False,
    ),
    Row(
        "argmax, argmin",
        lambda x: (x.argmax(), x.argmin(1), x.argmax(-1, keepdim=True), x.argmin(keepdim=True)),
        (_ties,),
    ),
    Row("aminmax", lambda x: (torch.aminmax(x), torch.aminmax(x, dim=1, keepdim=True)), (_ties,)),
    Row(
        "any, all",
        lambda x: (x.any(), x.all(1), x.any((0, 1)), x.all(), (x > 8).any(0, keepdim=True), x.bool().all()),
        (whole(2, 3, high=3),),
        half=False,
    ),
    Row("any, all of uint8", lambda x: (x.any(0), x.all()), (whole(2, 3, high=3).to(torch.uint8),), half=False),
    Row("results that are given", _into_given, (normal(3, 4),), half=False, gradient=False),
    Row("count_nonzero", lambda x: (x.count_nonzero(), x.count_nonzero(0), torch.count_nonzero(x, (0, 1))), (_zeros,)),
    Row("logsumexp", lambda x: (x.logsumexp(1), torch.logsumexp(x, (0, -1), keepdim=True)), (_x * 30,)),
    Row("logsumexp with -inf", lambda x: x.logsumexp(1), (torch.tensor([[-torch.inf, 2.0], [-torch.inf, 1.0]]),)),
    Row("logsumexp of nothing else", lambda x: x.logsumexp(0), (torch.tensor([-torch.inf] * 3),), gradient=False),
    Row(
        "var, unbiased",
        lambda x: (x.var(unbiased=False), x.std(0, False), x.var((0, 1), correction=2), x.std(1, correction=0)),
        (_x,),
    ),
    Row(
        "var_mean, std_mean",
        lambda x: (torch.var_mean(x), torch.std_mean(x, 1, keepdim=True), torch.var_mean(x, 0, correction=0)),
        (_x,),
    ),
    Row("std of equal numbers", lambda x: (x.std(1), x.var(1), x[:, :1].std(1, correction=0)), (torch.ones(2, 3),)),
    Row("var of one number", _of_one_number, (normal(2),), gradient=False),
    Row("norms", lambda x: [(torch.linalg.vector_norm(x, p), x.norm(p, 1)) for p in _ORDERS], (_small,)),
    Row("norms of several dimensions", lambda x: [x.norm(p, (0, 2), keepdim=True) for p in (2, 3, math.inf)], (_x,)),
    Row("norms with zeros", lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (2, 1, 3, 1.5, math.inf)], (_zeros,)),
    Row(
        "norm, other forms",
        lambda x: (
            x.norm(),
            x.norm("fro"),
            torch.linalg.norm(x),
            torch.norm(x, dim=0, dtype=torch.float32),
            x[0, 0].norm(),
        ),
        (_small.reshape(1, 2, 3)[0].reshape(2, 1, 3),),
    ),
    Row(
        "norm of matrices",
        lambda x: [torch.linalg.matrix_norm(x, p) for p in ("fro", 1, -1, math.inf, -math.inf)],
        (_x,),
    ),
    Row("renorm, normalize", lambda x: (x.renorm(2, 0, 1.0), F.normalize(x, dim=1)), (_small,)),
    Row("dist", lambda x, y: [torch.dist(x, y, p) for p in (2, 1, 3, math.inf)], (_small, normal(3))),
    Row("cdist", lambda x: [torch.cdist(x, x[1:], p) for p in (2.0, 1.0, 3.0, math.inf)], (_points,), half=False),
    Row("cdist of batches", torch.cdist, (normal(2, 3, 4), normal(2, 2, 4)), half=False),
    Row(
        "cdist of many", torch.cdist, (normal(26, 3), normal(27, 3)), half=False, tolerance=1e-4
    ),  # of large squares a small difference
    Row("pdist", lambda x: (F.pdist(x), F.pdist(x, 1.0)), (_points,), half=False),
    Row(
        "cosine_similarity",
        lambda x, y: (F.cosine_similarity(x, y), F.cosine_similarity(x, y[0], 0)),
        (_small, normal(2, 3, seed=1)),
    ),
    Row(
        "pairwise_distance",
        lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, 1.0, keepdim=True)),
        (_small, normal(2, 3, seed=1)),
    ),
    Row(
        "cumsum",
        lambda x: (
            x.cumsum(0),
            x.cumsum(-1),
            x[0, 0, 0].cumsum(0),
            (x > 0).cumsum(1),
            x.cumsum(0, dtype=torch.float32),
        ),
        (_x,),
    ),
    Row("cumprod", lambda x: (x.cumprod(0), x.cumprod(1)), (_zeros,)),
    Row("cummax, cummin", lambda x: (x.cummax(0), x.cummin(1), x.cummax(1)), (_ties,)),
    Row("cummax with NaN", lambda x: (x.cummax(1), x.cummin(1)[0]), (_nan,), gradient=False),
    Row("cummax of integers", lambda x: (x.cummax(1), x.cummin(0)), (whole(3, 4),), half=False),
    Row("logcumsumexp", lambda x: (x.logcumsumexp(1), x.logcumsumexp(0)), (_x,)),
    Row("cumulative_trapezoid", lambda x: torch.cumulative_trapezoid(x, dim=1), (_x,)),
    Row(
        "histc", lambda x: (torch.histc(x, 4, -1, 1), torch.histc(x, 3), torch.histc(x[:1, 0, 0], 2)), (_x,), half=False
    ),
    Row(
        "histogram",
        lambda x: (torch.histogram(x, 4), torch.histogram(x, 3, range=(-1.0, 1.0))),
        (_x,),
        half=False,
        gradient=False,
    ),
    Row(
        "bincount",
        lambda i, w: (torch.bincount(i, minlength=12), i.bincount(w, minlength=10)),
        (whole(6), positive(6)),
        half=False,
        gradient=False,
    ),
    Row(
        "cov, corrcoef",
        lambda x: (
            torch.cov(x),
            torch.cov(x, correction=0),
            x[0].cov(),
            torch.corrcoef(x),
            torch.cov(x[:1]),
            x[:1].corrcoef(),
        ),
        (normal(3, 5),),
        half=False,
    ),
    Row(
        "cov with weights",
        lambda x, f, a: torch.cov(x, fweights=f, aweights=a),
        (normal(3, 5), whole(5) + 1, positive(5)),
        half=False,
        gradient=False,
    ),
    *(
        Row(
            f"segment_reduce, {how}, {initial}",
            lambda x, y, lengths, how=how, initial=initial: (
                torch.segment_reduce(x, how, lengths=lengths, unsafe=True, initial=initial),
                torch.segment_reduce(x, how, offsets=torch.tensor([0, 2, 6]), unsafe=True),
                torch.segment_reduce(y, how, lengths=torch.tensor([[1, 4], [3, 2]]), axis=1, unsafe=True),
            ),
            (normal(6, 2), normal(2, 5), torch.tensor([1, 0, 5]) if initial is not None else torch.tensor([1, 5])),
            half=False,
        )
        for how in ("sum", "mean", "max", "min", "prod")
        for initial in (None, 1.0)
    ),
    Row(
        "integers in statistics",
        lambda x, w: (torch.cov(x), torch.corrcoef(x), torch.bincount(x[0], w, minlength=12)),
        (whole(3, 5), whole(5).int()),
        half=False,
    ),
]
