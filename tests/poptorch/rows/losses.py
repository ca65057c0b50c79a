"""Losses."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, positive, whole

_SIGNS = torch.tensor([1, -1, -1, 1])


def _signs() -> torch.Tensor:
    return torch.tensor([1, -1, -1, 1])


_PROBABILITIES = torch.tensor([[0.2, 0.9, 0.5], [0.0, 1.0, 1.0]])
_LABELS = torch.tensor([2, 0, -100, 1])


_REDUCTIONS = ("none", "mean", "sum")


def _loss(
    name: str,
    *tensors: torch.Tensor,
    title: str = "",
    half: bool = True,
    reductions: tuple[str, ...] = _REDUCTIONS,
    **how: Any,
) -> Row:
    """A loss with each reduction."""
    function = getattr(F, name)
    said = title or ", ".join([name, *(f"{key} {value}" for key, value in how.items())])
    return Row(said, lambda *ts: [function(*ts, reduction=each, **how) for each in reductions], tensors, half=half)


def _weighted(name: str, *tensors: torch.Tensor, argument: str = "weight", half: bool = True, **how: Any) -> Row:
    """A loss whose last tensor is a weight, which has no gradient."""
    function = getattr(F, name)

    def weighted(*given: torch.Tensor) -> list[torch.Tensor]:
        *others, weight = given
        return [function(*others, **{argument: weight.detach()}, reduction=each, **how) for each in _REDUCTIONS]

    return Row(", ".join([name, argument, *(f"{key} {value}" for key, value in how.items())]), weighted, tensors, half)


def _of_old(x: torch.Tensor, y: torch.Tensor, how: dict[str, bool]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        return F.mse_loss(x, y, **how)


_PAIR = (normal(4, 3), normal(4, 3, seed=1))
_LOGITS, _IMAGES = normal(4, 3), normal(2, 3, 4, 2)
_IMAGE_LABELS = whole(2, 4, 2, high=3)
_OF_TORCH = (
    (
        "binary_cross_entropy_with_logits",
        lambda x, y: torch.binary_cross_entropy_with_logits(x, y, reduction=2),
        (normal(4, 3), torch.sigmoid(normal(4, 3))),
    ),
    ("cosine_embedding_loss", lambda x, y: torch.cosine_embedding_loss(x, y, _signs(), 0.1), _PAIR),
    ("hinge_embedding_loss", lambda x: torch.hinge_embedding_loss(x, _signs(), 0.7, 0), (normal(4),)),
    ("kl_div", lambda x, y: torch.kl_div(x, y, 2, log_target=True), _PAIR),
    (
        "margin_ranking_loss",
        lambda x, y: torch.margin_ranking_loss(x, y, _signs(), reduction=2),
        (normal(4), normal(4, seed=1)),
    ),
    ("poisson_nll_loss", lambda x, y: torch.poisson_nll_loss(x, y, True, False, 1e-8, 1), _PAIR),
    ("triplet_margin_loss", lambda x, y: torch.triplet_margin_loss(x, y, -x, swap=True), _PAIR),
)

ROWS = [
    _loss("mse_loss", *_PAIR),
    _loss("l1_loss", *_PAIR),
    *(_weighted(name, *_PAIR, positive(4, 3)) for name in ("mse_loss", "huber_loss")),
    *(
        Row(f"mse_loss, {how}", lambda x, y, how=how: _of_old(x, y, how), _PAIR)
        for how in ({"size_average": False}, {"size_average": True}, {"reduce": False})
    ),
    _loss("smooth_l1_loss", *_PAIR),
    _loss("smooth_l1_loss", *_PAIR, beta=0.3),
    _loss("smooth_l1_loss", *_PAIR, beta=0.0),
    _loss("huber_loss", *_PAIR, delta=0.5),
    _loss("soft_margin_loss", normal(4), _SIGNS),
    _loss("hinge_embedding_loss", normal(4), _SIGNS, margin=0.7),
    _loss("margin_ranking_loss", normal(4), normal(4, seed=1), _SIGNS, margin=0.3),
    _loss("margin_ranking_loss", torch.ones(4), torch.ones(4), _SIGNS, title="margin_ranking_loss at the corner"),
    _loss("binary_cross_entropy", _PROBABILITIES, torch.tensor([[1.0, 0.5, 0.2], [1.0, 0.0, 1.0]]), half=False),
    _weighted(
        "binary_cross_entropy", torch.sigmoid(normal(4, 3)), torch.sigmoid(normal(4, 3)), positive(4, 3), half=False
    ),
    _loss("binary_cross_entropy_with_logits", normal(4, 3) * 9, torch.sigmoid(normal(4, 3))),
    _weighted("binary_cross_entropy_with_logits", *_PAIR, positive(3)),
    _weighted("binary_cross_entropy_with_logits", *_PAIR, positive(3), argument="pos_weight"),
    # With "mean" it warns: that is not the mean that one thinks of.
    _loss("kl_div", normal(4, 3), positive(4, 3), reductions=("none", "sum", "batchmean")),
    _loss("kl_div", *_PAIR, log_target=True, reductions=("none", "sum", "batchmean")),
    Row("kl_div of numbers", lambda x, y: F.kl_div(x, y, reduction="batchmean"), (normal(), positive())),
    Row("kl_div of zeros", lambda x: F.kl_div(x, torch.tensor([0.0, 1.0, 0.0]), reduction="sum"), (normal(4, 3),)),
    _loss("poisson_nll_loss", normal(4, 3), positive(4, 3)),
    _loss("poisson_nll_loss", positive(4, 3), whole(4, 3, high=5), log_input=False, full=True),
    _loss("gaussian_nll_loss", *_PAIR, positive(4, 3)),
    _loss("gaussian_nll_loss", *_PAIR, positive(4), full=True, title="gaussian_nll_loss of rows, full"),
    _loss("gaussian_nll_loss", *_PAIR, positive(4, 1) / 4, eps=0.3),
    Row("gaussian_nll_loss, number", lambda x, y: F.gaussian_nll_loss(x, y, 2.0), _PAIR),
    _loss("cosine_embedding_loss", *_PAIR, _SIGNS, margin=0.1),
    Row(
        "cosine_embedding_loss of vectors",
        lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor(1)),
        (normal(3), normal(3, seed=1)),
    ),
    _loss("triplet_margin_loss", *_PAIR, normal(4, 3, seed=2)),
    _loss("triplet_margin_loss", *_PAIR, normal(4, 3, seed=2), swap=True, p=1, margin=0.5),
    _loss("multilabel_soft_margin_loss", normal(4, 3), whole(4, 3, high=2)),
    _weighted("multilabel_soft_margin_loss", normal(4, 3), whole(4, 3, high=2), positive(3)),
    _loss("multilabel_margin_loss", normal(2, 4), torch.tensor([[3, 0, -1, 1], [-1, 0, 2, 1]]), half=False),
    Row(
        "multilabel_margin_loss of a vector",
        lambda x: F.multilabel_margin_loss(x, torch.tensor([2, 0, -1])),
        (normal(3),),
        half=False,
    ),
    *(
        Row(
            f"{name} of {said}",
            lambda x, y, name=name: [getattr(F, name)(x, y, reduction=each) for each in _REDUCTIONS],
            given,
            half=False,
        )
        for name, said, given in (
            ("multilabel_margin_loss", "a vector, each reduction", (normal(3), torch.tensor([2, 0, -1]))),
            ("multilabel_margin_loss", "a number", (normal(), torch.tensor(0))),
            ("multi_margin_loss", "a vector", (normal(3), torch.tensor(1))),
            ("multi_margin_loss", "a vector, a vector of labels", (normal(3), torch.tensor([1]))),
            ("multi_margin_loss", "a number", (normal(), torch.tensor(0))),
        )
    ),
    _loss("multi_margin_loss", _LOGITS, whole(4, high=3), half=False),
    *(
        _loss(name, torch.tensor([[1.0, 0, 2]]), labels, title=f"{name}, on the margin", half=False)
        for name, labels in (
            ("multi_margin_loss", torch.tensor([0])),
            ("multilabel_margin_loss", torch.tensor([[0, -1, 0]])),
        )
    ),
    _weighted("multi_margin_loss", _LOGITS, whole(4, high=3), positive(3), p=2, margin=0.8, half=False),
    _loss("nll_loss", _LOGITS, whole(4, high=3)),
    _weighted("nll_loss", _LOGITS, _LABELS, positive(3)),
    _loss("nll_loss", _IMAGES, _IMAGE_LABELS, ignore_index=1, title="nll_loss 2d"),
    _loss("cross_entropy", _LOGITS, _LABELS),
    _loss("cross_entropy", _LOGITS, _LABELS, label_smoothing=0.2),
    _weighted("cross_entropy", _LOGITS, _LABELS, positive(3), label_smoothing=0.2),
    _loss("cross_entropy", _IMAGES, _IMAGE_LABELS, title="cross_entropy of images"),
    _loss("cross_entropy", normal(4, 3), torch.softmax(normal(4, 3), 1), title="cross_entropy of probabilities"),
    _weighted("cross_entropy", _IMAGES, torch.softmax(_IMAGES, 1), positive(3), label_smoothing=0.1),
    *(
        _loss(
            "linear_cross_entropy", normal(4, 6), normal(3, 6), labels, title=f"linear_cross_entropy of {labels.dtype}"
        )
        for labels in (_LABELS, torch.softmax(normal(4, 3), 1))
    ),
    Row(
        "linear_cross_entropy, bias, positions",
        lambda x, w, y, b: F.linear_cross_entropy(x, w, y, linear_bias=b, label_smoothing=0.1),
        (normal(4, 6), normal(3, 2, 6), whole(4, 2, high=3), normal(3, 2)),
    ),
    Row(
        "linear_cross_entropy, in chunks",
        lambda x, w, y: F.linear_cross_entropy(x, w, y, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=3)),
        (normal(4, 6), normal(3, 6), whole(4, high=3)),
    ),
    *(Row(f"torch.{name}", function, tensors) for name, function, tensors in _OF_TORCH),
    Row("cross_entropy of one", lambda x: F.cross_entropy(x, torch.tensor(1)), (normal(3),)),
    Row("cross_entropy of none", lambda x: F.cross_entropy(x, torch.tensor([-100, -100])), (normal(2, 3),)),
    Row(
        "cross_entropy of infinities",
        lambda x: F.cross_entropy(torch.where(x > 1, -torch.inf, x), torch.tensor([0, -100])),
        (torch.tensor([[0.0, 1, 2], [3, 0, 0]]),),
    ),
]
