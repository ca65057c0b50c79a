"""Selecting slices of a tensor by index: `gather` and its variants for groups and for tied weights.

`t[key]` is in `popxl.ops.getitem`; writing elements to indices is in `popxl.ops.scatter`.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Any

import jax
import jax.numpy as jnp

from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import ShardingRule
from popxl.errors import PopxlError
from popxl.ops.precision import widen
from popxl.values.shapes import flag, integer, of_shape, one_axis, set_hints
from popxl.values.spec import TensorSpec


def widen_indices(indices: Any) -> Any:
    """Widen indices to at least 32 bits; 8 bits may not hold sizes.

    Raises:
        ValueError: if they are not integers: nothing is rounded.
    """
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"the indices are {indices.dtype}; expected integers: convert them with `ops.cast`.")
    return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)


def or_beyond(indices: Any, size: int) -> Any:
    """Indices as int32; negative and out-of-range ones become `size`, one past the end.

    There JAX's `mode="drop"` drops writes, and `mode="fill"` fills in reads; by default it counts negative indices from
    the back.
    """
    widened = widen_indices(indices)  # only in range may 64 bits be narrowed, which wraps
    return jnp.where((widened >= 0) & (widened < size), widened.astype(jnp.int32), size)


def _gathered(t: Any, indices: Any, *, axis: int, group_size: int | None = None, **hints: Any) -> TensorSpec:
    dimension = one_axis(axis, len(t.shape))
    if group_size is not None and dimension == 0:
        raise PopxlError(
            f"`axis` is {axis}, the dimension of the {group_size} groups; expected one of those after it, 1 to "
            f"{len(t.shape) - 1}, counted in the whole of `t`."
        )
    index_shape = indices.shape if group_size is None else indices.shape[1:]
    return TensorSpec(t.shape[:dimension] + index_shape + t.shape[dimension + 1 :], t.dtype)


def _gather(t: Any, indices: Any, *, axis: int, zero_OOR: bool, group_size: int | None = None, **hints: Any) -> Any:
    axis %= t.ndim
    if group_size is not None:
        return jax.vmap(functools.partial(_gather, axis=axis - 1, zero_OOR=zero_OOR))(t, indices)
    if zero_OOR:
        return jnp.take(t, or_beyond(indices, t.shape[axis]), axis=axis, mode="fill", fill_value=0)
    return jnp.take(t, widen_indices(indices).astype(jnp.int32), axis=axis, mode="clip")


def _scattered(g: Any, indices: Any, *, axis: int, shape: tuple[int, ...], group_size: int | None = None) -> Any:
    axis %= len(shape)
    if group_size is not None:
        return jax.vmap(functools.partial(_scattered, axis=axis - 1, shape=shape[1:]))(g, indices)
    g = widen(g)
    index = (*(builtins.slice(None),) * axis, or_beyond(indices, shape[axis]))
    return jnp.zeros(shape, g.dtype).at[index].add(g, mode="drop", wrap_negative_indices=False)


def _subscripts(rank: int, index_rank: int, axis: int, group_size: int | None) -> tuple[str, str, str]:
    """Subscripts of a gather: of the tensor, of the indices along an axis, and of the result."""
    dimension = axis % rank
    letters, index_letters = ascii_letters[:rank], ascii_letters[rank : rank + index_rank]
    leading, trailing, first = letters[:dimension], letters[dimension + 1 :], 0 if group_size is None else 1
    return (
        f"{leading}_{trailing}",
        letters[:first] + index_letters[first:],
        f"{leading}{index_letters[first:]}{trailing}",
    )


def _gather_subscripts(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    t, indices = map(len, shapes)
    operand, index, result = _subscripts(t, indices, attributes["axis"], attributes.get("group_size"))
    return f"{operand},{index}->{result}"


def _scatter_subscripts(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    rank, indices = len(attributes["shape"]), len(shapes[1])
    result, index, operand = _subscripts(rank, indices, attributes["axis"], attributes.get("group_size"))
    return f"{operand},{index}->{result}"


_gather_grad = OpKind(
    "GatherGrad",
    _scattered,
    shape=of_shape,
    traits=[ShardingRule(_scatter_subscripts, ("g",))],
)


def _declare(name: str, result: str) -> OpKind:
    return OpKind(
        name,
        _gather,
        shape=_gathered,
        result=result,
        traits=[ShardingRule(_gather_subscripts, ("t",))],
        gradient={
            "t": lambda g, t_spec, indices, axis, group_size: _gather_grad(
                g, indices, axis=axis, shape=t_spec.shape, group_size=group_size
            )
        },
    )


_gather_kind = _declare("Gather", "gather_out")
_tied_gather_kind = _declare("PopartTiedGather", "tiedgather_out")


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
        available_memory_proportion: accepted for programs that tune memory; no effect.
        zero_OOR: whether indices out of range give zeros; otherwise their results are undefined.

    Returns:
        A new tensor of shape `t.shape[:axis] + indices.shape + t.shape[axis + 1:]`. Its gradient adds up where indices
        repeat.

    Raises:
        PopxlError: if there is no such axis.

    See also: `numpy.take`.

    Example:
        >>> rows = ops.gather(table, ids)
    """
    hints = set_hints(available_memory_proportion=available_memory_proportion)
    return _gather_kind(
        t, indices, axis=integer(axis, "gather: `axis`"), zero_OOR=flag(zero_OOR, "gather: `zero_OOR`"), **hints
    )


