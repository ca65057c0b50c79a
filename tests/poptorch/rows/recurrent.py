"""Recurrent layers and cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.poptorch.operators import Row, normal


def _module(kind: type[torch.nn.Module], *sizes: int, **settings: Any) -> Callable[..., Any]:
    """A module as a function of what it is given, and of its parameters, which get their numbers from the row."""
    module = kind(*sizes, **settings)
    names = [name for name, _ in module.named_parameters()]

    def function(count: int, *tensors: torch.Tensor) -> Any:
        given, parameters = tensors[:count], tensors[count:]
        state = given[1] if count == 2 else tuple(given[1:]) if count == 3 else None
        arguments = (given[0],) if state is None else (given[0], state)
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), arguments)

    return function


def _row(name: str, kind: type[torch.nn.Module], *given: torch.Tensor, sizes: tuple[int, ...], **settings: Any) -> Row:
    module = kind(*sizes, **settings)
    parameters = [normal(*p.shape, seed=i) / 2 for i, p in enumerate(module.parameters())]
    return Row(name, _module(kind, *sizes, **settings), (len(given), *given, *parameters), tolerance=2e-5)


LSTM, GRU, RNN = torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN

ROWS = [
    _row("lstm", LSTM, normal(5, 2, 4), sizes=(4, 3)),
    _row("lstm, state", LSTM, normal(5, 2, 4), normal(1, 2, 3), normal(1, 2, 3, seed=1), sizes=(4, 3)),
    _row("lstm, two layers both ways", LSTM, normal(5, 2, 4), sizes=(4, 3, 2), bidirectional=True, batch_first=True),
    _row("lstm without bias, projected", LSTM, normal(4, 2, 5), sizes=(5, 4), bias=False, proj_size=3),
    _row("lstm without batch", LSTM, normal(5, 4), sizes=(4, 3)),
    _row("gru", GRU, normal(5, 2, 4), normal(1, 2, 3), sizes=(4, 3)),
    _row("gru both ways", GRU, normal(5, 2, 4), sizes=(4, 3), bidirectional=True, batch_first=True),
    _row("rnn", RNN, normal(5, 2, 4), sizes=(4, 3)),
    _row("rnn relu, three layers", RNN, normal(5, 2, 4), sizes=(4, 3, 3), nonlinearity="relu"),
    _row("lstm cell", torch.nn.LSTMCell, normal(2, 4), normal(2, 3), normal(2, 3, seed=1), sizes=(4, 3)),
    _row("gru cell", torch.nn.GRUCell, normal(2, 4), normal(2, 3), sizes=(4, 3)),
    _row("rnn cell", torch.nn.RNNCell, normal(2, 4), normal(2, 3), sizes=(4, 3)),
    _row("rnn cell relu, no bias", torch.nn.RNNCell, normal(2, 4), sizes=(4, 3), nonlinearity="relu", bias=False),
]
