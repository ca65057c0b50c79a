"""Reducing elements into buckets given by indices: sums, largest and smallest elements, for one group or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.recording import not_a_tensor
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.host import init
from popxl.ops.kernels.elements import full_after
from popxl.ops.logic import equal, where
from popxl.ops.precision import widen
from popxl.ops.scatter import leading, padded, put_block, read_block
from popxl.values.shapes import flag, integer, one_axis, word
from popxl.values.spec import TensorSpec

Reduction = Literal["sum", "min", "max", "none"]

_HOW = {"sum": "add", "min": "min", "max": "max", "none": "set"}

# Shapes -------------------------------------------------------------------------------------------------------------


def _ungrouped(shape: tuple[int, ...], what: str, group_size: int) -> tuple[int, ...]:
    if shape[:1] != (group_size,):
        raise PopxlError(
            f"`{what}` has the shape {shape}; its first dimension has to be that of the {group_size} groups."
        )
    return shape[1:]


def _laid_out(
    data: tuple[int, ...], indices: tuple[int, ...], axis: int, broadcast: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Index shape expanded to data rank, and block shape addressed by indices."""
    rank = len(data)
    before = axis if len(indices) == 1 else 0
    full = (1,) * before + indices + (1,) * (rank - before - len(indices))
    along = tuple(size if d == axis else 1 for d, size in enumerate(data))
    if broadcast and full not in (data, along):
        raise PopxlError(
            f"`indices` has the shape {indices}; expected that of `data`, {data}, or an index for each of its "
            f"{data[axis]} slices along dimension {axis}, as {(data[axis],)} or {along}."
        )
    if len(full) != rank or any(index > size for index, size in zip(full, data, strict=True)):
        raise PopxlError(f"`indices`, of shape {indices}, is larger than `data`, of shape {data}.")
    return full, data if broadcast else full


def _reduced(
    data: Any,
    indices: Any,
    initial_values: Any = None,
    *,
    axis: int,
    axis_size: Any,
    enable_index_broadcast: bool,
    group_size: int | None,
    **reduction: str,
) -> TensorSpec:
    at = one_axis(axis, len(data.shape))
    shapes = {"data": data.shape, "indices": indices.shape}
    if initial_values is not None:
        shapes["initial_values"] = initial_values.shape
    if group_size is not None:
        if at == 0:
            raise PopxlError(
                f"`axis` is {axis}, the dimension of the {group_size} groups; expected one of those after it, 1 to "
                f"{len(data.shape) - 1}, counted in the whole of `data`."
            )
        at -= 1
        shapes = {what: _ungrouped(shape, what, group_size) for what, shape in shapes.items()}
    _, block = _laid_out(shapes["data"], shapes["indices"], at, enable_index_broadcast)
    if initial_values is None:
        if axis_size < 0:
            raise ValueError(f"`axis_size` is {axis_size}; expected the number of buckets.")
        groups = () if group_size is None else (group_size,)
        return TensorSpec((*groups, *block[:at], axis_size, *block[at + 1 :]), data.dtype)
    start = shapes["initial_values"]
    if len(start) != len(block) or any(d != at and a < b for d, (a, b) in enumerate(zip(start, block, strict=True))):
        raise PopxlError(
            f"`initial_values` has the shape {start}; in all dimensions but {at} it has to be at least as large as "
            f"{block}, the elements that are moved."
        )
    return TensorSpec(initial_values.shape, initial_values.dtype)


# Numbers ------------------------------------------------------------------------------------------------------------


def _each_group(function: Callable[..., Any], group_size: int | None) -> Callable[..., Any]:
    return function if group_size is None else jax.vmap(function)


def _lowering(
    data: Any, indices: Any, initial_values: Any = None, *, axis: int, group_size: int | None, **how: Any
) -> Any:
    axis = axis % data.ndim - (group_size is not None)
    return _each_group(functools.partial(_combined, axis=axis, **how), group_size)(data, indices, initial_values)


