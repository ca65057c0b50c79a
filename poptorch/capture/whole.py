"""The functions of PyTorch that are captured as a whole: each becomes one op, with the name that users know it by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["LOSSES", "WHOLE", "Whole"]


@dataclass(frozen=True)
class Whole:
    """A function that is kept whole.

    Attributes:
        op: name of the op: that of the function, after `torch.`.
        functions: all that are called so.
        like: a function with the same parameters, for those that do not tell.
        writes: which of its arguments it overwrites. They follow the results.
        applies: whether it is to be kept whole, with these arguments.
    """

    op: str
    functions: tuple[Callable[..., Any], ...]
    like: Callable[..., Any] | None = None
    writes: Callable[[Mapping[str, Any]], list[torch.Tensor]] = lambda given: []
    applies: Callable[[Mapping[str, Any]], bool] = lambda given: True

    def arguments(self, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments by name, defaults too; `None` if the function is not to be kept whole with them."""
        bound = _signature(self.like or function).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments) if self.applies(bound.arguments) else None


_signature = cache(inspect.signature)


def _whole(*functions: Callable[..., Any], **settings: Any) -> Whole:
    return Whole(f"torch.{functions[0].__name__}", functions, **settings)


def _along_a_dim(function: Callable[..., Any], *others: Callable[..., Any]) -> tuple[Whole, Whole]:
    """A function that needs a `dim`, and other forms of it."""
    return (
        _whole(function, applies=lambda given: given["dim"] is not None),
        Whole(f"torch.{function.__name__}", others, like=lambda input, dim, dtype=None: None),
    )


def _statistics(given: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a batch norm overwrites: its running statistics, while training."""
    learns = given["training"] if "training" in given else given["use_input_stats"]
    return [t for t in (given["running_mean"], given["running_var"]) if learns and t is not None]


_LOSSES = (
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.soft_margin_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
    F.cross_entropy,
    F.nll_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.multilabel_soft_margin_loss,
    F.ctc_loss,
)

LOSSES = frozenset(f"torch.{function.__name__}" for function in _LOSSES)
"""Names of the ops that are losses."""

WHOLE: tuple[Whole, ...] = (
    *map(_whole, _LOSSES),
    _whole(F.batch_norm, writes=_statistics),
    _whole(F.instance_norm, writes=_statistics),
    _whole(F.layer_norm),
    _whole(F.group_norm),
    _whole(F.linear, like=lambda input, weight, bias=None: None),
    *_along_a_dim(F.softmax, torch.softmax, torch.Tensor.softmax),
    *_along_a_dim(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
    _whole(F.dropout),
    _whole(F.embedding, applies=lambda given: given["max_norm"] is None),
)
