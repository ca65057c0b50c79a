"""Meaning of `t[key]`: slices, selected rows, masks; every case is an op."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.tensor import Tensor, taken_back_on_failure
from popxl.errors import PopxlError
from popxl.ops.index import gather
from popxl.ops.logic import where
from popxl.ops.shape import squeeze
from popxl.ops.slicing import slice, subsample
from popxl.utils import to_numpy


def getitem(t: Tensor, key: Any) -> Tensor:
    """`t[key]`.

    * An integer, a slice, or a tuple of them: the block, as in NumPy; integers drop their axis. Steps may be any but 0.
    * An integer tensor, array or list: `gather` on axis 0.
    * A bool tensor, array or list: the elements of `t`, with 0 where the mask is false. The shape stays.

    Raises:
        TypeError: for any other key.
        ValueError: for an integer out of range.
        PopxlError: for more slices than dimensions, or a step of 0.
    """
    if isinstance(key, bool | np.bool_ | np.integer | str | float) or key is None or key is Ellipsis:
        raise _bad_key(t, key)
    keys = key if isinstance(key, tuple) else (key,)
    if all(isinstance(k, int | builtins.slice) for k in keys):
        return _basic(t, keys)
    if isinstance(key, Tensor):
        return _by_tensor(t, key)
    try:
        array = to_numpy(key)
    except (TypeError, ValueError) as problem:
        raise _bad_key(t, key) from problem
    if array.dtype.kind not in "biu":
        raise _bad_key(t, key)
    with taken_back_on_failure(constant(array)) as key:
        return _by_tensor(t, key)


def _by_tensor(t: Tensor, key: Tensor) -> Tensor:
    """The rows that integers name, or the elements that bools leave."""
    if key.dtype.is_int:
        return gather(t, key)
    if key.dtype is not dtypes.bool:
        raise _bad_key(t, key)
    with taken_back_on_failure(constant(0.0, t.dtype)) as zero:
        return where(key, t, zero)


def _bad_key(t: Tensor, key: Any) -> TypeError:
    return TypeError(
        f"{t!r} cannot be indexed with {key!r} ({type(key).__name__}): use integers and slices, or a tensor, array or "
        "list of integers or bools."
    )


def _basic(t: Tensor, keys: tuple[Any, ...]) -> Tensor:
    """Slices and integers: a slice with steps of 1 and -1, then every n-th element, then without the integers' axes."""
    if len(keys) > t.rank:
        raise PopxlError(f"{t!r} of rank {t.rank} cannot be indexed with {len(keys)} slices: {keys}.")
    starts: list[int | None] = []
    stops: list[int | None] = []
    steps: list[int] = []
    strides: list[int] = []
    dropped: list[int] = []
    for axis, (k, size) in enumerate(zip(keys, t.shape, strict=False)):
        if isinstance(k, builtins.slice):
            if k.step == 0:
                raise PopxlError(f"{t!r}: the step of the slice {k} is 0.")
            step = 1 if k.step is None else int(k.step)
            starts.append(k.start)
            stops.append(k.stop)
            steps.append(int(math.copysign(1, step)))
            strides.append(abs(step))
        else:
            index = k + size if k < 0 else int(k)
            if not 0 <= index < size:
                raise ValueError(f"{t!r}: index {k} is out of range for dimension {axis} of size {size}.")
            starts.append(index)
            stops.append(index + 1)
            steps.append(1)
            strides.append(1)
            dropped.append(axis)
    block = slice(t, starts, stops, steps, list(range(len(keys))))
    if any(stride > 1 for stride in strides):
        block = subsample(block, strides)
    return squeeze(block, dropped) if dropped else block
