"""Ops that arrange the numbers of tensors in another way, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


import torch

import popxl
from popxl import ops
from poptorch.capture.recorder import Data, View
from poptorch.dtypes import to_numpy
from poptorch.lowering.operands import axis_of, broadcast, full_shape
from poptorch.lowering.registry import jax_op, lowers

# Constants ------------------------------------------------------------------------------------------------------------


@lowers("poptorch.constant")
def constant(data: Data) -> popxl.Tensor:
    return popxl.constant(to_numpy(data.tensor))


# Shapes ---------------------------------------------------------------------------------------------------------------


@lowers("aten.view", "aten._unsafe_view", "aten.reshape")
def view(input: popxl.Tensor, size: Sequence[int]) -> popxl.Tensor:
    return ops.reshape(input, full_shape(input, size))


@lowers("aten.unsqueeze")
def unsqueeze(input: popxl.Tensor, dim: int) -> popxl.Tensor:
    axis = dim % (len(input.shape) + 1)
    return ops.reshape(input, (*input.shape[:axis], 1, *input.shape[axis:]))


@lowers("aten.t")
def t(input: popxl.Tensor) -> popxl.Tensor:
    return ops.transpose(input)


@lowers("aten.permute")
def permute(input: popxl.Tensor, dims: Sequence[int]) -> popxl.Tensor:
    return ops.transpose(input, tuple(axis_of(input, dim) for dim in dims))


@lowers("aten.expand")
def expand(input: popxl.Tensor, size: Sequence[int], implicit: bool = False) -> popxl.Tensor:
    missing = len(size) - len(input.shape)
    kept = (1,) * missing + input.shape
    return broadcast(input, shape=tuple(k if d == -1 else d for k, d in zip(kept, size, strict=True)))


@lowers("aten.select")
def select(input: popxl.Tensor, dim: int, index: int) -> popxl.Tensor:
    axis = axis_of(input, dim)
    return input[(slice(None),) * axis + (index % input.shape[axis],)]


@lowers("aten.slice")
def slice_(
    input: popxl.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> popxl.Tensor:
    return input[(slice(None),) * axis_of(input, dim) + (slice(start, end, step),)]


@lowers("aten.cat")
def cat(tensors: Sequence[popxl.Tensor], dim: int = 0) -> popxl.Tensor:
    return ops.concat(tensors, axis_of(tensors[0], dim))


@lowers("aten.as_strided")
def as_strided(
    input: popxl.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
) -> popxl.Tensor:
    places = torch.arange(input.nelms).as_strided(tuple(size), tuple(stride), storage_offset)
    return taken(input, _indices(places))


@jax_op(title="Take")
def taken(base: Any, places: Any) -> Any:
    return base.reshape(-1)[places]


def _indices(places: torch.Tensor) -> popxl.Tensor:
    return popxl.constant(places.numpy(), popxl.int32)


# Writing through a view -----------------------------------------------------------------------------------------------


@lowers("poptorch.put")
def put(base: popxl.Tensor, content: popxl.Tensor, view: View) -> popxl.Tensor:
    """A tensor in which what a view sees has been replaced."""
    op, arguments = view.op, view.arguments
    if op == "aten.slice":
        axis = axis_of(base, arguments.get("dim", 0))
        bounds = slice(arguments.get("start"), arguments.get("end"), arguments.get("step", 1))
        return written(base, content, axis=axis, bounds=bounds.indices(base.shape[axis]))
    if op == "aten.select":
        axis = axis_of(base, arguments["dim"])
        index = arguments["index"] % base.shape[axis]
        row = ops.reshape(content, (*base.shape[:axis], 1, *base.shape[axis + 1 :]))
        return written(base, row, axis=axis, bounds=(index, index + 1, 1))
    if op in ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.alias"):
        return ops.reshape(content, base.shape)
    numbered = torch.arange(base.nelms).reshape(base.shape)
    given = {"self" if name == "input" else name: value for name, value in arguments.items()}
    seen = getattr(getattr(torch.ops.aten, op.removeprefix("aten.")), view.overload)(**given | {"self": numbered})
    return scattered(base, content, _indices(seen[view.result] if isinstance(seen, tuple | list) else seen))


@jax_op(title="SliceUpdate")
def written(base: Any, content: Any, *, axis: int, bounds: tuple[int, int, int]) -> Any:
    return base.at[(slice(None),) * axis + (slice(*bounds),)].set(content)


@jax_op(title="Put")
def scattered(base: Any, content: Any, places: Any) -> Any:
    return base.reshape(-1).at[places].set(content).reshape(base.shape)
