"""Shape ops: rearrangements, views, writes through views; constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations, combinations_with_replacement
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.utils import _pytree as pytree

import popxl
from poptorch.capture.tensor_layout import overlaps, written_last
from poptorch.capture.trace import BASE, Data, View
from poptorch.lowering.complex import VIEW_INVERSES
from poptorch.lowering.emission import emission, wanted
from poptorch.lowering.operands import Number, axis_of, broadcast, cast_like, constant_of, promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.kernels import round_once, widen

# Constants ------------------------------------------------------------------------------------------------------------


@lowers("poptorch.constant")
def constant(data: Data) -> popxl.Tensor:
    return constant_of(data.tensor)


# Views ----------------------------------------------------------------------------------------------------------------


def _view(*names: str) -> tuple[str, ...]:
    """Names of view ops and their `_copy` variants."""
    return tuple(f"aten.{name}{end}" for name in names for end in ("", "_copy"))


@lowers(*_view("view", "unsqueeze", "squeeze"), "aten._unsafe_view", "aten.reshape")
def reshape(input: popxl.Tensor, **how: Any) -> popxl.Tensor:
    return ops.reshape(input, wanted().shape)


@lowers("aten.view.dtype")
def view_as(input: popxl.Tensor, dtype: popxl.dtype) -> popxl.Tensor:
    out = bits(input, dtype=dtype)
    if out.shape != wanted().shape:
        raise ValueError(
            f"view: the numbers of {input!r} have another size than in PyTorch, where they have 64 bits, so there are "
            f"others as {dtype}. Cast them to a dtype of at most 32 bits first."
        )
    return out


@jax_op(title="Bitcast", gradient=None)
def bits(input: Any, *, dtype: popxl.dtype) -> Any:
    """Reinterpret bits as another dtype; the last axis grows for smaller elements, shrinks for larger."""
    *outer, last = input.shape or (1,)
    length = last * input.dtype.itemsize // dtype.itemsize
    if length < last:
        input = input.reshape(*outer, length, last // length)
    out = lax.bitcast_convert_type(input, dtype.as_jax())
    return out.reshape(*outer, length) if input.ndim else out


@lowers(*_view("t"))
def t(input: popxl.Tensor) -> popxl.Tensor:
    return ops.transpose(input)


@lowers(*_view("transpose"))
def transpose(input: popxl.Tensor, dim0: int, dim1: int) -> popxl.Tensor:
    order = list(range(len(input.shape)))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return ops.transpose(input, order)


@lowers(*_view("permute"))
def permute(input: popxl.Tensor, dims: Sequence[int]) -> popxl.Tensor:
    return ops.transpose(input, tuple(axis_of(input, dim) for dim in dims))


@lowers(*_view("expand"))
def expand(input: popxl.Tensor, size: Sequence[int], implicit: bool = False) -> popxl.Tensor:
    return broadcast(input, shape=wanted().shape)


def _slice_axis(t: popxl.Tensor, axis: int, *bounds: int | None) -> popxl.Tensor:
    return t[(slice(None),) * axis + (slice(*bounds),)]


@lowers(*_view("select"))
def select(input: popxl.Tensor, dim: int, index: int) -> popxl.Tensor:
    axis = axis_of(input, dim)
    return input[(slice(None),) * axis + (index % input.shape[axis],)]


@lowers(*_view("slice"))
def slice_(
    input: popxl.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> popxl.Tensor:
    return _slice_axis(input, axis_of(input, dim), start, end, step)


@lowers("aten.narrow_copy")
def narrow(input: popxl.Tensor, dim: int, start: int, length: int) -> popxl.Tensor:
    axis = axis_of(input, dim)
    begin = start + input.shape[axis] if start < 0 else start
    return _slice_axis(input, axis, begin, begin + length)


@lowers(*_view("split", "split_with_sizes", "unbind"), "aten.unsafe_split", "aten.unsafe_split_with_sizes")
def split(input: popxl.Tensor, dim: int = 0, **sizes: Any) -> list[popxl.Tensor]:
    axis = axis_of(input, dim)
    lengths = [spec.shape[axis] if len(spec.shape) == len(input.shape) else 1 for spec in emission().wanted]
    return [_slice_axis(input, axis, end - size, end) for size, end in zip(lengths, accumulate(lengths), strict=True)]


@jax_op(*_view("diagonal"))
def diagonal(input: Any, *, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(input, offset, dim1, dim2)


@jax_op(*_view("unfold"))
def unfold(input: Any, *, dimension: int, size: int, step: int) -> Any:
    """Sliding windows along a dimension, stacked in a new last dimension."""
    lines = jnp.atleast_1d(widen(input))
    axis = dimension % lines.ndim
    count = (lines.shape[axis] - size) // step + 1
    if size == step:  # windows side by side: no lookup needed
        covered = lax.slice_in_dim(lines, 0, count * size, axis=axis)
        windows = covered.reshape(*lines.shape[:axis], count, size, *lines.shape[axis + 1 :])
    else:
        windows = jnp.take(lines, jnp.arange(count)[:, None] * step + jnp.arange(size), axis=axis)
    return jnp.moveaxis(windows, axis + 1, -1).astype(input.dtype)


@lowers(*_view("as_strided"))
def as_strided(
    input: popxl.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> popxl.Tensor:
    """A strided view of `input`, which the recorder has arranged in memory order."""
    order = _order(size, stride, input.nelms)
    if order is None:
        return strided(input, size=tuple(size), stride=tuple(stride), offset=storage_offset or 0)
    return ops.transpose(ops.reshape(input, [size[d] for d in order]), np.argsort(order).tolist())


def _order(size: Sequence[int], stride: Sequence[int], count: int) -> list[int] | None:
    """Dimensions of a view of `count` numbers, outermost first; `None` unless it covers each number exactly once."""
    long = sorted((d for d in range(len(size)) if size[d] != 1), key=lambda d: -stride[d])
    dense = [prod(size[d] for d in long[i + 1 :]) for i in range(len(long))]
    if [stride[d] for d in long] != dense or prod(size) != count:
        return None
    return long + [d for d in range(len(size)) if size[d] == 1]


def _view_offsets(size: Sequence[int], stride: Sequence[int], offset: int) -> Any:
    """Memory offsets of a view's elements."""
    steps = zip(jnp.indices(size, sparse=True), stride, strict=True)
    return sum((index * step for index, step in steps), start=jnp.asarray(offset))


