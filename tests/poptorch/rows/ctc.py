"""Connectionist temporal classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

_LABELS = torch.tensor([[1, 2, 2], [3, 1, 0]])


def _loss(**settings: Any) -> Callable[..., torch.Tensor]:
    return lambda x, labels, times, counts: F.ctc_loss(x.log_softmax(-1), labels, times, counts, **settings)


_GIVEN = (normal(7, 2, 4), _LABELS, torch.tensor([7, 5]), torch.tensor([3, 2]))

ROWS = [
    Row("ctc", _loss(), _GIVEN, half=False),
    *(Row(f"ctc, {r}", _loss(reduction=r), _GIVEN, half=False) for r in ("sum", "none")),
    Row("ctc, labels in a row", _loss(), (_GIVEN[0], torch.tensor([1, 2, 2, 3, 1]), *_GIVEN[2:]), half=False),
    Row(
        "ctc, of torch",
        lambda x, labels, *sizes: torch.ctc_loss(x.log_softmax(-1), labels, *sizes, reduction=2),
        _GIVEN,
        half=False,
    ),
    Row("ctc, another blank", _loss(blank=3), (_GIVEN[0], _LABELS.clamp(max=2), *_GIVEN[2:]), half=False),
    Row(
        "ctc, impossible",
        _loss(zero_infinity=True),
        (normal(3, 2, 4), _LABELS, torch.tensor([3, 3]), torch.tensor([3, 2])),
        half=False,
    ),
]
