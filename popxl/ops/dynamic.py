"""Reads and writes of blocks whose position is computed at run time.

A block is given by its start on some axes, which is a tensor, and by its sizes, which are plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.ops.host import init
from popxl.ops.index import widen_indices
from popxl.values.shapes import integers, like_first, one_axis
from popxl.values.spec import TensorSpec


def _block(shape: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> dict[int, int]:
    """Block size for each sliced axis."""
    if len(axes) != len(sizes):
        raise ValueError(f"`axes` {axes} and `sizes` {sizes} have different lengths; expected a size for each axis.")
    if min(sizes, default=0) < 0:
        raise ValueError(f"`sizes` is {sizes}; sizes are not negative.")
    block = {one_axis(axis, len(shape)): size for axis, size in zip(axes, sizes, strict=True)}
    if len(block) < len(axes):
        raise ValueError(f"`axes` names a dimension twice: {axes}.")
    return block


def _sliced(t: Any, index: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...]) -> TensorSpec:
    block = _block(t.shape, axes, sizes)
    return TensorSpec(tuple(block.get(d, size) for d, size in enumerate(t.shape)), t.dtype)


def _updated(t: Any, index: Any, t_update: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...]) -> TensorSpec:
    _block(t.shape, axes, sizes)
    return like_first(t)


def _clamp_block(t: Any, index: Any, axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[list[Any], list[int]]:
    """Start and size of the block on every axis; the start is moved so far that the block is inside."""
    block = _block(t.shape, axes, sizes)
    if index.size != len(block):
        raise ValueError(f"`index` has {index.size} elements for {len(block)} axes; expected a start for each of them.")
    given = widen_indices(index).reshape(-1)  # 64 bits may only be narrowed once the indices are known to fit
    starts: list[Any] = [jnp.zeros((), jnp.int32)] * t.ndim
    extents = list(t.shape)
    for i, (axis, size) in enumerate(block.items()):
        if not 0 <= size <= t.shape[axis]:
            raise ValueError(f"`sizes` asks for {size} elements of dimension {axis}, which has {t.shape[axis]}.")
        starts[axis] = jnp.clip(given[i], 0, t.shape[axis] - size).astype(jnp.int32)
        extents[axis] = size
    return starts, extents


def _slice_lowering(t: Any, index: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    starts, extents = _clamp_block(t, index, axes, sizes)
    return lax.dynamic_slice(t, starts, extents, allow_negative_indices=False)


def _update_lowering(t: Any, index: Any, t_update: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    starts, extents = _clamp_block(t, index, axes, sizes)
    accepted = [extents, extents[1:]] if extents[:1] == [1] else [extents]
    if list(t_update.shape) not in accepted:
        raise ValueError(f"`t_update` has the shape {t_update.shape}; expected that of the block, {tuple(extents)}.")
    if t_update.dtype != t.dtype:
        raise ValueError(f"`t_update` is {t_update.dtype} and `t` is {t.dtype}; expected one dtype.")
    return lax.dynamic_update_slice(t, t_update.reshape(extents), starts, allow_negative_indices=False)


def _without_block(g: Tensor, index: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    """Gradient of the updated tensor: zero inside the written block."""
    block = _sliced(g, index, **attributes)
    return _dynamic_update(g, index, init(block.shape, block.dtype), **attributes)


_dynamic_slice: OpKind = OpKind(
    "DynamicSlice",
    _slice_lowering,
    shape=_sliced,
    gradient={
        "t": lambda g, t_spec, index, attributes: _dynamic_update(
            init(t_spec.shape, t_spec.dtype), index, g, **attributes
        )
    },
)
_dynamic_update: OpKind = OpKind(
    "DynamicUpdate",
    _update_lowering,
    shape=_updated,
    gradient={
        "t": _without_block,
        "t_update": lambda g, index, attributes: _dynamic_slice(g, index, **attributes),
    },
)
_dynamic_update_ = _dynamic_update.inplace("DynamicUpdateInplace", "dynamicupdateinplace_out", shape=_updated)


def _block_attributes(name: str, axes: Iterable[int], sizes: Iterable[int]) -> dict[str, Any]:
    return {"axes": integers(axes, f"{name}: `axes`"), "sizes": integers(sizes, f"{name}: `sizes`")}


def dynamic_slice(t: Tensor, index: Tensor, axes: Iterable[int], sizes: Iterable[int], no_overlap: bool) -> Tensor:
    """Cut a block out of `t`, which begins where a tensor says. The rank stays.

    On dimension `axes[i]` these are the elements `index[i]` to `index[i] + sizes[i] - 1`; other dimensions are whole.
    A start that would let the block stick out of the tensor, a negative one too, is moved to the nearest that does not.

    Args:
        t: tensor of rank 1 or more.
        index: integer tensor with a start for each of `axes`, of any shape with that many elements. No gradient.
        axes: the dimensions to cut; negative ones count from the back.
        sizes: size of the block on each of them.
        no_overlap: accepted; no effect. A promise that slices of one tensor do not overlap. The gradient adds up
            where they do, promised or not.

    Returns:
        A new tensor (a copy) of the shape of `t`, with size `sizes[i]` on dimension `axes[i]`.

    Raises:
        PopxlError: if there is no such axis; when a session is made, if `index` has another number of elements, or the
            block is larger than `t`.
        ValueError: if `axes` and `sizes` differ in length, or an axis is named twice.

    See also: `jax.lax.dynamic_slice`.

    Example:
        >>> row = ops.dynamic_slice(table, i, axes=[0], sizes=[1], no_overlap=True)      # table[i : i + 1]
    """
    return _dynamic_slice(t, index, **_block_attributes("dynamic_slice", axes, sizes))


def dynamic_update(
    t: Tensor, index: Tensor, t_update: Tensor, axes: Iterable[int], sizes: Iterable[int], no_overlap: bool
) -> Tensor:
    """Replace a block of `t` at a tensor-valued position, the block that `dynamic_slice` would select.

    Args:
        t: tensor of rank 1 or more.
        index: integer tensor with a start for each of `axes`, of any shape with that many elements. No gradient.
        t_update: the new block, of the dtype of `t`; a first dimension of size 1 may be left out.
        axes: the dimensions that the block is cut on; negative ones count from the back.
        sizes: size of the block on each of them.
        no_overlap: accepted; no effect. A promise that no element is written twice.

    Returns:
        A new tensor like `t`. Its gradient goes to `t_update` inside the block, and to `t` outside.

    Raises:
        PopxlError: if there is no such axis; when a session is made, if the spec of `t_update` is not that of the
            block, `index` has another number of elements, or the block is larger than `t`.
        ValueError: if `axes` and `sizes` differ in length, or an axis is named twice.

    See also: `jax.lax.dynamic_update_slice`.

    Example:
        >>> table = ops.dynamic_update(table, i, row, axes=[0], sizes=[1], no_overlap=True)
    """
    return _dynamic_update(t, index, t_update, **_block_attributes("dynamic_update", axes, sizes))


def dynamic_update_(
    t: Tensor, index: Tensor, t_update: Tensor, axes: Iterable[int], sizes: Iterable[int], no_overlap: bool
) -> Tensor:
    """`dynamic_update`, written over `t`.

    Returns:
        An alias of `t`, which holds the new block from now on. To read it in a defined order use the alias, or
        `popxl.in_sequence()`. Autodiff refuses graphs with this op.

    Example:
        >>> with popxl.in_sequence():
        ...     ops.dynamic_update_(table, i, row, axes=[0], sizes=[1], no_overlap=True)
    """
    return _dynamic_update_(t, index, t_update, **_block_attributes("dynamic_update_", axes, sizes))
