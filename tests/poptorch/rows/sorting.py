"""Sorting, and what is found by sorting."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal, whole

_x = normal(3, 4, 5)
_ties = torch.tensor([[2.0, 1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 3.0, 1.0, 3.0]])
_nan = torch.tensor([[2.0, torch.nan, 0.0, 1.0], [3.0, 1.0, 5.0, 2.0]])
_levels = torch.tensor([-1.0, 0.0, 0.0, 1.5])

ROWS = [
    Row("sort", lambda x: (x.sort(), x.sort(0, descending=True), x[0, 0, 0].sort()), (_x,)),
    Row("sort, stable", lambda x: (x.sort(stable=True), x.sort(dim=0, descending=True, stable=True)), (_ties,)),
    Row("sort with NaN", lambda x: (x.sort(), x.sort(descending=True), x.argsort()), (_nan,)),
    Row(
        "sort of integers",
        lambda x: (x.sort(stable=True), (x > 4).sort(stable=True), x.topk(2)[0]),
        (whole(3, 4),),
        half=False,
    ),
    Row("argsort, msort", lambda x: (x.argsort(), x.argsort(1, True), torch.argsort(x, stable=True), x.msort()), (_x,)),
    Row("topk", lambda x: (x.topk(2), x.topk(3, 1, largest=False), x.topk(1, 0)), (_x,)),
    Row("kthvalue", lambda x: (x.kthvalue(2), x.kthvalue(1, 0), x.kthvalue(4, 1, keepdim=True)), (_x,)),
    Row("median", lambda x: (x.median(), x.median(0), x.median(1, keepdim=True), x[0, 0, :4].median()), (_x,)),
    Row(
        "median with NaN",
        lambda x: (x.median(1), x[1].median(), x.nanmedian(), x.nanmedian(1)),
        (_nan,),
        gradient=False,
    ),
    Row("median with ties", lambda x: (x.median(), x.nanmedian()), (_ties,)),
    Row("nanmedian", lambda x: (x.nanmedian(), x.nanmedian(-1)), (_x,)),
    Row("mode", lambda x: (x.mode(), x.mode(0)[0], x.mode(-1, keepdim=True)[0]), (_ties,)),
    Row(
        "quantile",
        lambda x: (x.quantile(0.3), x.quantile(0.6, 1, keepdim=True), torch.quantile(x, 0.5, dim=-1)),
        (_x,),
        half=False,
    ),
    Row(
        "quantiles",
        lambda x, q: (x.quantile(q), x.quantile(q, 1), torch.quantile(x, q, 0, keepdim=True)),
        (_x, torch.tensor([0.2, 0.7])),
        half=False,
        tolerance=1e-4,
    ),
    Row(
        "quantile, interpolations",
        lambda x: [x.quantile(0.4, 1, interpolation=how) for how in ("lower", "higher", "nearest", "midpoint")],
        (_x,),
        half=False,
    ),
    Row(
        "nanquantile", lambda x: (x.nanquantile(0.3), torch.nanquantile(x, 0.3, 1)), (_nan,), half=False, gradient=False
    ),
    Row(
        "searchsorted",
        lambda x, s: (torch.searchsorted(s, x), torch.searchsorted(s, x, right=True), torch.searchsorted(s, 0.5)),
        (_x, _levels),
    ),
    Row(
        "searchsorted in lines",
        lambda x: (
            torch.searchsorted(x.sort(-1)[0], x, side="right"),
            torch.searchsorted(x[0], x[0], sorter=x[0].argsort()),
        ),
        (_x,),
    ),
    Row(
        "searchsorted with NaN",
        lambda x, s: [torch.searchsorted(s, x, right=right) for right in (False, True)],
        (torch.tensor([torch.nan, -torch.inf, 0.0, 1.0, 9.0]), torch.tensor([0.0, 1.0, 2.0, torch.nan, torch.nan])),
    ),
    Row(
        "bucketize",
        lambda x, s: (torch.bucketize(x, s), torch.bucketize(x, s, right=True), torch.bucketize(0.0, s)),
        (_x, _levels),
    ),
]
