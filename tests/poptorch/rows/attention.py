"""Attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

_Q, _K, _V = normal(2, 3, 4, 6), normal(2, 3, 5, 6), normal(2, 3, 5, 7)
_ALLOWED = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]] * 2)
_ROWS = [[False] * 5, [False, True, True, True, True]] * 2
_SOME_SEE_NOTHING = torch.tensor(_ROWS)


def _attention(**settings: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **settings)


def _biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~torch.tensor(_ROWS), -torch.inf))


def _module(
    inputs: int, settings: dict[str, Any], call: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    module = torch.nn.MultiheadAttention(6, 2, **settings)
    names = [name for name, _ in module.named_parameters()]
    numbers = {name: value.tolist() for name, value in call.items() if isinstance(value, torch.Tensor)}

    def function(*tensors: torch.Tensor) -> Any:
        masks = {name: torch.tensor(value) for name, value in numbers.items()}
        given, parameters = tensors[:inputs], tensors[inputs:]
        arguments = (given[0],) * 3 if inputs == 1 else given
        return torch.func.functional_call(
            module, dict(zip(names, parameters, strict=True)), arguments, {**call, **masks}
        )

    return function, [normal(*p.shape, seed=i) / 2 for i, p in enumerate(module.parameters())]


def _heads(name: str, *given: torch.Tensor, call: dict[str, Any] | None = None, **settings: Any) -> Row:
    function, parameters = _module(len(given), settings, call or {})
    return Row(name, function, (*given, *parameters), tolerance=2e-5, half_tolerance=2e-2)


_X = normal(5, 2, 6)
_LATER = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
_PADDED = {"key_padding_mask": torch.tensor([[False] * 5, [True] * 5])}

ROWS = [
    Row("attention", _attention(), (_Q, _K, _V)),
    Row("attention, causal", _attention(is_causal=True), (_Q, _K, _V)),
    Row("attention, mask", _attention(), (_Q, _K, _V, _ALLOWED)),
    Row("attention, a query that sees nothing", _attention(), (_Q, _K, _V, _SOME_SEE_NOTHING)),
    Row("attention, bias of a query that sees nothing", _biased, (_Q, _K, _V, normal(4, 5))),
    Row("attention, bias", _attention(scale=0.3), (_Q, _K, _V, normal(4, 5))),
    Row(
        "attention, shared heads",
        _attention(enable_gqa=True),
        (normal(2, 4, 3, 6), normal(2, 2, 5, 6), normal(2, 2, 5, 6)),
    ),
    _heads("heads", _X),
    _heads("heads, batch first, no weights", _X, call={"need_weights": False}, batch_first=True),
    _heads(
        "heads, masks",
        _X,
        call={"attn_mask": _LATER, "key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True]])},
    ),
    *(
        _heads(f"heads, a sequence of padding, {weights}", _X, call={**_PADDED, "need_weights": weights})
        for weights in (False, True)
    ),
    _heads("heads, weights of each", _X, call={"average_attn_weights": False}),
    _heads("heads, more keys", _X, bias=True, add_bias_kv=True, add_zero_attn=True),
    _heads("heads, other widths", _X, normal(4, 2, 3), normal(4, 2, 5), kdim=3, vdim=5),
    _heads("heads, no batch", normal(5, 6)),
]
