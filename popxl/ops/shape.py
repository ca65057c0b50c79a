"""Ops that reorder axes and change sizes: reshape, squeeze, transpose, and their view forms; and triangles.

A function with a trailing underscore returns a *view*: the result shares storage with its operand, so that a write to
either is visible in the other. Each view op defines how to read the view from its base (its lowering) and how to write
the view back into the base (`put`); no other part of popxl needs to know the kinds of views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp

from popxl.core.declaration import OpKind
from popxl.core.recording import Op, not_a_tensor
from popxl.core.tensor import Tensor
from popxl.core.traits import ShardingRule
from popxl.errors import PopxlError
from popxl.values.shapes import integer, integers, like_first
from popxl.values.spec import TensorSpec
from popxl.values.subscripts import permutation_subscripts, reshape_subscripts

# Reshape ------------------------------------------------------------------------------------------------------------


def _inferred(before: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes after a reshape, with the inferred size in place of -1."""
    known = math.prod(size for size in shape if size != -1)
    return tuple(math.prod(before) // known if size == -1 else size for size in shape)


def _reshaped(t: Any, *, shape: tuple[int, ...]) -> TensorSpec:
    count, sizes = math.prod(t.shape), _inferred(t.shape, shape)
    if math.prod(sizes) != count:
        raise PopxlError(f"a tensor of {count} elements cannot have the shape {shape}.")
    return TensorSpec(sizes, t.dtype)


def _wanted(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """Requested shape as a tuple, after argument checks."""
    if not isinstance(t, Tensor):
        raise not_a_tensor("reshape", "t", t)
    sizes = integers(shape, "reshape: `shape`")
    fewest = 0 if 0 in t.shape and -1 not in sizes else 1  # without elements, a size cannot be inferred beside a 0
    if any(size < fewest and size != -1 for size in sizes):
        raise ValueError(
            f"Invalid shape value in reshape: {shape}, for {t!r}; sizes are positive, or -1 for the one to infer."
        )
    if sizes.count(-1) > 1:
        raise ValueError(
            f"Reshape shape can contain at most one '-1' value; got {shape}, for {t!r}. Say the other sizes."
        )
    return sizes


_reshape: OpKind = OpKind(
    "Reshape",
    lambda t, *, shape: t.reshape(shape),
    shape=_reshaped,
    result="{t}_reshaped",
    gradient={"t": lambda g, t_spec: _reshape(g, shape=t_spec.shape)},
    traits=[
        ShardingRule(
            lambda shapes, attributes: reshape_subscripts(shapes[0], _inferred(shapes[0], attributes["shape"])), ("t",)
        )
    ],
)
_reshape_ = _reshape.as_view("ReshapeInplace", lambda t, view, *, shape: (view.reshape(t.shape),))


def reshape(t: Tensor, shape: Iterable[int]) -> Tensor:
    """The elements of `t`, in row-major order, in another shape.

    Args:
        t: tensor of any shape.
        shape: the new sizes; one of them may be -1 and is inferred.

    Returns:
        A new tensor (a copy). A meta-shape is dropped.

    Raises:
        ValueError: for a size below -1, or of 0 where `t` has elements or a size is to be inferred; for several -1.
        PopxlError: if the number of elements would change.

    See also: `numpy.reshape`.

    Example:
        >>> rows = ops.reshape(images, (-1, 8))
    """
    return _reshape(t, shape=_wanted(t, shape))


def reshape_(t: Tensor, shape: Iterable[int]) -> Tensor:
    """Reshape `t` as a view, without copy; writes are visible through both.

    Example:
        >>> rows = ops.reshape_(images, (-1, 8))
    """
    return _reshape_(t, shape=_wanted(t, shape))


def flatten(t: Tensor) -> Tensor:
    """Flatten `t` to one dimension: `reshape(t, (-1,))`.

    See also: `numpy.ravel`.

    Example:
        >>> v = ops.flatten(x)
    """
    return reshape(t, (-1,))


def flatten_(t: Tensor) -> Tensor:
    """As `flatten`, but a view of `t`.

    Example:
        >>> v = ops.flatten_(x)
    """
    return reshape_(t, (-1,))


def squeeze(t: Tensor, axes: Iterable[int] | None = None) -> Tensor:
    """Drop dimensions of size 1.

    Args:
        t: tensor of any shape.
        axes: the dimensions to drop; negative ones count from the back. `None` means all of size 1.

    Returns:
        A new tensor.

    Raises:
        ValueError: if an axis is named twice, does not exist, or is not of size 1.

    See also: `numpy.squeeze`.

    Example:
        >>> y = ops.squeeze(row, [0])
    """
    if not isinstance(t, Tensor):
        raise not_a_tensor("squeeze", "t", t)
    if axes is None:
        drop = [d for d, size in enumerate(t.shape) if size == 1]
    else:
        axes = integers(axes, "squeeze: `axes`")
        drop = [axis + t.rank if axis < 0 else axis for axis in axes]
        if len(set(drop)) < len(drop):
            raise ValueError(f"squeeze: `axes` names a dimension twice: {axes} of {t!r}.")
        for axis in drop:
            if not 0 <= axis < t.rank or t.shape[axis] != 1:
                raise ValueError(f"squeeze: {t!r} has no dimension {axis} of size 1; `axes` is {axes}.")
    return _reshape(t, shape=tuple(size for d, size in enumerate(t.shape) if d not in drop))


# Transpose ----------------------------------------------------------------------------------------------------------


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


_transpose: OpKind = OpKind(
    "Transpose",
    lambda t, *, permutation: jnp.transpose(t, permutation),
    shape=lambda t, *, permutation: TensorSpec(tuple(t.shape[d] for d in permutation), t.dtype, t.meta_shape),
    result="{t}_T",
    gradient={"t": lambda g, permutation: _transpose(g, permutation=_inverse(permutation))},
    traits=[ShardingRule(lambda shapes, attributes: permutation_subscripts(attributes["permutation"]), ("t",))],
)
_transpose_ = _transpose.as_view(
    "TransposeInplace", lambda t, view, *, permutation: (jnp.transpose(view, _inverse(permutation)),)
)


def last_layout(t: Tensor, read_by: Mapping[Tensor, Sequence[Op]]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The last of the transposes and reshapes that `t` goes through before other ops read it, and the function that
    undoes them, in any graph.

    Args:
        read_by: readers of each tensor of the graph, in which nothing is overwritten.
    """
    undone = list[Callable[[Tensor], Tensor]]()
    while t not in t.graph.outputs:
        match read_by.get(t, []):
            case [op] if op.kind is _transpose:
                undone.append(partial(_transpose, permutation=_inverse(op.attributes["permutation"])))
            case [op] if op.kind is _reshape:
                undone.append(partial(_reshape, shape=t.shape))
            case _:
                break
        (t,) = op.outputs
    return t, lambda last: reduce(lambda value, undo: undo(value), reversed(undone), last)


def transpose(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """Permute the dimensions: dimension `k` of the result is dimension `permutation[k]` of `t`.

    Args:
        t: tensor of any shape.
        permutation: the dimensions of `t` in their new order; reversed by default.

    Returns:
        A new tensor (a copy).

    Raises:
        ValueError: if `permutation` names a dimension that does not exist, or one twice.
        PopxlError: for a permutation that omits a dimension.

    See also: `numpy.transpose`.

    Example:
        >>> y = ops.transpose(tables, (0, 2, 1))
    """
    return _transpose(t, permutation=_permutation(t, permutation))


def transpose_(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """Transpose `t` as a view, without copy; writes are visible through both.

    Example:
        >>> columns = ops.transpose_(x)
    """
    return _transpose_(t, permutation=_permutation(t, permutation))


def _permutation(t: Tensor, permutation: Iterable[int] | None) -> tuple[int, ...]:
    if not isinstance(t, Tensor):
        raise not_a_tensor("transpose", "t", t)
    given = () if permutation is None else integers(permutation, "transpose: `permutation`")
    order = given or tuple(reversed(range(t.rank)))
    beyond = tuple(d for d in order if d >= t.rank)
    if beyond:
        raise ValueError(
            f"transpose: Values in permutation must be less than the number of dimensions of {t!r}, rank {t.rank}; "
            f"{beyond} are not."
        )
    if len(order) != t.rank:
        raise PopxlError(f"transpose: `permutation` {order} does not name all {t.rank} dimensions of {t!r}.")
    if min(order, default=0) < 0 or len(set(order)) < len(order):
        raise ValueError(f"transpose: `permutation` {order} has to name each dimension of {t!r} once, from 0 on.")
    return order


# Triangles ----------------------------------------------------------------------------------------------------------


def _matrices(t: Any, *, k: int) -> TensorSpec:
    if len(t.shape) < 2:
        raise PopxlError(f"expected a matrix, or several in the last two dimensions; it has rank {len(t.shape)}.")
    return like_first(t)


def _triangle(name: str, function: Callable[..., Any]) -> OpKind:
    kind: OpKind = OpKind(
        name, lambda t, *, k: function(t, k), shape=_matrices, gradient={"t": lambda g, k: kind(g, k=k)}
    )
    return kind


_tril, _triu = _triangle("Tril", jnp.tril), _triangle("Triu", jnp.triu)


def tril(t: Tensor, k: int = 0) -> Tensor:
    """The lower triangle of each matrix; zeros above it.

    Args:
        t: tensor of shape `(..., m, n)`.
        k: the last diagonal that is kept: 0 is the main one, 1 the next above it.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        PopxlError: if `t` has less than 2 dimensions.

    See also: `numpy.tril`.

    Example:
        >>> lower = ops.tril(x)
    """
    return _tril(t, k=integer(k, "tril: `k`"))


def triu(t: Tensor, k: int = 0) -> Tensor:
    """The upper triangle of each matrix, from the diagonal `k` on; zeros below it. Otherwise as `tril`.

    See also: `numpy.triu`.

    Example:
        >>> upper = ops.triu(x, k=1)
    """
    return _triu(t, k=integer(k, "triu: `k`"))
