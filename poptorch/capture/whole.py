"""The functions of PyTorch that are captured as a whole: each becomes one op, with the name that users know it by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from poptorch.errors import createPoptorchError

__all__ = ["COMPOSED_LOSSES", "LOSSES", "WHOLE", "Whole", "as_activation"]


@dataclass(frozen=True)
class Whole:
    """A function that is kept whole.

    Attributes:
        op: name of the op: that of the function, after `torch.`.
        functions: all that are called so.
        like: a function with the same parameters, for those that do not tell.
        writes: which of its arguments it overwrites. They follow the results.
        applies: whether it is to be kept whole, with these arguments.
        shaped_as: a function that gives results of the right shapes and dtypes for the same arguments, by name, where
            PyTorch's own would look at numbers in tensors. Left out, it is PyTorch's own.
    """

    op: str
    functions: tuple[Callable[..., Any], ...]
    like: Callable[..., Any] | None = None
    writes: Callable[[Mapping[str, Any]], list[torch.Tensor]] = lambda given: []
    applies: Callable[[Mapping[str, Any]], bool] = lambda given: True
    shaped_as: Callable[..., Any] | None = None

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
    F.multilabel_margin_loss,
    F.multi_margin_loss,
)


def _shaped_as_gaussian_nll(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, reduction: str, **others: Any
) -> torch.Tensor:
    losses = (input - target) * (var.sum() if isinstance(var, torch.Tensor) else var)
    return losses if reduction == "none" else losses.sum()


def _shaped_as_ctc(log_probs: torch.Tensor, reduction: str, **others: Any) -> torch.Tensor:
    losses = log_probs.sum((0, -1))
    return losses if reduction == "none" else losses.sum()


def _shaped_as_batch_norm(momentum: float | torch.Tensor, **given: Any) -> torch.Tensor:
    return F.batch_norm(momentum=0.0, **given)


_WHOLE_LOSSES = (
    *(_whole(loss) for loss in _LOSSES),
    _whole(F.gaussian_nll_loss, shaped_as=_shaped_as_gaussian_nll),
    _whole(F.ctc_loss, shaped_as=_shaped_as_ctc),
)

LOSSES = frozenset(whole.op for whole in _WHOLE_LOSSES)
"""Names of the ops that are losses."""

COMPOSED_LOSSES = (F.triplet_margin_with_distance_loss,)
"""Losses that run a function of the user's: their ops are captured one by one, and the result is marked."""


def _shaped_as_combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    count = comb(len(input) + r - 1 if with_replacement else len(input), r)
    return input.sum().expand(count, r).clone()  # of the input, so that gradients are known to flow


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)


def _recurrent(
    input: Any,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> None: ...


def _with_rows(given: Mapping[str, Any]) -> bool:
    """Whether a recurrent layer has been given a tensor, and not a packed sequence."""
    return isinstance(given["has_biases"], bool)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


def _shaped_as_bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if minlength == 0:
        raise createPoptorchError(
            "bincount: without `minlength` the shape of the result depends on the numbers in the tensor. Give one that "
            "is larger than all of them."
        )
    return torch.zeros(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _shaped_as_cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = input.reshape(-1, input.shape[-1]) if input.dim() else input.reshape(1, 1)
    return (rows @ rows.T) if input.dim() > 1 else rows.sum()


def _shaped_as_corrcoef(input: torch.Tensor) -> torch.Tensor:
    return _shaped_as_cov(input)


WHOLE: tuple[Whole, ...] = (
    *_WHOLE_LOSSES,
    _whole(F.batch_norm, writes=_statistics, shaped_as=_shaped_as_batch_norm),
    _whole(F.instance_norm, writes=_statistics),
    Whole(
        "torch.batch_norm",
        (torch.batch_norm,),
        like=lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled: None,
        writes=_statistics,
    ),
    Whole(
        "torch.instance_norm",
        (torch.instance_norm,),
        like=lambda input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled: None,
        writes=_statistics,
    ),
    _whole(
        F.layer_norm,
        torch.layer_norm,
        like=lambda input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True: None,
    ),
    _whole(
        F.group_norm,
        torch.group_norm,
        like=lambda input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: None,
    ),
    _whole(F.rms_norm, torch.rms_norm, like=lambda input, normalized_shape, weight=None, eps=None: None),
    _whole(F.pad),
    *(
        _whole(
            getattr(torch, name),
            getattr(torch.Tensor, name),
            like=lambda input, q, dim=None, keepdim=False, *, interpolation="linear": None,
        )
        for name in ("quantile", "nanquantile")
    ),
    _whole(torch.bincount, torch.Tensor.bincount, like=_shaped_as_bincount, shaped_as=_shaped_as_bincount),
    _whole(torch.cov, torch.Tensor.cov, like=_shaped_as_cov, shaped_as=_shaped_as_cov),
    _whole(torch.corrcoef, torch.Tensor.corrcoef, like=_shaped_as_corrcoef, shaped_as=_shaped_as_corrcoef),
    _whole(torch.combinations, like=_shaped_as_combinations, shaped_as=_shaped_as_combinations),
    _whole(F.linear, like=lambda input, weight, bias=None: None),
    _whole(F.bilinear, like=lambda input1, input2, weight, bias=None: None),
    _whole(
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.linalg.matmul,
        like=lambda input, other, *, out=None: None,
        applies=lambda given: given["out"] is None,
    ),
    _whole(
        torch.einsum, like=lambda equation, *operands: None, applies=lambda given: isinstance(given["equation"], str)
    ),
    *_along_a_dim(F.softmax, torch.softmax, torch.Tensor.softmax),
    *_along_a_dim(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
    _whole(F.scaled_dot_product_attention, like=_attention),
    _whole(F.multi_head_attention_forward),
    *(Whole(f"torch.{f.__name__}", (f,), like=_recurrent, applies=_with_rows) for f in _RECURRENT),
    *(_whole(f, like=lambda input, hx, w_ih, w_hh, b_ih=None, b_hh=None: None) for f in _CELLS),
    _whole(F.dropout),
    _whole(F.embedding, applies=lambda given: given["max_norm"] is None),
)

# Dtypes ---------------------------------------------------------------------------------------------------------------

_OF_THE_ACTIVATION = (
    F.linear,
    F.bilinear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
"""Functions that compute in the dtype of their first argument. (PyTorch wants all arguments to have the same.)"""


def as_activation(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments of a function; of those that compute in the dtype of their input, with weight and bias cast to it."""
    if not any(function is each for each in _OF_THE_ACTIVATION):
        return args, kwargs
    input = args[0] if args else kwargs["input1" if function is F.bilinear else "input"]
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(input.dtype), (args, kwargs))