def _combined(
    data: Any,
    indices: Any,
    initial_values: Any,
    *,
    reduction: str,
    axis: int,
    axis_size: Any,
    enable_index_broadcast: bool,
) -> Any:
    full, block = _laid_out(data.shape, indices.shape, axis, enable_index_broadcast)
    index, values = indices.reshape(full), leading(data, block)
    start = initial_values
    if start is None:
        start = full_after((*block[:axis], axis_size, *block[axis + 1 :]), 0, data.dtype, after=data)
        if reduction in ("max", "min"):  # where there are elements, any of them replaces the 0 first
            start = put_block(start, index, values, axis)
    if reduction == "sum":
        start = widen(start)
    return put_block(start, index, values.astype(start.dtype), axis, _HOW[reduction])


def _data_gradient(
    g: Any,
    indices: Any,
    data: Any = None,
    out: Any = None,
    *,
    spec: TensorSpec,
    axis: int,
    enable_index_broadcast: bool,
    group_size: int | None,
) -> Any:
    """Bucket gradient per element; with `data` and `out`, only for elements equal to the result."""
    grouped = group_size is not None

    def of_group(g: Any, indices: Any, data: Any, out: Any) -> Any:
        shape, at = spec.shape[grouped:], axis % len(spec.shape) - grouped
        full, block = _laid_out(shape, indices.shape, at, enable_index_broadcast)
        index = indices.reshape(full)
        gradient = read_block(g, index, block, at)
        if out is not None:
            made_it = leading(data, block).astype(out.dtype) == read_block(out, index, block, at)
            gradient = jnp.where(made_it, gradient, jnp.zeros((), g.dtype))
        return padded(gradient, shape)

    return _each_group(of_group, group_size)(g, indices, data, out)


# Declarations -------------------------------------------------------------------------------------------------------

_data_grad = OpKind("ScatterReduceGrad", _data_gradient, shape=lambda *operands, spec, **where: spec)