@jax_op(title="AsStrided")
def strided(base: Any, *, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    return widen(base).reshape(-1)[_view_offsets(size, stride, offset)].astype(base.dtype)


# Writing through a view -----------------------------------------------------------------------------------------------


@lowers("poptorch.put")
def write_view(base: popxl.Tensor, content: popxl.Tensor, view: View) -> popxl.Tensor:
    """A tensor with a view's contents replaced."""
    if view.op == "aten.view" and view.overload == "dtype":  # without a derivative in PyTorch
        return replaced(base, bits(content, dtype=base.dtype))
    if view.op in VIEW_INVERSES:
        return VIEW_INVERSES[view.op](content)
    if view.op == "aten.detach":
        return replaced(base, content)
    return _write_one_view(base, content, view.op, view.overload, view.arguments, view.result)


@jax_op(title="Replace", gradient={"base": lambda g: g})
def replaced(base: Any, content: Any) -> Any:
    """Replace data without affecting differentiation."""
    return content


_PARTS = ("aten.select", "aten.slice", "aten.split", "aten.split_with_sizes", "aten.unbind")
"""Views that select part of a dimension."""


def _write_one_view(
    base: popxl.Tensor, content: popxl.Tensor, op: str, overload: str, arguments: Mapping[str, Any], result: int = 0
) -> popxl.Tensor:
    """A base with the content of one view replaced: rearranged, if it is all of it, or updated in a part."""
    if content.nelms == 0:
        return ops.identity(base)
    torch_arguments = {"self" if name == "input" else name: value for name, value in arguments.items()}
    function = getattr(getattr(torch.ops.aten, op.removeprefix("aten.")), overload)
    view = pytree.tree_leaves(function(**torch_arguments | {"self": torch.empty(base.shape, device="meta")}))[result]
    order = _order(view.shape, view.stride(), base.nelms)
    if order is not None:
        return ops.reshape(ops.transpose(content, order) if order != sorted(order) else content, base.shape)
    if op not in _PARTS:
        return strided_update(base, content, stride=view.stride(), offset=view.storage_offset())
    axis = axis_of(base, arguments.get("dim", 0))
    row = prod(base.shape[axis + 1 :])
    keeps_rank = len(view.shape) == len(base.shape)
    block = content if keeps_rank else ops.reshape(content, (*base.shape[:axis], 1, *base.shape[axis + 1 :]))
    step = view.stride(axis) // row if keeps_rank else 1
    return slice_update(base, block, axis=axis, start=view.storage_offset() // row, step=step)


@jax_op(title="SliceUpdate")
def slice_update(base: Any, content: Any, *, axis: int, start: int, step: int) -> Any:
    if step == 1:
        return lax.dynamic_update_slice_in_dim(base, content, start, axis)
    size, count = base.shape[axis], content.shape[axis]
    padding = [(0, 0, 0)] * base.ndim
    padding[axis] = (start, size - start - (count - 1) * step - 1, step - 1)
    steps = jnp.arange(size) - start
    mask = (steps >= 0) & (steps < count * step) & (steps % step == 0)
    return jnp.where(
        jnp.expand_dims(mask, range(1, base.ndim - axis)),
        lax.pad(content, jnp.zeros((), base.dtype), padding),
        base,
    )


@jax_op(title="StridedUpdate")
def strided_update(base: Any, content: Any, *, stride: tuple[int, ...], offset: int) -> Any:
    positions = _view_offsets(content.shape, stride, offset)
    if overlaps(content.shape, stride):
        last, positions = written_last(content.shape, stride)
        positions, content = positions + offset, content.reshape(-1)[last]
    return base.reshape(-1).at[positions].set(content, unique_indices=True).reshape(base.shape)


def _updates(op: str, overload: str) -> None:
    @lowers(f"aten.{op}_scatter")
    def lowering(input: popxl.Tensor, src: popxl.Tensor, **where: Any) -> popxl.Tensor:
        arguments = {"input": BASE, **where}
        return _write_one_view(input, cast_like(src, input.dtype), f"aten.{op}", overload, arguments)


for _op, _overload in {"slice": "Tensor", "select": "int", "diagonal": "default", "as_strided": "default"}.items():
    _updates(_op, _overload)


# Joining and repeating ------------------------------------------------------------------------------------------------


@lowers("aten.cat")
def cat(tensors: Sequence[popxl.Tensor], dim: int = 0) -> popxl.Tensor:
    nonempty = [t for t in tensors if t.shape != (0,)] or tensors  # PyTorch accepts these next to any shape
    return ops.concat(promoted(*nonempty), axis_of(nonempty[0], dim))


@lowers("aten.stack")
def stack(tensors: Sequence[popxl.Tensor], dim: int = 0) -> popxl.Tensor:
    return _stacked(*promoted(*tensors), axis=dim)


_stacked = jax_op(title="Stack")(lambda *tensors, axis: jnp.stack(tensors, axis))


repeat = jax_op("aten.repeat", title="Tile")(round_once(lambda input, *, repeats: jnp.tile(input, repeats)))


@lowers("torch.combinations")
def combinations_(input: popxl.Tensor, r: int = 2, with_replacement: bool = False) -> popxl.Tensor:
    chosen = (combinations_with_replacement if with_replacement else combinations)(range(input.shape[0]), r)
    return ops.gather(input, popxl.constant(np.array(list(chosen), np.int32)))


# Order ----------------------------------------------------------------------------------------------------------------


jax_op("aten.flip", title="Flip")(lambda input, *, dims: jnp.flip(input, dims))


@jax_op("aten.roll")
def roll(input: Any, *, shifts: tuple[int, ...], dims: tuple[int, ...] = ()) -> Any:
    return jnp.roll(input, shifts, dims) if dims else jnp.roll(input, shifts[0])


# Triangles and diagonals ----------------------------------------------------------------------------------------------


jax_op("aten.tril", title="Tril")(lambda input, *, diagonal=0: jnp.tril(input, diagonal))
jax_op("aten.triu", title="Triu")(lambda input, *, diagonal=0: jnp.triu(input, diagonal))


@jax_op("aten.diag_embed")
def diag_embed(input: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    rows = jnp.pad(input, [(0, 0)] * (input.ndim - 1) + [(max(-offset, 0), max(offset, 0))])
    square = jnp.where(jnp.eye(rows.shape[-1], k=offset, dtype=bool), rows[..., None], jnp.zeros((), input.dtype))
    return jnp.moveaxis(square, (-2, -1), (dim1, dim2))


# Padding --------------------------------------------------------------------------------------------------------------


@jax_op("torch.pad", "aten.constant_pad_nd")
def pad(input: Any, *, pad: tuple[int, ...], mode: str = "constant", value: Number | None = None) -> Any:
    """Pad the ends of the last dimensions: `pad` lists two sizes for the last, two for the second last, ..."""
    sizes = [*zip(pad[::2], pad[1::2], strict=True)]
    ends = [(0, 0)] * (input.ndim - len(sizes)) + sizes[::-1]
    if mode == "constant":
        return lax.pad(input, jnp.asarray(value or 0, input.dtype), [(*each, 0) for each in ends])
    added = [(max(low, 0), max(high, 0)) for low, high in ends]
    wide = widen(input)
    if mode == "circular":  # repeats what is kept
        return jnp.pad(_cropped(wide, ends), added, "wrap").astype(input.dtype)
    by_name = {"reflect": "reflect", "replicate": "edge"}
    return _cropped(jnp.pad(wide, added, by_name[mode]), ends).astype(input.dtype)


def _cropped(x: Any, ends: Sequence[tuple[int, int]]) -> Any:
    """Remove as many elements from each end as negative sizes say."""
    return x[tuple(slice(max(-low, 0), size - max(-high, 0)) for (low, high), size in zip(ends, x.shape, strict=True))]
