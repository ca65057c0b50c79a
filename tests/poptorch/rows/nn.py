"""Softmax, its logarithm, and embeddings."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, whole

_TABLE, _WORDS = normal(5, 3), whole(2, 4, high=5)
_FLAT, _OFFSETS = whole(7, high=5), [0, 3, 3, 5]


def _bag(title: str, **how: object) -> Row:
    """Of words in a row, with the beginnings of bags."""
    return Row(
        f"embedding_bag, {title}",
        lambda words, table: F.embedding_bag(words, table, torch.tensor(_OFFSETS), **how),
        (_FLAT, _TABLE),
    )


ROWS = [
    Row("softmax", lambda x: F.softmax(x, 1), (normal(2, 3),)),
    Row("softmax, method", lambda x: x.softmax(-2), (normal(2, 3),)),
    Row("softmax, dtype", lambda x: torch.softmax(x, 0, dtype=torch.float32), (normal(2, 3),)),
    Row(
        "softmax, safe",
        lambda x: torch.ops.aten._safe_softmax(x.masked_fill(torch.tensor([[True], [False]]), -torch.inf), 1),
        (normal(2, 3),),
    ),
    Row("softmax of a number", lambda x: x.softmax(0), (normal(),)),
    Row("log_softmax", lambda x: F.log_softmax(x, 1), (normal(2, 3, 4) * 30,), half_tolerance=2e-2),
    Row("log_softmax, method", lambda x: x.log_softmax(-1), (normal(2, 3),)),
    Row("softmax, special", lambda x: (torch.special.softmax(x, 0), torch.special.log_softmax(x, 1)), (normal(2, 3),)),
    Row("softmin", lambda x: F.softmin(x, 0), (normal(2, 3),)),
    Row("embedding", F.embedding, (_WORDS, _TABLE)),
    Row("embedding, padding", lambda words, table: F.embedding(words, table, padding_idx=-4), (_WORDS, _TABLE)),
    Row(
        "embedding, by frequency",
        lambda words, table: F.embedding(words, table, scale_grad_by_freq=True),
        (_WORDS, _TABLE),
    ),
    Row(
        "embedding, max_norm",
        lambda words, table: F.embedding(words, table * 1, max_norm=1.5),
        (_WORDS, _TABLE),
        gradient=False,
    ),
    Row("embedding, torch", lambda words, table: torch.embedding(table, words, 2), (_WORDS, _TABLE)),
    Row("tied embedding", lambda words, table: F.linear(F.embedding(words, table), table), (_WORDS, _TABLE)),
    *(
        Row(
            f"embedding_bag 2d, {mode}",
            lambda words, table, m=mode: F.embedding_bag(words, table, mode=m),
            (_WORDS, _TABLE),
        )
        for mode in ("sum", "mean", "max")
    ),
    *(_bag(mode, mode=mode) for mode in ("sum", "mean", "max")),
    *(_bag(f"{mode}, padding", mode=mode, padding_idx=2) for mode in ("sum", "mean", "max")),
    Row(
        "embedding_bag, last offset",
        lambda words, table: F.embedding_bag(
            words, table, torch.tensor([0, 3, 3, 7]), mode="sum", include_last_offset=True
        ),
        (_FLAT, _TABLE),
    ),
    Row(
        "embedding_bag, max_norm",
        lambda words, table: F.embedding_bag(words, table * 1, max_norm=1.5),
        (_WORDS, _TABLE),
        gradient=False,
    ),
    Row(
        "embedding_bag, weights",
        lambda words, table, weights: F.embedding_bag(words, table, per_sample_weights=weights, mode="sum"),
        (_WORDS, _TABLE, normal(2, 4)),
    ),
]
