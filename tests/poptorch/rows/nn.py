"""Layers that are not losses."""

from __future__ import annotations

from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

ROWS = [
    Row("linear", F.linear, (normal(2, 3), normal(4, 3), normal(4))),
    Row("linear without bias", F.linear, (normal(2, 5, 3), normal(4, 3))),
    Row("softmax", lambda x: F.softmax(x, 1), (normal(2, 3),)),
    Row("softmax, method", lambda x: x.softmax(-2), (normal(2, 3),)),
]
