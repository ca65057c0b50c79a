"""Samplers: per-process shares of data sets, and combination of user-defined batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Sampler


class Share(Sampler[int]):
    """Sampler of one process's share of a data set. All processes create it with identical arguments.

    Each takes a contiguous block, the first process the first. With a seed, the blocks are of a shuffled order, which
    is the same in all processes and another one in each epoch.

    Args:
        size: number of elements in the data set.
        process: number of this process, from 0.
        processes: number of processes.
        multiple: unit of each process's share: all take the same multiple of this number of elements. The remaining
            ones are at the end of the data set in one epoch, at its beginning in the next. If None, all elements are
            taken, and the first processes may have one more than the others.
        seed: seed of the shuffling; None keeps the order.

    Example:
        >>> share = Share(11, process=1, processes=2, multiple=2, seed=None)
        >>> list(share), list(share)
        ([4, 5, 6, 7], [7, 8, 9, 10])
        >>> list(Share(11, process=1, processes=2, multiple=None, seed=None))
        [6, 7, 8, 9, 10]
    """

    def __init__(self, size: int, process: int, processes: int, multiple: int | None, seed: int | None) -> None:
        self._size = size
        self._seed = seed
        self._epoch = 0
        if multiple is None:
            each, more = divmod(size, processes)
            self._start = process * each + min(process, more)
            self._length = each + (process < more)
            self._left_over = 0
        else:
            self._length = size // (multiple * processes) * multiple
            self._start = process * self._length
            self._left_over = size - processes * self._length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        start = self._start + self._left_over * (self._epoch % 2)
        order: Sequence[int] = range(self._size)
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        self._epoch += 1
        return iter(order[start : start + self._length])


class JoinedBatches(Sampler[list[Any]]):
    """Batch sampler concatenating several index batches into one.

    Args:
        batches: a batch sampler.
        count: number of batches to join.
        drop_last: whether to drop an incomplete batch at the end.

    Example:
        >>> list(JoinedBatches([[0, 1], [5], [2, 3]], count=2, drop_last=False))
        [[0, 1, 5], [2, 3]]
    """

    def __init__(self, batches: Iterable[Sequence[Any]], count: int, drop_last: bool) -> None:
        self._batches = batches
        self._count = count
        self._drop_last = drop_last

    def __len__(self) -> int:
        parts = len(self._batches)  # type: ignore[arg-type]
        return parts // self._count if self._drop_last else math.ceil(parts / self._count)

    def __iter__(self) -> Iterator[list[Any]]:
        parts: list[Sequence[Any]] = []
        for batch in self._batches:
            parts.append(batch)
            if len(parts) == self._count:
                yield list(chain.from_iterable(parts))
                parts = []
        if parts and not self._drop_last:
            yield list(chain.from_iterable(parts))