def _places(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that say which elements belong to which bucket."""
    return {name: attributes[name] for name in ("axis", "enable_index_broadcast", "group_size")}


def _of_bucket(g: Tensor, indices: Tensor, data_spec: TensorSpec, attributes: Mapping[str, Any]) -> Tensor:
    """Gradient of the data: what the bucket gets, each element gets."""
    return _data_grad(g, indices, spec=data_spec, **_places(attributes))


def _of_winners(
    g: Tensor, indices: Tensor, data: Tensor, out: Tensor, data_spec: TensorSpec, attributes: Mapping[str, Any]
) -> Tensor:
    """Gradient of the data: what the bucket gets, each element equal to the result gets; ties are not split."""
    return _data_grad(g, indices, data, out, spec=data_spec, **_places(attributes))


def _of_untouched(g: Tensor, indices: Tensor, data_spec: TensorSpec, attributes: Mapping[str, Any]) -> Tensor:
    """Gradient of the initial values: zeros are put where elements were put."""
    return _kinds["none"](init(data_spec.shape, g.dtype), indices, g, **attributes)


_extreme = {
    "data": _of_winners,
    "initial_values": lambda g, out, initial_values: where(equal(out, initial_values), g, constant(0, g.dtype)),
}
_gradients: dict[str, Any] = {
    "sum": {"data": _of_bucket, "initial_values": lambda g: g},
    "min": _extreme,
    "max": _extreme,
    "none": {"data": _of_bucket, "initial_values": _of_untouched},
}
_kinds = {
    reduction: OpKind(
        "ScatterReduce",
        _lowering,
        shape=_reduced,
        result="scatterreduce_out",
        gradient=gradient,
        key=f"ScatterReduce.{reduction}",
        traits=REAL if reduction in ("min", "max") else (),
    )
    for reduction, gradient in _gradients.items()
}


def _call(
    name: str,
    data: Tensor,
    indices: Tensor,
    reduction: Reduction,
    initial_values: Tensor | None,
    axis: int,
    axis_size: int | None,
    enable_index_broadcast: int,
    group_size: int = 1,
) -> Tensor:
    word(reduction, f"{name}: `reduction`", get_args(Reduction))
    if initial_values is None and axis_size is None:
        raise ValueError(
            f"{name}: neither `initial_values` nor `axis_size` is given; give one of them, for the number of buckets."
        )
    if initial_values is not None and not isinstance(initial_values, Tensor):
        raise not_a_tensor(name, "initial_values", initial_values)
    if group_size < 1:
        raise ValueError(f"{name}: `group_size` is {group_size}; expected the number of groups, 1 or more.")
    return _kinds[reduction](
        data,
        indices,
        initial_values,
        reduction=reduction,
        axis=integer(axis, f"{name}: `axis`"),
        axis_size=integer(axis_size, f"{name}: `axis_size`") if initial_values is None else None,
        enable_index_broadcast=flag(enable_index_broadcast, f"{name}: `enable_index_broadcast`"),
        group_size=None if group_size == 1 else group_size,
    )


def scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: Reduction,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: int = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Combine slices or elements of `data` in buckets, which are the slices of the result along `axis`.

    For a matrix, `axis=0` and indices of its shape, `"sum"` is `out[indices[i, j], j] += data[i, j]`.

    Args:
        data: tensor of rank 1 or more.
        indices: int32 or uint32 tensor: the bucket of each element. Elements whose index is out of range, negative ones
            too, are dropped. No gradient.
        reduction: `"sum"`; `"max"` or `"min"`; or `"none"`: an unspecified one of the elements.
        initial_values: initial content of the buckets, which takes part in the reduction; of the shape of the result.
            Without it, buckets without elements hold 0.
        axis: the dimension that the indices are for; negative ones count from the back.
        axis_size: number of buckets. It is needed, and used, if there are no `initial_values`.
        enable_index_broadcast: if true, `indices` has the shape of `data`; or one index for each slice of `data` along
            `axis`, as a vector, or with that length on `axis` and size 1 on all other dimensions. If false, dimensions
            of size 1 are added (a vector is laid along `axis`; otherwise they are the last), and only the leading block
            of `data` with the shape of `indices` takes part.
        available_memory_proportion: accepted for programs that tune memory; no effect.

    Returns:
        A new tensor: like `initial_values`; without them, of the dtype of `data` and of the shape of the elements that
        take part, with `axis_size` on `axis`. The gradient of a bucket goes to all its elements; for `"max"` and
        `"min"` to all that are equal to the result, undivided. For `initial_values` the same holds, but with `"none"`
        they get it only in buckets that nothing was put in.

    Raises:
        ValueError: for an unknown `reduction`, and if neither `initial_values` nor `axis_size` is given.
        PopxlError: if the shapes do not fit, or there is no such axis.

    See also: `torch.scatter_reduce`, `jax.ops.segment_sum`.

    Example:
        >>> totals = ops.scatter_reduce(rows, owner, "sum", axis_size=owners)    # totals[owner[i]] += rows[i]
    """
    return _call("scatter_reduce", data, indices, reduction, initial_values, axis, axis_size, enable_index_broadcast)


def grouped_scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: Reduction,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    group_size: int = 1,
    enable_index_broadcast: int = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """`scatter_reduce` for each of several groups.

    Args:
        data, indices, initial_values: as for `scatter_reduce`, each with one more dimension in front, for the groups.
        reduction, axis_size, enable_index_broadcast, available_memory_proportion: as for `scatter_reduce`.
        axis: dimension that the indices refer to, counted in the whole of `data`: not the first one, which is the
            groups'.
        group_size: the number of groups. With 1 there are none, and this is `scatter_reduce`.

    Returns:
        A new tensor: the results of the groups, stacked.

    Raises:
        ValueError: as for `scatter_reduce`, and if `group_size` is less than 1.
        PopxlError: as for `scatter_reduce`, if a first dimension is not `group_size`, or `axis` is the groups'.

    See also: `torch.scatter_reduce`, for each group.

    Example:
        >>> totals = ops.grouped_scatter_reduce(
        ...     rows_of_tables, ids_of_tables, "sum", axis=1, axis_size=10, group_size=2
        ... )
    """
    groups = integer(group_size, "grouped_scatter_reduce: `group_size`")
    return _call(
        "grouped_scatter_reduce",
        data,
        indices,
        reduction,
        initial_values,
        axis,
        axis_size,
        enable_index_broadcast,
        groups,
    )
