"""`getitem` and `setitem`: indexing where a tensor of shape [] says which row, and only a run knows its number.

PyTorch would read it, as it does with Python's numbers. Here the row is taken by `index_select`, as one of one row, and
put back by `index_copy_`; all other indices do what they always do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["getitem", "setitem"]


def getitem(t: torch.Tensor, index: Any, is_known: Callable[[torch.Tensor], bool]) -> torch.Tensor:
    """`t[index]`. Tensors of which it is known what they are PyTorch can read."""
    found = _first_unknown(t, index, is_known)
    if found is None:
        return t[index]
    dim, row, rest = found
    return getitem(t.index_select(dim, row), rest, is_known)


def setitem(t: torch.Tensor, index: Any, value: Any, is_known: Callable[[torch.Tensor], bool]) -> None:
    """`t[index] = value`."""
    found = _first_unknown(t, index, is_known)
    if found is None:
        t[index] = value
        return
    dim, row, rest = found
    rows = t.index_select(dim, row)
    setitem(rows, rest, value, is_known)
    t.index_copy_(dim, row, rows)


def _first_unknown(
    t: torch.Tensor, index: Any, is_known: Callable[[torch.Tensor], bool]
) -> tuple[int, torch.Tensor, tuple[Any, ...]] | None:
    """The dimension that the first such tensor indexes, which row it says, and the index once that row is taken."""
    indices = index if isinstance(index, tuple) else (index,)
    taken = [_dims(each) for each in indices]
    dim = 0
    for i, each in enumerate(indices):
        if each is Ellipsis:
            dim = t.dim() - sum(taken[i + 1 :])
        elif _is_row(each) and dim < t.dim() and not is_known(each):
            row = torch.where(each < 0, each + t.shape[dim], each).reshape(1).long()
            return dim, row, (*indices[:i], 0, *indices[i + 1 :])
        dim += taken[i]
    return None


def _dims(index: Any) -> int:
    """How many dimensions an index is for."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) else 1


def _is_row(index: Any) -> bool:
    is_integer = isinstance(index, torch.Tensor) and index.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return is_integer and not index.dim()