def row(stack: Tensor, number: Tensor, name: str | None = None) -> Tensor:
    """One slice along a tensor's first axis, by index: a `gather` of a single row."""
    return _gather_kind(stack, number, axis=0, zero_OOR=False, results=None if name is None else [name], **set_hints())


def picks_row(op: Op, number: Tensor) -> bool:
    """Whether an op selects this row of its first operand."""
    is_plain = op.attributes.get("axis") == 0 and not op.attributes.get("zero_OOR")
    return op.kind is _gather_kind and is_plain and op.inputs[1] is number and op.inputs[0] is not number


def picks_rows(op: Op) -> bool:
    """Whether an op selects slices along the first dimension of its first operand: rows of a table."""
    is_plain = op.attributes.get("axis") == 0 and op.attributes.get("group_size") is None
    return op.kind in (_gather_kind, _tied_gather_kind) and is_plain


def tied_gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather` for a table shared with a `matmul`: an embedding with tied weights.

    The numbers and the gradient are those of `gather`. PopXL lays out such a table for the `matmul`; here there is
    nothing to choose.

    Args:
        t, indices, axis, available_memory_proportion, zero_OOR: as for `gather`.

    Returns:
        A new tensor of shape `t.shape[:axis] + indices.shape + t.shape[axis + 1:]`.

    Raises:
        PopxlError: if there is no such axis.

    See also: `numpy.take`.

    Example:
        >>> rows = ops.tied_gather(table, ids)
        >>> logits = rows @ table.T
    """
    hints = set_hints(available_memory_proportion=available_memory_proportion)
    return _tied_gather_kind(
        t,
        indices,
        axis=integer(axis, "tied_gather: `axis`"),
        zero_OOR=flag(zero_OOR, "tied_gather: `zero_OOR`"),
        **hints,
    )


def groupedgather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    group_size: int | None = 1,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather` per group: row `g` of the indices selects from row `g` of `t`.

    Args:
        t: tensor of shape `(group_size, ...)`, rank 2 or more.
        indices: int32 or uint32 tensor of shape `(group_size, ...)`.
        axis: dimension of `t` to select from; not 0, the dimension of groups.
        group_size: the number of groups; 1 is equivalent to `gather`.
        available_memory_proportion: accepted for programs that tune memory; no effect.
        zero_OOR: whether indices out of range, including negative ones, give zeros; otherwise their results are
            undefined.

    Returns:
        A new tensor of shape `t.shape[:axis] + indices.shape[1:] + t.shape[axis + 1:]`. Its gradient adds up where
        indices repeat.

    Raises:
        PopxlError: if there is no such axis, or it is the groups'.
        ValueError: if `group_size` is less than 1.

    See also: `numpy.take`, for each group.

    Example:
        >>> rows = ops.groupedgather(tables, ids_of_tables, axis=1, group_size=2)    # rows[g] = tables[g][ids[g]]
    """
    groups = integer(group_size, "groupedgather: `group_size`")
    if groups < 1:
        raise ValueError(f"groupedgather: `group_size` is {groups}; expected the number of groups, 1 or more.")
    return _gather_kind(
        t,
        indices,
        axis=integer(axis, "groupedgather: `axis`"),
        zero_OOR=flag(zero_OOR, "groupedgather: `zero_OOR`"),
        group_size=None if groups == 1 else groups,
        **set_hints(available_memory_proportion=available_memory_proportion),
    )
