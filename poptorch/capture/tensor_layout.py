"""`TensorLayout`: position of a tensor in its storage; `views_between`: views from one layout to another.

PyTorch knows for each tensor the numbers of its storage that it views. A value of a trace has numbers, and no storage:
a view of it is an op that arranges its numbers like a tensor elsewhere in the storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from poptorch.capture.trace import BASE, View
from poptorch.errors import createPoptorchError


def offsets_of(size: Sequence[int], stride: Sequence[int]) -> np.ndarray:
    """Storage offsets of tensor elements relative to the first element, as an array of the tensor's shape."""
    steps = zip(np.indices(size, sparse=True), stride, strict=True)
    return sum((index * step for index, step in steps), start=np.zeros(size, np.int64))


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether tensor elements may share storage elements, because one dimension strides within another's extent."""
    if 0 in size:
        return False
    extent = 1
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count > 1):
        if step < extent:
            return True
        extent += (count - 1) * step
    return False


def written_last(size: Sequence[int], stride: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Surviving elements after a complete write to a possibly self-overlapping tensor, and their storage offsets.

    PyTorch writes with the dimension of the longest step outermost, and of two with equal steps the longer one.

    Returns:
        The elements, counted in the order of the tensor; and their offsets, which increase.
    """
    order = _order(size, stride)
    offsets, last = np.unique(offsets_of(size, stride).ravel()[order][::-1], return_index=True)
    return order[::-1][last], offsets


def update_passes(size: Sequence[int], stride: Sequence[int]) -> list[np.ndarray]:
    """Passes of PyTorch's in-place update on a possibly self-overlapping tensor: each updates a storage element at most
    once.

    Returns:
        For each pass and each element, the element that updates the number shared by both; -1 where none does.
    """
    order, offsets = _order(size, stride), offsets_of(size, stride).ravel()
    _, number, counts = np.unique(offsets, return_inverse=True, return_counts=True)
    by_number = order[np.argsort(number[order], kind="stable")]  # the elements of the first number, of the next, ...
    starts = np.cumsum(counts) - counts
    passes = []
    for update_pass in range(counts.max()):
        element = by_number[np.minimum(starts + update_pass, len(order) - 1)]
        passes.append(np.where(update_pass < counts, element, -1)[number].reshape(size))
    return passes


def _order(size: Sequence[int], stride: Sequence[int]) -> np.ndarray:
    """Element numbers of a tensor in PyTorch's write order."""
    dims = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d], d))
    return np.arange(prod(size)).reshape(size).transpose(dims).ravel()


