"""Ops that arrange numbers in another way, views, and writing through them."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal


def _written_through(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 1
    y[:, 1] = 0
    z = y.t()
    z[2] *= 2
    y[0, ::2] += x[1, ::2]
    return x, y, z


ROWS = [
    Row("view", lambda x: x.view(3, -1), (normal(2, 3),)),
    Row("reshape after t", lambda x: x.t().reshape(6), (normal(2, 3),)),
    Row("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1)), (normal(2, 3),)),
    Row("permute", lambda x: x.permute(2, 0, 1), (normal(2, 3, 4),)),
    Row("expand", lambda x: x.expand(2, -1, 3), (normal(4, 1),)),
    Row("select", lambda x: x[:, -1], (normal(2, 3),)),
    Row("slice", lambda x: x[1:, ::2], (normal(3, 5),)),
    Row("cat", lambda x, y: torch.cat([x, y], 1), (normal(2, 3), normal(2, 1))),
    Row("as_strided", lambda x: x.as_strided((2, 2), (1, 2), 1), (normal(2, 3),)),
    Row("writing through views", _written_through, (normal(2, 3),)),
    Row("constants", lambda x: x * torch.tensor([1.0, 2, 3]), (normal(2, 3),)),
]
