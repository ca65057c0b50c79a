"""Indexing: gather and scatter by index tensors or masks.

Indices are of two kinds. `aten.index` and its writing counterparts take broadcasting indices for some dimensions, and
slice the others whole. `gather` and `scatter` take one index for one dimension, of the tensor's rank; elements keep
their position in the other dimensions (`aligned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import popxl
from poptorch.lowering.emission import wanted
from poptorch.lowering.operands import Number, at_least_1d, axis_of, broadcast, cast_like
from poptorch.lowering.registry import jax_op, lowers
from popxl import dtypes, ops
from popxl.extend.kernels import widen


def _indexed_ref(t: Any, indices: Sequence[Any], dims: Sequence[int], aligned: bool) -> Any:
    """The indexed reference for JAX reads and updates."""
    if aligned:
        subscripts: list[Any] = [*jnp.indices(indices[0].shape, sparse=True)]
    else:
        subscripts = [slice(None)] * t.ndim
    for dim, index in zip(dims, indices, strict=True):
        subscripts[dim] = index
    return t.at[tuple(subscripts)]


def _gradient_of_picked(forward: Any, gs: tuple[popxl.Tensor]) -> dict[int, popxl.Tensor]:
    op = forward.op
    if not forward.wants(0):
        return {}
    indices = (forward.read(t) for t in op.inputs[1:])
    return {0: _gathered_gradient(gs[0], *indices, shape=op.inputs[0].shape, **op.attributes)}


@jax_op(title="Index", gradient=_gradient_of_picked)
def picked(input: Any, *indices: Any, dims: tuple[int, ...], aligned: bool = False) -> Any:
    return _indexed_ref(input, indices, dims, aligned).get(mode="clip")


@jax_op(title="IndexGrad")
def _gathered_gradient(
    g: Any, *indices: Any, shape: tuple[int, ...], dims: tuple[int, ...], aligned: bool = False
) -> Any:
    g = widen(g)
    return _indexed_ref(jnp.zeros(shape, g.dtype), indices, dims, aligned).add(g)


# Reading --------------------------------------------------------------------------------------------------------------


@lowers("aten.index", "aten._unsafe_index")
def index(input: popxl.Tensor, indices: Sequence[popxl.Tensor | None]) -> popxl.Tensor:
    dims, used = _split(indices)
    return picked(input, *used, dims=dims)


def _split(indices: Sequence[popxl.Tensor | None]) -> tuple[tuple[int, ...], list[popxl.Tensor]]:
    """The indexed dimensions, and their indices."""
    index_of_dim = {dim: index for dim, index in enumerate(indices) if index is not None}
    return tuple(index_of_dim), list(index_of_dim.values())


@lowers("aten.gather")
def gather(input: popxl.Tensor, dim: int, index: popxl.Tensor, sparse_grad: bool = False) -> popxl.Tensor:
    return picked(at_least_1d(input), at_least_1d(index), dims=(axis_of(input, dim),), aligned=True)


@lowers("aten.index_select")
def index_select(input: popxl.Tensor, dim: int, index: popxl.Tensor) -> popxl.Tensor:
    return picked(at_least_1d(input), at_least_1d(index), dims=(axis_of(input, dim),))


@lowers("aten.take")
def take(input: popxl.Tensor, index: popxl.Tensor) -> popxl.Tensor:
    return picked(ops.reshape(input, (input.nelms,)), index, dims=(0,))


@jax_op("aten.nonzero_static", gradient=None)
def nonzero_static(input: Any, *, size: int, fill_value: int = -1) -> Any:
    """Indices of the first `size` nonzero elements; unused rows contain `fill_value`."""
    return jnp.stack(jnp.nonzero(input, size=size, fill_value=fill_value), -1)


@jax_op("aten.repeat_interleave.Tensor", gradient=None)
def repeat_interleave(repeats: Any, *, output_size: int) -> Any:
    """Positions 0, 1, ..., repeated `repeats` times each."""
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)


# Writing --------------------------------------------------------------------------------------------------------------


def _scattered_gradient(forward: Any, gs: tuple[popxl.Tensor]) -> dict[int, popxl.Tensor]:
    """Scatter gradients as in PyTorch; duplicate sources of one position all count as the written one."""
    op, (g,) = forward.op, gs
    a = op.attributes
    position = {"dims": a["dims"], "aligned": a["aligned"]}
    indices = [forward.read(t) for t in op.inputs[2:]]
    wanted = [i for i in (0, 1) if forward.wants(i)]
    if a["reduce"] in ("prod", "mean", "amax", "amin"):
        operands = [forward.read(t) for t in op.inputs[:2]]
        return {i: _source_gradient(g, *operands, *indices, of_source=bool(i), **a) for i in wanted}
    gradients = {}
    if 0 in wanted:
        passes_through = a["reduce"] == "sum" and a["include_self"]
        zero = popxl.constant(0, g.dtype)
        gradients[0] = (
            g if passes_through else scattered(g, zero, *indices, reduce="set", include_self=True, **position)
        )
    if 1 in wanted:
        gradients[1] = picked(g, *indices, **position)
    return gradients


_START = {"sum": 0, "mean": 0, "prod": 1, "amax": -jnp.inf, "amin": jnp.inf}
_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}


@jax_op(title="Scatter", gradient=_scattered_gradient)
def scattered(
    input: Any, source: Any, *indices: Any, reduce: str, dims: tuple[int, ...], aligned: bool, include_self: bool
) -> Any:
    """Scatter sources into `input`, combined by `reduce` (`"set"` overwrites)."""
    indexed = partial(_indexed_ref, indices=indices, dims=dims, aligned=aligned)
    if reduce == "set":
        return indexed(input).set(source)
    t = widen(input)
    if not include_self:
        t = indexed(t).set(_start(reduce, t.dtype))
    t = getattr(indexed(t), _METHODS[reduce])(widen(source))
    if reduce == "mean":
        count = indexed(jnp.full(t.shape, int(include_self), jnp.int32)).add(1)
        t = (t / jnp.maximum(count, 1)) if jnp.issubdtype(t.dtype, jnp.floating) else t // jnp.maximum(count, 1)
    return t.astype(input.dtype)


def _start(reduce: str, dtype: Any) -> Any:
    """Identity element of a reduction."""
    if reduce in ("amax", "amin") and not jnp.issubdtype(dtype, jnp.floating):
        return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max
    return _START[reduce]


@jax_op(title="ScatterGrad")
def _source_gradient(
    g: Any,
    input: Any,
    source: Any,
    *indices: Any,
    of_source: bool,
    reduce: str,
    dims: tuple[int, ...],
    aligned: bool,
    include_self: bool,
) -> Any:
    """Gradient share of each number combined at a scattered position.

    The gradient of a mean is shared evenly; that of an extreme by the elements equal to it; that of a product is the
    product of the others.
    """
    indexed = partial(_indexed_ref, indices=indices, dims=dims, aligned=aligned)

    def gather_source(t: Any) -> Any:
        return indexed(t).get(mode="clip") if of_source else t

    g, input, source = map(widen, (g, input, source))
    source = jnp.broadcast_to(source, jax.eval_shape(lambda t: indexed(t).get(), input).shape)
    takes_part = jnp.ones(g.shape, bool) if include_self else indexed(jnp.ones(g.shape, bool)).set(False)
    own = source if of_source else input
    if reduce == "prod":
        zeros = indexed(jnp.where(takes_part & (input == 0), 1, 0)).add(source == 0)
        product = indexed(jnp.where(takes_part & (input != 0), input, 1)).multiply(jnp.where(source == 0, 1, source))
        others = gather_source(product) / jnp.where(own == 0, 1, own)
        share = jnp.where(gather_source(zeros) == (own == 0), others, 0)
    elif reduce == "mean":
        share = 1 / gather_source(indexed(takes_part.astype(g.dtype)).add(1))
    else:
        method = _METHODS[reduce]
        out = getattr(indexed(jnp.where(takes_part, input, _START[reduce])), method)(source)
        # This includes elements that take no part, where they equal the extreme, as in PyTorch.
        winners = indexed((input == out).astype(g.dtype)).add(source == indexed(out).get(mode="clip"))
        share = jnp.where(own == gather_source(out), 1 / jnp.maximum(gather_source(winners), 1), 0)
    return gather_source(g) * (share if of_source else jnp.where(takes_part, share, 0))


def _scatter(
    input: popxl.Tensor,
    source: popxl.Tensor | Number,
    *indices: popxl.Tensor,
    dims: tuple[int, ...],
    reduce: str = "set",
    aligned: bool = False,
    include_self: bool = True,
) -> popxl.Tensor:
    numbers = cast_like(source, input.dtype)
    return scattered(input, numbers, *indices, reduce=reduce, dims=dims, aligned=aligned, include_self=include_self)


_OTHER_NAMES = {"add": "sum", "multiply": "prod"}


def scatter(
    input: popxl.Tensor,
    dim: int,
    index: popxl.Tensor,
    src: popxl.Tensor | None = None,
    value: Number | popxl.Tensor = 0,
    reduce: str = "set",
    include_self: bool = True,
) -> popxl.Tensor:
    index, source = at_least_1d(index), value
    if src is not None:  # it may be larger than the index
        source = at_least_1d(src)[tuple(slice(0, size) for size in index.shape)]
    position: dict[str, Any] = {"dims": (axis_of(input, dim),), "aligned": True}
    reduction = _OTHER_NAMES.get(reduce, reduce)
    return _scatter(at_least_1d(input), source, index, reduce=reduction, include_self=include_self, **position)


lowers("aten.scatter", "aten.scatter_reduce")(scatter)
lowers("aten.scatter_add")(partial(scatter, reduce="sum"))


def index_update(
    input: popxl.Tensor,
    dim: int,
    index: popxl.Tensor,
    source: popxl.Tensor | None = None,
    value: Number | popxl.Tensor = 0,
    alpha: Number = 1,
    reduce: str = "set",
    include_self: bool = True,
) -> popxl.Tensor:
    rows = value if source is None else at_least_1d(source) if alpha == 1 else at_least_1d(source) * alpha
    dims = (axis_of(input, dim),)
    return _scatter(at_least_1d(input), rows, at_least_1d(index), dims=dims, reduce=reduce, include_self=include_self)


lowers("aten.index_copy", "aten.index_fill", "aten.index_reduce")(index_update)
lowers("aten.index_add")(partial(index_update, reduce="sum"))


@lowers("aten.put")
def put(input: popxl.Tensor, index: popxl.Tensor, source: popxl.Tensor, accumulate: bool = False) -> popxl.Tensor:
    flat, content = ops.reshape(input, (input.nelms,)), ops.reshape(source, index.shape)
    return _scatter(flat, content, index, dims=(0,), reduce="sum" if accumulate else "set")


@lowers("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def index_put(
    input: popxl.Tensor,
    indices: Sequence[popxl.Tensor | None],
    values: popxl.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> popxl.Tensor:
    dims, used = _split(indices)
    if not any(each.dtype in (dtypes.bool, dtypes.uint8) for each in used):
        return _scatter(input, values, *used, dims=dims, reduce="sum" if accumulate else "set")
    if len(used) > 1:
        raise ValueError(
            "a mask stands beside other indices: how many places there are depends on its numbers. Write with "
            "`torch.where` and a mask of the whole tensor."
        )
    return masked_update(input, cast_like(values, input.dtype), *used, axis=dims[0], accumulate=accumulate)


@lowers("aten.masked_scatter")
def masked_scatter(input: popxl.Tensor, mask: popxl.Tensor, source: popxl.Tensor) -> popxl.Tensor:
    shape = wanted().shape
    t, full_mask = (each if each.shape == shape else broadcast(each, shape=shape) for each in (input, mask))
    return masked_update(t, ops.reshape(source, (source.nelms,)), full_mask, axis=0, accumulate=False)


@jax_op(title="MaskedUpdate")
def masked_update(input: Any, values: Any, mask: Any, *, axis: int, accumulate: bool) -> Any:
    """Update elements under a mask over the dimensions from `axis` on, with one value or successive values."""
    masked = range(axis, axis + mask.ndim)
    lines = jnp.moveaxis(input, masked, range(mask.ndim))
    before, after = input.shape[:axis], input.shape[masked.stop :]
    count = values.shape[-len(after) - 1] if values.ndim > len(after) else 1
    new = jnp.moveaxis(jnp.broadcast_to(values, (*before, count, *after)), axis, 0)
    if count > 1:
        new = new.at[jnp.cumsum(mask.reshape(-1)) - 1].get(mode="clip")
        new = new.reshape(lines.shape)
    chosen = jnp.expand_dims(mask != 0, range(mask.ndim, input.ndim))
    return jnp.moveaxis(jnp.where(chosen, lines + new if accumulate else new, lines), range(mask.ndim), masked)