def overwrite(t: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write numbers into a tensor, even if it overlaps itself, where `copy_` raises an error."""
    if not overlaps(t.shape, t.stride()):
        t.copy_(numbers)
        return
    last, offsets = written_last(t.shape, t.stride())
    memory = t.as_strided((int(offsets[-1]) + 1,), (1,))
    memory[torch.from_numpy(offsets)] = numbers.reshape(-1)[torch.from_numpy(last)].to(t.dtype)


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a tensor in its storage: shape, strides, offset and element type.

    Attributes:
        shape: shape of the tensor.
        stride, offset: PyTorch's stride and offset, in elements.
        dtype: dtype of the elements.
        is_conj, is_neg: whether the tensor represents the conjugates, or the negatives, of the numbers.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def from_tensor(cls, t: torch.Tensor) -> TensorLayout:
        """The layout of a tensor."""
        return cls(tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype, t.is_conj(), t.is_neg())

    @property
    def overlaps(self) -> bool:
        """Whether tensor elements may share storage elements."""
        return overlaps(self.shape, self.stride)


def views_between(base: TensorLayout, seen: TensorLayout) -> tuple[View, ...]:
    """Views that convert between two tensor layouts of one storage.

    Args:
        base: layout of the viewed tensor. It does not overlap itself.

    Raises:
        poptorch.Error: if the view has numbers that are not in `base`, or reinterprets them in an unsupported way.
    """
    if seen == base:
        return ()
    order = sorted(range(len(base.shape)), key=lambda d: (-base.stride[d], d))
    shape = [base.shape[d] for d in order]
    views = [] if order == sorted(order) else [_view("permute", {"dims": tuple(order)}, shape, base.dtype)]
    now = replace(base, shape=tuple(shape), stride=tuple(base.stride[d] for d in order))
    casts, now = _reinterpret_views(now, seen.dtype)
    strided = _strided(now, seen)
    if now.dtype != seen.dtype or base.is_conj or base.is_neg or strided is None:
        seen_as, held_as = ("", "") if base.dtype == seen.dtype else (f"{seen.dtype} and ", f"{base.dtype} and ")
        raise createPoptorchError(
            f"A tensor of {seen_as}shape {seen.shape} with the strides {seen.stride}, from {seen.offset} on, looks at "
            f"memory of one of {held_as}shape {base.shape} with the strides {base.stride}, which ends before, or has "
            "gaps there. Make the latter contiguous, or use `view`, `select` and slices."
        )
    lazy = {"_conj": seen.is_conj, "_neg_view": seen.is_neg}
    last = [_view(op, {}, seen.shape, seen.dtype) for op, is_there in lazy.items() if is_there]
    return (*views, *casts, strided, *last)


def _view(op: str, how: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> View:
    name, _, overload = op.partition(".")
    return View(f"aten.{name}", overload or "default", {"input": BASE, **how}, (tuple(shape),), dtype)


def _reinterpret_views(base: TensorLayout, dtype: torch.dtype) -> tuple[list[View], TensorLayout]:
    """Views that reinterpret a tensor in memory order as another dtype, where possible; and the resulting layout."""
    views = []
    shape, stride, offset = base.shape, base.stride, base.offset
    if base.dtype.is_complex and not dtype.is_complex:
        base = TensorLayout((*shape, 2), (*(2 * step for step in stride), 1), 2 * offset, base.dtype.to_real())
        views.append(_view("view_as_real", {}, base.shape, base.dtype))
    elif dtype.is_complex and not base.dtype.is_complex and shape and _is_of_pairs(base):
        halved = (*shape[:-1], shape[-1] // 2)
        views.append(_view("view", {"size": (*halved, 2)}, (*halved, 2), base.dtype))
        base = TensorLayout(halved, (*(step // 2 for step in stride[:-1]), 1), offset // 2, base.dtype.to_complex())
        views.append(_view("view_as_complex", {}, halved, base.dtype))
    if base.dtype != dtype and base.dtype.itemsize == dtype.itemsize:
        base = replace(base, dtype=dtype)
        views.append(_view("view.dtype", {"dtype": dtype}, base.shape, dtype))
    return views, base


def _is_of_pairs(base: TensorLayout) -> bool:
    """Whether elements of a layout, in memory order, form pairs without gaps."""
    *outer, innermost = base.stride
    return innermost == 1 and not any(n % 2 for n in (base.shape[-1], base.offset, *outer))


def _strided(base: TensorLayout, seen: TensorLayout) -> View | None:
    """View with another layout, strided over elements in memory order; `None` if `base` lacks some elements."""
    stride, offset = list(seen.stride), 0
    if 0 not in seen.shape:
        blocks = _blocks(base)
        begin = _steps(seen.offset - base.offset, blocks)
        steps_of_dims = [_steps(step if size > 1 else 0, blocks) for size, step in zip(seen.shape, stride, strict=True)]
        ends = [
            first + sum((size - 1) * steps[i] for size, steps in zip(seen.shape, steps_of_dims, strict=True))
            for i, first in enumerate(begin)
        ]
        if any(first < 0 or end >= count for first, end, (count, _, _) in zip(begin, ends, blocks, strict=True)):
            return None
        offset, *stride = (
            sum(n * b[2] for n, b in zip(steps, blocks, strict=True)) for steps in (begin, *steps_of_dims)
        )
    settings = {"size": seen.shape, "stride": tuple(stride), "storage_offset": offset}
    return replace(_view("as_strided", settings, seen.shape, seen.dtype), repeats=seen.overlaps)


def _blocks(base: TensorLayout) -> list[tuple[int, int, int]]:
    """Dimensions in memory order, outermost first, with contiguous ones merged: number of elements, memory stride, and
    stride without gaps. The last memory stride is 1."""
    blocks = [(1, 1, 1)]
    for size, stride in zip(reversed(base.shape), reversed(base.stride), strict=True):
        count, step, dense = blocks[-1]
        if size == 1:
            continue
        if stride == count * step:
            blocks[-1] = (count * size, step, dense)
        else:
            blocks.append((size, stride, count * dense))
    return blocks[::-1]


def _steps(offset: int, blocks: Sequence[tuple[int, int, int]]) -> list[int]:
    """Decompose a memory offset into numbers of steps per block."""
    steps = []
    for _, step, _ in blocks:
        steps.append(offset // step)
        offset -= steps[-1] * step
    return steps
