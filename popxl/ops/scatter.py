"""Writing elements to indices: `scatter`, and `onehot`, which writes one value into rows of another.

`put_block` and `read_block` serve all ops that move single elements by index, including those of
`popxl.ops.scatter_reduce`.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.core.declaration import OpKind
from popxl.core.tensor import Constant, Tensor
from popxl.errors import PopxlError
from popxl.ops.host import init
from popxl.ops.index import or_beyond
from popxl.ops.precision import widen
from popxl.values.shapes import integer, like_first, of_shape, one_axis
from popxl.values.spec import TensorSpec

# Targets of indices -------------------------------------------------------------------------------------------------

_COUNTED_BY_INT32 = 2**31


def put_block(t: Any, indices: Any, values: Any, axis: int, how: str = "set") -> Any:
    """Scatter a block of values into an array, at block positions except along `axis`, where indices decide.

    Indices out of range put nothing anywhere.

    Args:
        indices: array of the shape of the block; or with size 1 on all axes but `axis`, to move whole slices.
        values: the block; but on `axis`, no larger than `t`.
        axis: the axis that the indices are for, counted from the front.
        how: `"set"`; or `"add"`, `"max"`, `"min"`, which combine all elements for one position with its old content.
    """
    view, index = _address(t.shape, indices, values.shape, axis)
    target = t.reshape(view).at[index]
    return getattr(target, how)(values, mode="drop", wrap_negative_indices=False).reshape(t.shape)


def read_block(t: Any, indices: Any, block: tuple[int, ...], axis: int) -> Any:
    """Gather the block that `put_block` would write; 0 for dropped positions."""
    view, index = _address(t.shape, indices, block, axis)
    return t.reshape(view).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def leading(array: Any, shape: tuple[int, ...]) -> Any:
    """The leading block of an array."""
    return array[tuple(map(builtins.slice, shape))]


def padded(block: Any, shape: tuple[int, ...]) -> Any:
    """A leading block followed by zeros."""
    return jnp.pad(block, [(0, size - length) for size, length in zip(shape, block.shape, strict=True)])


def _address(shape: tuple[int, ...], indices: Any, block: tuple[int, ...], axis: int) -> tuple[Any, Any]:
    """A shape to view the array in, and the places in there, for JAX's indexing."""
    index = or_beyond(indices, shape[axis])
    if math.prod(indices.shape) == indices.shape[axis]:
        slices: list[Any] = [builtins.slice(size) for size in block]  # whole slices, which is many times faster
        slices[axis] = index.reshape(-1)
        return shape, tuple(slices)
    axis_indices = [index if d == axis else lax.broadcasted_iota(jnp.int32, block, d) for d in range(len(block))]
    if math.prod(shape) >= _COUNTED_BY_INT32:
        return shape, tuple(axis_indices)
    # One number for each element instead of one for each axis: twice as fast on a CPU, reading four times.
    flat = sum(axis_index * math.prod(shape[d + 1 :]) for d, axis_index in enumerate(axis_indices))
    return (-1,), (jnp.where(index < shape[axis], flat, math.prod(shape)),)


# Scatter ------------------------------------------------------------------------------------------------------------


def _scattered(t: Any, indices: Any, values: Any, *, axis: int) -> TensorSpec:
    dimension = one_axis(axis, len(t.shape))
    if not len(t.shape) == len(indices.shape) == len(values.shape):
        raise PopxlError("`t`, `indices` and `values` have to have the same rank.")
    for d, (size, index, value) in enumerate(zip(t.shape, indices.shape, values.shape, strict=True)):
        if index > value:
            raise PopxlError(f"in dimension {d} there are {index} `indices` for {value} `values`.")
        if index > size and d != dimension:
            raise PopxlError(f"in dimension {d}, which is not `axis`, `indices` is larger than `t`: {index} > {size}.")
    return like_first(t)


def _scatter_lowering(t: Any, indices: Any, values: Any, *, axis: int) -> Any:
    if values.dtype != t.dtype:
        raise ValueError(f"`values` is {values.dtype} and `t` is {t.dtype}; expected one dtype.")
    return put_block(t, indices, leading(values, indices.shape), axis % t.ndim)


_scatter: OpKind = OpKind(
    "Scatter",
    _scatter_lowering,
    shape=_scattered,
    # If several values go to one element, all get its gradient: the one that was written is unknown.
    gradient={
        "t": lambda g, indices, axis: _scatter(g, indices, init(indices.shape, g.dtype), axis=axis),
        "values": lambda g, indices, values_spec, attributes: _scatter_values_grad(
            g, indices, **attributes, shape=values_spec.shape
        ),
    },
)
_scatter_values_grad: OpKind = OpKind(
    "ScatterValuesGrad",
    lambda g, indices, *, axis, shape: padded(read_block(g, indices, indices.shape, axis % g.ndim), shape),
    shape=of_shape,
)


