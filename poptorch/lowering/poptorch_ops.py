"""Lowerings of poptorch's own ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax import lax

import popxl
from poptorch.lowering.emission import next_seed
from poptorch.lowering.linalg import product
from poptorch.lowering.operands import axis_of
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.ops import print_tensor_kind


@lowers(
    "poptorch.nop",
    "poptorch.return_all",
    "poptorch.set_available_memory",
    "poptorch.set_overlap_for_input",
    "poptorch.set_overlap_for_output",
)
def identity(tensor: popxl.Tensor, available_memory_proportion: float = 0) -> popxl.Tensor:
    return ops.identity(tensor)


@lowers("poptorch.ipu_print_tensor")
def ipu_print_tensor(
    tensor: popxl.Tensor,
    title: str,
    print_gradient: bool,
    summarise_threshold: int,
    edge_items: int,
    max_line_width: int,
    digits: int,
    float_format: str,
    separator: str,
    open_bracket: str,
    close_bracket: str,
) -> popxl.Tensor:
    title = title or f"print_{tensor.name}"  # below `ops.print_tensor`, whose separator and brackets are one character
    numbers = (summarise_threshold, edge_items, max_line_width, digits, float_format)
    style = (*numbers, separator, open_bracket, close_bracket)
    return print_tensor_kind(tensor, title=title, print_self=True, print_gradient=print_gradient, style=style)


lowers("poptorch.serializedMatMul")(lambda lhs, rhs, **how: product(lhs, rhs))


@lowers("poptorch.dynamic_slice")
def dynamic_slice(tensor: popxl.Tensor, dim: int, start: popxl.Tensor, size: int, step: int) -> popxl.Tensor:
    return _strided(tensor, start, axis=axis_of(tensor, dim), count=math.ceil(size / step), step=step)


@jax_op(title="DynamicStridedSlice")
def _strided(t: Any, start: Any, *, axis: int, count: int, step: int) -> Any:
    places = start.reshape(()) + step * jnp.arange(count)
    return jnp.take(t, places, axis, mode="clip")


@lowers("poptorch.dynamic_update")
def dynamic_update(input: popxl.Tensor, src: popxl.Tensor, dim: int, start: popxl.Tensor, size: int) -> popxl.Tensor:
    return _updated(input, src, start, axis=axis_of(input, dim))


@jax_op(title="DynamicSliceUpdate")
def _updated(t: Any, part: Any, start: Any, *, axis: int) -> Any:
    return lax.dynamic_update_slice_in_dim(t, part, start.reshape(()), axis)


# Points --------------------------------------------------------------------------------------------------------------


@lowers("poptorch.fps")
def fps(src: popxl.Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False) -> popxl.Tensor:
    points = []
    for start, stop in zip(ptr[:-1], ptr[1:], strict=True):
        count = math.ceil(numpy.float32(ratio) * (stop - start))
        seed = next_seed() if random_start else None
        points.append(_farthest_points(src[start:stop], seed, count=count) + start)
    return ops.concat(points, 0)


@jax_op(gradient=None)
def _farthest_points(points: Any, seed: Any = None, *, count: int) -> Any:
    """Farthest point sampling: indices of points, each maximising the distance from earlier samples."""
    first, coordinates = jnp.int32(0), tuple(range(1, points.ndim))
    if seed is not None:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        first = jax.random.randint(key, (), 0, points.shape[0])

    def sample_point(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Any]:
        chosen, nearest = state
        nearest = jnp.minimum(nearest, jnp.sum((points - points[chosen]) ** 2, coordinates))
        return (jnp.argmax(nearest).astype(jnp.int32), nearest), chosen

    _, found = lax.scan(sample_point, (first, jnp.full(points.shape[0], jnp.inf, points.dtype)), length=count)
    return found


Sets = popxl.Tensor | Sequence[int] | None


@lowers("poptorch.nearest")
def nearest(x: popxl.Tensor, y: popxl.Tensor, batch_x: Sets = None, batch_y: Sets = None) -> popxl.Tensor:
    return _nearest(x, y, *(popxl.constant(s, popxl.int32) if isinstance(s, tuple) else s for s in (batch_x, batch_y)))


@jax_op(title="NearestPoint", gradient=None)
def _nearest(x: Any, y: Any, batch_x: Any = None, batch_y: Any = None) -> Any:
    x, y = (each[:, None] if each.ndim == 1 else each for each in (x, y))
    distances = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    if batch_x is not None and batch_y is not None:
        distances = jnp.where(batch_x[:, None] == batch_y[None], distances, jnp.inf)
    return jnp.argmin(distances, 1).astype(jnp.int32)
