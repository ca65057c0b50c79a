"""Tensors made of plain numbers."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal, whole


def _like(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros_like(x),
        torch.ones_like(x, dtype=torch.int32),
        torch.full_like(x, 2.5),
        x.new_zeros(4),
        x.new_ones((2, 1)),
        x.new_full((3,), 7),
        x.new_tensor([1.0, 2]),
        x + torch.zeros(3).to(x.dtype),
    )


def _written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is made empty, and then filled."""
    made = (
        torch.empty(2, 3, dtype=x.dtype),
        torch.empty_like(x),
        x.new_empty(2),
        torch.empty_strided((2, 2), (1, 2)),
        x.new_empty_strided((2, 3), (3, 1)),
        torch.empty_permuted((2, 3), (1, 0)),
    )
    for t in made:
        t[0] = 1
        t[1] = 2
    y, z = torch.empty(2, 3, dtype=x.dtype), torch.empty_like(x)
    y.copy_(x)
    z.fill_(3)
    return *made, y, z, x.new_empty(2).fill_(1)


def _sequences(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.arange(5),
        torch.arange(2, 11, 3),
        torch.arange(5, -1, -2),
        torch.arange(0, 1, 0.3),
        torch.arange(0.0, -8.5, -4.0, dtype=torch.int64),
        torch.arange(3, dtype=x.dtype),
        torch.arange(x.shape[1]),
        torch.linspace(-1, 2, 7),
        torch.linspace(1, 2, 1),
        torch.logspace(0, 2, 5),
        torch.logspace(0, 3, 4, base=2),
    )


def _tables(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.eye(3),
        torch.eye(2, 4, dtype=x.dtype),
        torch.eye(3, dtype=torch.int64),
        torch.tril_indices(3, 4),
        torch.triu_indices(3, 3, offset=1),
        torch.hann_window(5),
        torch.hamming_window(4, periodic=False),
        torch.bartlett_window(4),
        torch.blackman_window(6),
        torch.kaiser_window(5, True, 8.0),
    )


def _plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(2, 3),
        torch.ones(4, dtype=torch.bool),
        torch.full((2,), 3),
        torch.full((2,), 0.5, dtype=x.dtype),
        torch.full((), True),
        torch.scalar_tensor(2.5),
        torch.tensor([[1, 2], [3, 4]]),
        torch.as_tensor([0.5]),
        x * torch.tensor(2.0),
    )


ROWS = [
    Row("zeros, ones, full", _plain, (normal(2, 3),)),
    Row("like", _like, (normal(2, 3),)),
    Row("like integers", lambda x: (torch.zeros_like(x), x.new_ones(2), torch.full_like(x, 4)), (whole(3),)),
    Row("empty", _written, (normal(2, 3),)),
    Row("sequences", _sequences, (normal(2, 3),)),
    Row(
        "sequences between tensors",
        lambda x, y: (
            torch.linspace(x, 4, 5),
            torch.linspace(x, y, 3),
            torch.linspace(1, y, 1),
            torch.logspace(x, y, 3, base=2),
            torch.logspace(0, y, 4),
            torch.logspace(x, 2, 3),
        ),
        (torch.tensor(1.5), torch.tensor(2.5)),
        gradient=False,
    ),
    Row("tables", _tables, (normal(2, 3),)),
    Row(
        "fill_, zero_",
        lambda x, y: (x.clone().fill_(2), x.clone().zero_(), x.fill_(y.sum())),
        (normal(2, 3), normal(2)),
        half_tolerance=1e-2,
    ),
    Row("fill", lambda x: torch.fill(x, 3), (normal(2, 3),)),
]
