"""Picking elements by index: `gather`, and what `t[key]` means."""

from __future__ import annotations

import builtins
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.create import constant
from popxl.errors import PopxlError
from popxl.op import OpKind
from popxl.ops.logic import where
from popxl.ops.shape import slice, squeeze, subsample
from popxl.shapes import integer, one_axis
from popxl.spec import TensorSpec
from popxl.tensor import Tensor
from popxl.utils import to_numpy


def _gathered(t: Any, indices: Any, *, axis: int, **hints: Any) -> TensorSpec:
    at = one_axis(axis, len(t.shape))
    return TensorSpec(t.shape[:at] + indices.shape + t.shape[at + 1 :], t.dtype)


def _inside(indices: Any, size: int) -> Any:
    """Which indices are in range. Only then may 64 bits be narrowed, which wraps; 8 bits may not hold the size."""
    wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    return (wide >= 0) & (wide < size)


def _gather(t: Any, indices: Any, *, axis: int, zero_OOR: bool, **hints: Any) -> Any:
    axis %= t.ndim
    inside = _inside(indices, t.shape[axis])
    # JAX counts negative indices from the back; these are out of range here, as large ones are.
    taken = jnp.take(t, jnp.where(inside, indices.astype(jnp.int32), 0), axis=axis, mode="clip")
    if zero_OOR:
        rows = inside.reshape((1,) * axis + inside.shape + (1,) * (t.ndim - axis - 1))
        taken = jnp.where(rows, taken, jnp.zeros((), t.dtype))
    return taken


def _scattered(g: Any, indices: Any, *, axis: int, shape: tuple[int, ...], **hints: Any) -> Any:
    axis %= len(shape)
    # Out of range contributes nothing: such indices are moved beyond the end, where "drop" drops them.
    index = jnp.where(_inside(indices, shape[axis]), indices.astype(jnp.int32), shape[axis])
    return jnp.zeros(shape, g.dtype).at[(builtins.slice(None),) * axis + (index,)].add(g, mode="drop")


_gather_kind = OpKind(
    "Gather",
    _gather,
    shape=_gathered,
    gradient={
        "t": lambda g, t_spec, indices, axis: _gather_grad(g, indices, axis=axis, shape=t_spec.shape),
    },
)
_gather_grad: OpKind = OpKind(
    "GatherGrad", _scattered, shape=lambda g, indices, *, shape, **where: TensorSpec(shape, g.dtype)
)


def gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """Pick slices of `t` along an axis, as `numpy.take` does.

    Args:
        t: tensor of rank 1 or more.
        indices: int32 or uint32 tensor of any shape. Negative indices are out of range: they do not count from the
            back.
        axis: the dimension to pick from; negative ones count from the back.
        available_memory_proportion: accepted for programs that tune memory; without effect.
        zero_OOR: give zeros for indices out of range; otherwise what they give is not defined.

    Returns:
        A new tensor of shape `t.shape[:axis] + indices.shape + t.shape[axis + 1:]`. Its gradient adds up where indices
        repeat.

    Raises:
        PopxlError: if there is no such axis.

    See also: `numpy.take`.

    Example:
        >>> rows = ops.gather(table, ids)
    """
    return _gather_kind(t, indices, axis=integer(axis, "gather: `axis`"), zero_OOR=bool(zero_OOR))


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
    if not isinstance(key, Tensor):
        try:
            array = to_numpy(key)
        except (TypeError, ValueError) as problem:
            raise _bad_key(t, key) from problem
        if array.dtype.kind not in "biu":
            raise _bad_key(t, key)
        key = constant(array)
    if key.dtype is dtypes.bool:
        return where(key, t, constant(0, t.dtype))
    if key.dtype.is_int:
        return gather(t, key)
    raise _bad_key(t, key)


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