def scatter(
    t: Tensor, indices: Tensor, values: Tensor, axis: int = 0, available_memory_proportion: float | None = None
) -> Tensor:
    """`t` with some elements replaced: on `axis` an index says which, on the other axes a value's own position.

    For matrices and `axis=0`: `out[indices[i, j], j] = values[i, j]`.

    Args:
        t: tensor of rank 1 or more.
        indices: int32 or uint32 tensor of the same rank; but on `axis`, no larger than `t`. Indices out of range,
            negative ones too, replace nothing. No gradient.
        values: tensor of the dtype of `t` and the same rank, at least as large as `indices`; only its leading block
            of that shape is used.
        axis: the dimension that the indices are for; negative ones count from the back.
        available_memory_proportion: accepted for programs that tune memory; no effect.

    Returns:
        A new tensor like `t`. If several values go to one element, it gets an undefined one of them. The gradient goes
        to `values` where they were used, and to `t` elsewhere.

    Raises:
        PopxlError: if the ranks differ, the shapes do not fit, or there is no such axis; when a session is made, if
            `values` is not of the dtype of `t`.

    See also: `torch.scatter`, `numpy.put_along_axis`.

    Example:
        >>> y = ops.scatter(x, indices, values, axis=1)
    """
    return _scatter(t, indices, values, axis=integer(axis, "scatter: `axis`"))


# One-hot ------------------------------------------------------------------------------------------------------------


def _hot_spec(t: Any, num_classes: Any, values: Any, *, axis: int, classes: int | None) -> TensorSpec:
    if math.prod(num_classes.shape) != 1 or not num_classes.dtype.is_int:
        raise PopxlError("`num_classes` has to be a single integer.")
    if classes is None:
        raise PopxlError(
            "`num_classes` is known only when the program runs, and the shape of the result has to be known before. "
            "Make it with `popxl.constant(number)`, in the same graph."
        )
    if classes < 0:
        raise PopxlError(f"`num_classes` is {classes}; there cannot be fewer than 0.")
    if values.shape != (2,):
        raise PopxlError("`values` has to have the shape (2,): the value for all other classes, and that for the hot.")
    rank = len(t.shape)
    if not -1 <= axis <= rank:
        raise PopxlError(f"`axis` is {axis}; expected 0 to {rank}, where the classes are in the result, or -1, last.")
    dimension = rank if axis == -1 else axis
    return TensorSpec(t.shape[:dimension] + (classes,) + t.shape[dimension:], values.dtype)


def _hot(t: Any, num_classes: Any, values: Any, *, axis: int, classes: int) -> Any:
    index = jnp.expand_dims(or_beyond(t, classes), axis)
    off_value, on_value = widen(values)  # the gradient adds up, and rounds once
    shape = [classes if d == axis % index.ndim else 1 for d in range(index.ndim)]
    return jnp.where(index == jnp.arange(classes, dtype=jnp.int32).reshape(shape), on_value, off_value)


_onehot = OpKind("OneHot", _hot, shape=_hot_spec, result="onehot_out")


def onehot(t: Tensor, num_classes: Tensor, values: Tensor, axis: int) -> Tensor:
    """One-hot encoding: a class row per element, with on value and off value.

    Args:
        t: integer tensor of any shape. An element outside of `[0, num_classes)` names no class.
        num_classes: number of classes: a constant of one integer.
        values: tensor `[off, on]`.
        axis: position of the dimension of the classes in the result: 0 to the rank of `t`, or -1 for last.

    Returns:
        A new tensor of the dtype of `values`, of the shape of `t` with `num_classes` inserted at `axis`. Only `values`
        has a gradient.

    Raises:
        PopxlError: if `num_classes` is not a constant of one integer, `values` not two values, or there is no such
            axis.

    See also: `torch.nn.functional.one_hot`.

    Example:
        >>> y = ops.onehot(labels, popxl.constant(10), popxl.constant([0.0, 1.0]), axis=-1)
    """
    classes = None
    if isinstance(num_classes, Constant) and num_classes.dtype.is_int and num_classes.nelms == 1:
        classes = int(num_classes.data.item())
    return _onehot(t, num_classes, values, axis=integer(axis, "onehot: `axis`"), classes=classes)
