"""Corners and ends: where values are equal, lengths are 0, nothing is there, or an operand is infinite.

PyTorch says what the slope is there; JAX's may be another in each of its releases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import inf, nan
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

_corners = torch.tensor([-3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0])
_ends = torch.tensor([-inf, *_corners, inf])
_ends_and_nan = torch.tensor([*_ends, nan])
_ties = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 5.0, 5.0], [-1.0, -1.0, 2.0, 2.0]])
_left, _right = (t.reshape(-1) for t in torch.meshgrid(_corners, _corners, indexing="ij"))
_infinite = torch.tensor([[-inf, -inf], [inf, 1.0], [1.0, inf], [inf, inf], [-inf, inf], [-inf, 2.0], [0.0, 0.0]])
_input = torch.tensor([[1.0, -1.0, 0.0, 2.0], [0.5, 0.5, -0.5, -0.0], [3.0, 1.0, 1.0, -1.0]])
_target = torch.tensor([[1.0, 0.0, 0.0, 3.0], [0.5, -0.5, 0.5, 0.0], [1.0, 2.0, 0.0, -1.0]])
_rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, -2.0], [3.0, -3.0, 3.0], [-1.0, 1.0, 0.0], [3.0, -3.0, 3.0]])
_probabilities = torch.tensor([[0.0, 1.0, 0.5, 1e-30], [1.0, 0.0, 0.2, 0.8]])
_chances = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.5, 1.0]])
_signs = torch.tensor([[1.0, -1.0, -1.0, -1.0], [-1.0, 1.0, -1.0, -1.0], [-1.0, -1.0, 1.0, 1.0]])

_ALWAYS = {
    "two_roots",
    "infinite",
    "scatter",
    "bags",
    "deviations",
    "distances",
    "smooth_l1_loss",
    "cross_entropy",
    "ctc_loss",
}
"""Rows that are not left to thorough tests: where JAX's slopes are not PyTorch's."""

_REDUCTIONS = ("none", "mean", "sum")
_ORDERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, inf)


def _row(name: str, function: Callable[..., Any], *inputs: Any, **settings: Any) -> Row:
    def quietly(*given: Any) -> Any:
        with warnings.catch_warnings():  # PyTorch's, of means of nothing, and of means that are to change
            warnings.simplefilter("ignore")
            return function(*given)

    return Row(f"{name}, corners" if name in _ALWAYS else f"corners, {name}", quietly, inputs, half=False, **settings)


def _reduced(name: str, loss: Callable[..., torch.Tensor], *inputs: Any, **settings: Any) -> Row:
    """A loss, in all reductions."""
    return _row(name, lambda *given: [loss(*given, reduction=how) for how in _REDUCTIONS], *inputs, **settings)


def _classes(x: torch.Tensor, reduction: str) -> list[torch.Tensor]:
    """Where labels are ignored, some or all, and where they have no weight."""
    weights = (None, torch.tensor([1.0, 2.0, 0.0, 0.5]), torch.zeros(4))
    return [
        F.cross_entropy(x, torch.tensor(labels), weight, reduction=reduction, label_smoothing=smoothing)
        for labels in ([1, -100, 3], [-100, -100, -100])
        for weight in weights
        for smoothing in (0.0, 0.1)
    ]


def _ctc(x: torch.Tensor) -> list[torch.Tensor]:
    """Sequences of no time, of no labels, of neither, and of less time than labels need."""
    labels = torch.tensor([[1, 2, 2], [1, 1, 1], [3, 4, 1], [2, 2, 2]])
    lengths = [
        (torch.tensor([6, 5, 0, 2]), torch.tensor([0, 3, 0, 3])),
        (torch.tensor([6, 3, 0, 5]), torch.tensor([3, 3, 1, 0])),
    ]
    return [
        F.ctc_loss(x, labels, times, counts, reduction=how, zero_infinity=zero)
        for times, counts in lengths
        for how, zero in (("none", False), ("mean", True))
    ]


def _scattered(x: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    places = torch.tensor([[0, 0, 1, 1]] * 4)
    return [
        x.scatter_reduce(1, places, source, how, include_self=included)
        for how in ("amax", "amin", "prod", "mean")
        for included in (True, False)
    ]


def _activations(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        *(F.relu(x), F.relu6(x), F.hardtanh(x), F.hardtanh(x, -2, 3), F.hardsigmoid(x), F.leaky_relu(x), F.elu(x)),
        *(F.softshrink(x), F.softshrink(x, 0.0), F.hardshrink(x), F.threshold(x, 1.0, 7.0), F.celu(x, 0.5), F.selu(x)),
        *(F.softsign(x), F.logsigmoid(x), F.softplus(x, 2.0, 6.0), F.prelu(x, torch.tensor([0.25]))),
    ]


ROWS = [
    _row("functions", lambda x: [x.abs(), x.sign(), x.sgn(), x.square(), x.frac(), x.sinc(), x.positive()], _corners),
    _row("roots", lambda x: [x.sqrt(), x.rsqrt(), x**0.5, x.reciprocal(), x.log(), x.logit()], _corners),
    _row("powers", lambda x: [x**0, x**1, x**2, x**-1, x**1.5, 0**x, 2.0**x], _corners.abs()),
    _row("special", lambda x: [torch.special.i1(x), torch.special.ndtri(x.abs() / 3), torch.special.entr(x)], _corners),
    _row("activations", _activations, _ends_and_nan),
    _row("hardswish", F.hardswish, _ends),
    _row("clamp", lambda x: [x.clamp(-1, 1), x.clamp(0, None), x.clamp(None, 1), x.clamp(2, -1), x.clamp(1, 1)], _ends),
    _row("clamp by tensors", lambda x, low, high: x.clamp(low, high), _left, _right, _right.flip(0)),
    _row(
        "two",
        lambda x, y: [
            torch.maximum(x, y),
            torch.minimum(x, y),
            torch.fmax(x, y),
            torch.fmin(x, y),
            torch.where(x > y, x, y),
        ],
        _left,
        _right,
    ),
    _row(
        "two_roots",
        lambda x, y: [torch.atan2(x, y), torch.hypot(x, y), torch.copysign(x, y), torch.xlogy(x, y)],
        _left,
        _right,
    ),
    _row("infinite", lambda x: [torch.logaddexp(*x.T), torch.logaddexp2(*x.T), torch.hypot(*x.T)], _infinite),
    _row("infinite rows", lambda x: [x.logsumexp(1), x.softmax(1), x.log_softmax(1)], _infinite),
    _row(
        "extremes",
        lambda x: [
            x.amax(1),
            x.amin(0),
            x.aminmax(dim=1),
            x.max(),
            x.min(),
            x.max(1),
            x.min(0),
            x.median(),
            x.median(1),
        ],
        _ties,
    ),
    _row(
        "extremes in order",
        lambda x: [x.cummax(1), x.cummin(0), x.sort(dim=1, stable=True), x.mode(1), x.nanmedian()],
        _ties,
    ),
    _row(
        "pools",
        lambda x: [F.max_pool2d(x, 2, 1), F.adaptive_max_pool2d(x, 2), F.lp_pool1d(x[0], 2.0, 2)],
        _ties[None, None],
    ),
    _row("products", lambda x: [x.prod(1), x.cumprod(1), x.prod()], torch.tensor([[2.0, 0.0, 4.0], [0.0, 0.0, 3.0]])),
    _row(
        "deviations",
        lambda x: [x.std(1), x[:, :1].std(1, correction=0), x.var(1, correction=4), x.std(1, correction=5)],
        _ties,
    ),
    _row("one element", lambda x: [x[:, :1].std(1), x[:, :1].var(1)], _ties),
    _row("scatter", _scattered, _ties, _ties.flip(1)),
    _row(
        "bags",
        lambda w, nans: [
            F.embedding_bag(torch.tensor([0, 1, 1, 2]), each, torch.tensor([0, 0, 3, 4]), mode="max")
            for each in (w, nans)
        ],
        _ties,
        torch.where(_ties == 0, torch.nan, _ties),
    ),
    _row(
        "norms",
        lambda x: [torch.linalg.vector_norm(x, p, dim) for p in (*_ORDERS, -inf) for dim in (1, None)],
        _rows,
    ),
    _row("distances", lambda x, y: [torch.cdist(x, y, p) for p in (1.0, 2.0, inf)], _rows, _rows.clone()),
    _row(
        "distances of pairs",
        lambda x, y: [F.pairwise_distance(x, y, p, eps=0.0) for p in _ORDERS[1:]],
        _rows,
        _rows.flip(0),
    ),
    _row("distances within", lambda x: [F.pdist(x, p) for p in _ORDERS], _rows),
    _row(
        "angles",
        lambda x, y: [F.cosine_similarity(x, y), F.normalize(x), x.renorm(2, 0, 1.0)],
        _rows,
        _rows.flip(0) * 0.5,
    ),
    _row("matrix norms", lambda x: [torch.linalg.matrix_norm(x, p) for p in ("fro", 1, inf)], torch.ones(3, 3)),
    _row("length 0", lambda x: torch.view_as_complex(x).abs(), torch.tensor([[0.0, 0.0], [3.0, 4.0]])),
    _row(
        "nothing",
        lambda x: [x.sum(1), x.mean(1), x.mean(), x.prod(), x.var(0), x.median(), x.norm(), x.logsumexp(0)],
        torch.zeros(0, 3),
    ),
    _reduced("l1_loss", F.l1_loss, _input, _target),
    _reduced(
        "l1_loss with weights",
        lambda x, y, reduction: F.l1_loss(x, y, reduction=reduction, weight=torch.tensor([[0.0, 1.0, 2.0, 0.0]] * 3)),
        _input,
        _target,
    ),
    *(
        _reduced(
            "smooth_l1_loss" if b == 0 else f"smooth_l1_loss {b}",
            lambda x, y, reduction, b=b: F.smooth_l1_loss(x, y, reduction=reduction, beta=b),
            _input,
            _target,
        )
        for b in (0.0, 1.0)
    ),
    *(
        _reduced(
            f"huber_loss {d}",
            lambda x, y, reduction, d=d: F.huber_loss(x, y, reduction=reduction, delta=d),
            _input,
            _target,
        )
        for d in (0.5, 1.0)
    ),
    _row(
        "infinite differences",
        lambda x, y: [F.smooth_l1_loss(x, y, reduction="sum"), F.huber_loss(x, y, reduction="none", delta=0.5)],
        _ends,
        torch.zeros_like(_ends),
    ),
    _reduced(
        "binary_cross_entropy",
        lambda x, reduction: F.binary_cross_entropy(x, _chances, reduction=reduction),
        _probabilities,
    ),
    _reduced("cross_entropy", _classes, _input),
    _reduced(
        "kl_div", F.kl_div, _input, torch.tensor([[0.0, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.1, 0.3]])
    ),
    _reduced(
        "margin_ranking_loss",
        lambda x, y, reduction: F.margin_ranking_loss(x, y, torch.tensor([1.0, -1.0, 1.0]), 0.5, reduction=reduction),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([1.5, 1.5, 2.5]),
    ),
    _reduced(
        "hinge_embedding_loss", lambda x, reduction: F.hinge_embedding_loss(x, _signs, reduction=reduction), _input
    ),
    _reduced(
        "cosine_embedding_loss",
        lambda x, y, reduction: F.cosine_embedding_loss(x, y, torch.tensor([1.0, -1, 1, -1, 1]), reduction=reduction),
        _rows,
        _rows.flip(0),
    ),
    _reduced(
        "multi_margin_loss",
        lambda x, reduction: F.multi_margin_loss(x, torch.tensor([0, 1, 3]), reduction=reduction),
        _input,
    ),
    _reduced(
        "multilabel_margin_loss",
        lambda x, reduction: F.multilabel_margin_loss(
            x, torch.tensor([[0, 3, -1, 1], [-1, 0, 0, 0], [0, 1, 2, 3]]), reduction=reduction
        ),
        _input,
    ),
    *(
        _reduced(
            f"triplet_margin_loss {p}",
            lambda x, y, z, reduction, p=p: F.triplet_margin_loss(
                x, y, z, p=p, eps=0.0, swap=True, reduction=reduction
            ),
            _input,
            _target,
            _target.clone(),
        )
        for p in (1, 2)
    ),
    _row("ctc_loss", _ctc, normal(6, 4, 5).log_softmax(2)),
]
