"""Reading and writing where tensors of indices, or masks, say."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, positive, whole

_x = normal(3, 4, 5)
_i = torch.tensor([2, 0, -1, 0])
_j = torch.tensor([[1, 0], [2, 1]])
_lines = torch.tensor([[0, 2, 1], [2, 2, 0]])  # indices of a dimension of size 3
_ties = torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 1.0]])
_zeros = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 1.0]])
_permuted = torch.tensor([[0, 2, 1], [2, 1, 0]])
_flat = normal(3, 3)


def _written(change: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The function that makes a change to a copy of its first argument."""

    def function(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        y = x * 1
        change(y, *others)
        return y

    return function


def _set(key: Callable[..., Any], value: Any = None) -> Callable[..., torch.Tensor]:
    """The function that writes what comes last, or a number, to a part of its first argument."""

    def change(x: torch.Tensor, *others: torch.Tensor) -> None:
        x[key(x, *others)] = others[-1] if value is None else value

    return _written(change)


_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def _scatter_reduced(
    name: str, x: torch.Tensor, y: torch.Tensor, reductions: Sequence[str] = _REDUCTIONS, include_self: bool = True
) -> Row:
    def function(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x.scatter_reduce(0, i, y, each, include_self=include_self) for each in reductions]

    return Row(f"scatter_reduce, {name}", function, (x, _lines, y))


def _index_reduced(name: str, include_self: bool = True) -> Row:
    def function(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        with warnings.catch_warnings(action="ignore"):  # PyTorch says that it may change
            return [x.index_reduce(1, i, y, each, include_self=include_self) for each in _REDUCTIONS[1:]]

    return Row(f"index_reduce, {name}", function, (positive(2, 3), torch.tensor([2, 0, 2]), positive(2, 3, seed=1)))


def _scatter_with_other_names(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with warnings.catch_warnings(action="ignore"):  # PyTorch prefers `scatter_reduce`
        return x.scatter(1, i, y, reduce="add"), x.scatter(0, i, 2.0, reduce="multiply")


def _add_in_place(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> None:
    x[i] += y


def _add_to_masked_rows(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> None:
    x.index_put_((mask,), y, accumulate=True)


_mask = torch.tensor([[True, False, True], [False, True, False], [True, True, False]])

ROWS = [
    Row("index", lambda x, i: (x[i], x[:, i], x[..., i], x[None, i], x[i, 1:3]), (_x, _i)),
    Row(
        "index by two",
        lambda x, i, j: (x[i, i], x[:, i, i], x[i, :, i], x[j, j[0]], x[j[:, :1], :, j[0]]),
        (_x, torch.tensor([2, 0, -1]), _j),
    ),
    Row("index by a list", lambda x, i: (x[[0, 2]], x[:, [1], i[:1]]), (_x, _i)),
    Row("index of integers", lambda x, i: (x[i], x[i] > 2), (whole(3, 2), _i), half=False),
    Row(
        "index_select",
        lambda x, i: (x.index_select(0, i), x.index_select(-1, i), x[0, 0, 0].index_select(0, i[1:2])),
        (_x, torch.tensor([2, 0, 1, 0])),
    ),
    Row("gather", lambda x, i: (x.gather(0, i), x.gather(1, i), x[0].gather(-1, i[0])), (_flat, _lines)),
    Row(
        "take",
        lambda x, i: (x.take(i), torch.take(x, i[0]), x.take_along_dim(i, 0), x.take_along_dim(i)),
        (_flat, _lines),
    ),
    Row("repeat_interleave", lambda x, i: x.repeat_interleave(i, 0, output_size=4), (_flat, torch.tensor([1, 0, 3]))),
    Row("masked_select of a constant", lambda x: x[torch.tensor([0, 2])], (_flat,)),
    Row("writing to indices", _set(lambda x, i, y: i), (_x, torch.tensor([2, 0]), normal(2, 4, 5)), half=False),
    Row(
        "writing to indices, broadcast",
        _set(lambda x, i, y: (slice(None), i)),
        (_x, torch.tensor([2, 0, -1]), normal(5)),
    ),
    Row(
        "writing to two indices",
        _set(lambda x, i, y: (i, slice(1, 3), i)),
        (_x, torch.tensor([2, 0]), normal(2, 2)),
        half=False,
    ),
    Row("writing a number to indices", _set(lambda x, i: (..., i), 3.0), (_x, _i), half=False),
    Row("writing to a list", _set(lambda x, y: (0, [1, 3])), (_x, normal(2, 5)), half=False),
    Row("x[i] += y", _written(_add_in_place), (_flat, torch.tensor([2, 0]), normal(2, 3))),
    Row(
        "index_put",
        lambda x, i, y: (x.index_put((i,), y), x.index_put((i, i), y[:, 0], accumulate=True)),
        (_flat, torch.tensor([2, 0]), normal(2, 3)),
    ),
    Row("index_put, added", lambda x, i, y: x.index_put((i,), y, accumulate=True), (_flat, _i, normal(4, 3))),
    Row("writing to a mask", _set(lambda x, mask, y: mask), (_flat, _mask, normal(1)), half=False),
    Row("writing a number to a mask", _set(lambda x: x > 0, -1.0), (_x,), half=False),
    Row("writing to rows in a mask", _set(lambda x, mask, y: mask), (_flat, _mask[0], normal(3)), half=False),
    Row(
        "writing to columns in a mask",
        _set(lambda x, mask, y: (slice(None), mask)),
        (_flat, _mask[0], normal(3, 1)),
        half=False,
    ),
    Row("writing to a mask, one after the other", _set(lambda x, mask, y: mask), (_flat, _mask, normal(5)), half=False),
    Row(
        "writing rows to a mask, one after the other",
        _set(lambda x, mask, y: mask),
        (_flat, _mask[0], normal(2, 3)),
        half=False,
    ),
    Row(
        "writing to a mask of dimensions in between",
        _set(lambda x, mask, y: (slice(None), mask)),
        (normal(2, 3, 3, 4), _mask, normal(2, 5, 1)),
    ),
    Row("adding in a mask", _written(_add_to_masked_rows), (_flat, _mask[0], normal(3))),
    Row(
        "masked_fill, where",
        lambda x, m: (x.masked_fill(m, 2.0), x.masked_fill(m[0], x[0, 0]), torch.where(m, x, 0.0)),
        (_flat, _mask),
    ),
    Row(
        "masked_scatter",
        lambda x, m, y: (x.masked_scatter(m, y), x.masked_scatter(m[0], y)),
        (_flat, _mask, normal(4, 3)),
    ),
    Row(
        "scatter",
        lambda x, i, y: (x.scatter(0, i, y), x.scatter(1, i, y), x.scatter(0, i, 2.5)),
        (_flat, _permuted, normal(2, 3)),
    ),
    Row(
        "scatter, smaller index",
        lambda x, i, y: (x.scatter(0, i[:, :2], y), x.scatter_add(1, i[:1], y)),
        (_flat, _permuted, _flat),
        gradient=False,  # PyTorch has none
    ),
    Row(
        "scatter of one number",
        lambda x, i, y: (x.scatter(0, i, y), x.gather(0, i), x.scatter_add(0, i, y)),
        (normal(1)[0], torch.tensor(0), normal(2)[0]),
    ),
    Row(
        "scatter, reduce",
        _scatter_with_other_names,
        (_flat, _lines, _flat),
        gradient=False,
    ),
    Row(
        "scatter_add",
        lambda x, i, y: (x.scatter_add(0, i, y), x.scatter_add(1, i, y)),
        (_flat, _lines, normal(2, 3)),
    ),
    Row(
        "scatter_ in place",
        _written(lambda x, i, y: x.scatter_(1, i, y).scatter_add_(0, i, y)),
        (_flat, _permuted, normal(2, 3)),
    ),
    _scatter_reduced("all", positive(3, 3), positive(2, 3)),
    _scatter_reduced("ties and zeros", torch.cat([_ties, _zeros[:1]]), _zeros),
    _scatter_reduced("without self", positive(3, 3), positive(2, 3), include_self=False),
    # PyTorch counts self among the winners all the same if it happens to be equal.
    _scatter_reduced("zeros, without self", _zeros[[0, 1, 1]], _zeros, ("sum", "prod", "mean"), include_self=False),
    Row(
        "scatter_reduce of integers",
        lambda x, i, y: [x.scatter_reduce(1, i, y, r, include_self=False) for r in ("amax", "amin", "mean", "sum")],
        (whole(3, 3), _lines, whole(2, 3)),
        half=False,
    ),
    Row(
        "index_add",
        lambda x, i, y: (x.index_add(0, i, y), x.index_add(1, i, y.t(), alpha=2)),
        (_flat, torch.tensor([2, 0, 2, 1]), normal(4, 3)),
    ),
    Row(
        "index_copy",
        lambda x, i, y: (x.index_copy(0, i, y), x.index_copy(1, i, y.t())),
        (_flat, torch.tensor([2, 0]), normal(2, 3)),
    ),
    Row(
        "index_fill",
        lambda x, i, y: (x.index_fill(1, i, 3.0), x.index_fill(0, i, y)),
        (_flat, torch.tensor([2, 0]), normal(1)[0]),
    ),
    Row(
        "index_ in place",
        _written(lambda x, i, y: x.index_add_(0, i, y).index_copy_(1, i, y.t()).index_fill_(0, i[:1], 2)),
        (_flat, torch.tensor([2, 0]), normal(2, 3)),
    ),
    _index_reduced("all"),
    _index_reduced("without self", include_self=False),
    Row(
        "put",
        lambda x, i, y: (x.put(i, y), x.put(i, y, accumulate=True), x.t().put(i, y)),
        (_flat, torch.tensor([[7, 0], [2, 8]]), normal(2, 2)),
    ),
    Row("one_hot", lambda i: (F.one_hot(i, 4), F.one_hot(i[0], num_classes=3)), (_lines,)),
    Row("embedding by index of a table", lambda table, i: table[i].sum(-2), (normal(3, 4), _lines)),
    Row(
        "nonzero_static",
        lambda x: (torch.nonzero_static(x > 0, size=4, fill_value=-2), x.nonzero_static(size=9)),
        (normal(2, 3),),
    ),
]
