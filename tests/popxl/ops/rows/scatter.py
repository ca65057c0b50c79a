"""Rows of the ops that put elements where indices say."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops
from tests.popxl.ops.rows.schema import (
    ANY,
    FLOATS,
    INTS,
    NUMBERS,
    Array,
    PopxlError,
    Row,
    X,
    bad,
    f16,
    f32,
    i32,
    rule,
    sample,
    scalar,
    u32,
    values,
)


def hot(t: Array, num_classes: int, values: Array, axis: int) -> Array:
    classes = np.arange(num_classes)
    at = t.ndim if axis == -1 else axis
    rows = [np.where(classes == int(element), values[1], values[0]) for element in t.ravel()]
    return np.moveaxis(np.reshape(rows, (*t.shape, num_classes)), -1, at).astype(values.dtype)


def onehot(t: Any, num_classes: Any, values: Any, axis: int) -> Any:
    return ops.onehot(t, popxl.constant(num_classes), values, axis)


def scattered(t: Array, indices: Array, values: Array, axis: int = 0, **hints: Any) -> Array:
    out = t.copy()
    for at in np.ndindex(indices.shape):
        to = list(at)
        to[axis] = int(indices[at])
        if 0 <= to[axis] < t.shape[axis]:
            out[tuple(to)] = values[at]
    return out


def laid_out(data: Array, indices: Array, axis: int, broadcast: bool) -> Array:
    """An index for each element that takes part."""
    if indices.ndim == 1:
        indices = indices.reshape([-1 if d == axis else 1 for d in range(data.ndim)])
    indices = indices.reshape(indices.shape + (1,) * (data.ndim - indices.ndim))
    return np.broadcast_to(indices, data.shape) if broadcast else indices


def reduced(
    data: Array,
    indices: Array,
    reduction: str,
    initial_values: Array | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: bool = True,
    **hints: Any,
) -> Array:
    axis %= data.ndim
    indices = laid_out(data, indices, axis, enable_index_broadcast)
    shape = (*indices.shape[:axis], axis_size or 0, *indices.shape[axis + 1 :])
    out = np.zeros(shape, data.dtype) if initial_values is None else initial_values.copy()
    for to in np.ndindex(out.shape):
        if any(a >= b for d, (a, b) in enumerate(zip(to, indices.shape, strict=True)) if d != axis):
            continue
        line = (*to[:axis], slice(None), *to[axis + 1 :])
        chosen = data[line][: indices.shape[axis]][indices[line].astype(np.int64) == to[axis]]
        if chosen.size:
            start = chosen[:0] if initial_values is None else out[to][None]
            if reduction == "none":
                out[to] = chosen[0]
            else:
                out[to] = getattr(np, reduction)(np.concatenate([start, chosen]))
    return out


def grouped_reduced(
    data: Array,
    indices: Array,
    reduction: str,
    initial_values: Array | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    group_size: int = 1,
    **how: Any,
) -> Array:
    if group_size == 1:
        return reduced(data, indices, reduction, initial_values, axis, axis_size, **how)
    starts = [None] * group_size if initial_values is None else initial_values
    return np.stack(
        [
            reduced(d, i, reduction, s, axis % data.ndim - 1, axis_size, **how)
            for d, i, s in zip(data, indices, starts, strict=True)
        ]
    )


def torch_scatter(t: Any, indices: Any, values: Any, axis: int = 0, **hints: Any) -> Any:
    return t.scatter(axis, indices.long(), values)


def torch_scatter_reduce(
    data: Any,
    indices: Any,
    reduction: str,
    initial_values: Any = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: bool = True,
    **hints: Any,
) -> Any:
    import torch

    indices = torch.from_numpy(laid_out(data.numpy(), indices.numpy(), axis % data.ndim, enable_index_broadcast).copy())
    start = initial_values
    if start is None:
        shape = list(indices.shape)
        shape[axis] = axis_size or 0
        start = torch.zeros(shape, dtype=data.dtype)
    how = {"sum": "sum", "max": "amax", "min": "amin"}[reduction]
    return start.scatter_reduce(axis, indices.long(), data, how, include_self=initial_values is not None)


T3, V3 = values("float32", (3, 3)), values("float32", (2, 3), seed=1)
ROWS3 = f32([1, 2], [3, 4], [5, 6])
CUBE = values("float32", (2, 3, 4))
PLACES = values("int32", (2, 3, 4), 0, 1)  # 0 to 4
TWO = [values("float32", (2, 3, 2), seed=s) for s in (0, 1)]

REDUCED = [
    *(sample(values(d, (3, 2)), i32(3, 0, 1), r, None, axis_size=5, torch=r != "none") for d in NUMBERS.split()
      for r in ("sum", "max", "min", "none")),
    *(sample(values(d, (3, 2)), i32(1, 1, 0), r, None, axis_size=3) for d in NUMBERS.split()
      for r in ("sum", "max", "min")),
    *(sample(values(d, (3, 2)), i32(1, 1, 0), r, values(d, (3, 2), seed=1)) for d in NUMBERS.split()
      for r in ("sum", "max", "min")),
    sample(ROWS3, i32(2, 5, 0), "none", values("float32", (4, 2)), torch=False),
    *(sample(CUBE, PLACES, r, None, axis, size) for r in ("sum", "max", "min")
      for axis, size in ((0, 5), (1, 6), (-1, 7))),
    *(sample(CUBE, PLACES, r, values("float32", (2, 3, 6), seed=1), 2) for r in ("sum", "max", "min")),
    *(sample(CUBE, index, "sum", None, axis=1, axis_size=4)
      for index in (i32(3, 0, 3), i32([[3], [0], [3]]), i32([3, 0, 3]), u32(2, 1, 1))),
    *(sample(CUBE, i32(-1, 9, 2), r, None, 1, 4, torch=False) for r in ("sum", "max", "min", "none")),
    sample(CUBE, values("int32", (2, 3, 4), -1, 1), "max", values("float32", (5, 3, 4)), torch=False),
    *(sample(ROWS3, i32(3, 0, 1), r, None, 0, 5, False) for r in ("sum", "max", "min")),
    sample(CUBE, i32([2, 0], [0, 0]), "sum", None, 1, 3, False),
    sample(CUBE, i32([[2, 0]], [[0, 0]]), "max", None, -2, 3, False, available_memory_proportion=0.3),
    sample(CUBE, i32([[2, 0, 2], [0, 1, 0]]), "min", values("float32", (2, 4, 3)), -1, None, False, torch=False),
    sample(CUBE, i32(1, 1), "sum", values("float32", (3, 2, 5)), 0, None, False, torch=False),
    sample(values("float32", (300, 1)), np.arange(300).astype(np.uint8), "sum", None, 0, 270),
    sample(values("float32", (4,)), np.array([2, -1, 127, 2], np.int8), "max", None, axis_size=3),
    sample(f32(-np.inf, 1, np.inf), i32(0, 2, 2), "max", None, axis_size=4),
    sample(ROWS3, i32(0, 0, 0), "sum", f16([1, 2]), dtype="float16"),
    sample(np.zeros((0, 2), np.float32), np.zeros(0, np.int32), "max", None, axis_size=2),
]  # fmt: skip
REDUCED_RULES = [
    # Ties are not split, and the value from before takes part in them.
    rule(f32(1, 3, 3, 2), i32(0, 1, 1, 7), "max", None, axis_size=3, g=f32(1, 2, 4), gives=(f32(1, 2, 2, 0), None)),
    rule(f32(1, 3, 3), i32(0, 0, 1), "min", f32(1, 9, 5), g=f32(1, 2, 4), gives=(f32(1, 0, 2), None, f32(1, 0, 4))),
    rule(f32(1, 3, 3), i32(0, 0, 1), "max", f32(3, 9, 5), g=f32(1, 2, 4), gives=(f32(0, 1, 0), None, f32(1, 2, 4))),
    rule(f32(1, 3, 3), i32(2, 2, -1), "none", f32(3, 9, 5), g=f32(1, 2, 4), gives=(f32(4, 4, 0), None, f32(1, 2, 0))),
    rule(f32(1, 3, 3), i32(2, 2, -1), "sum", f32(3, 9, 5), g=f32(1, 2, 4), gives=(f32(4, 4, 0), None, f32(1, 2, 4))),
]
REDUCED_BAD = [
    bad(ValueError, "neither `initial_values` nor `axis_size` is given", X, i32(0, 1), "sum"),
    bad(ValueError, "`reduction` is 'mean'; expected 'sum', 'min', 'max' or 'none'", X, i32(0, 1), "mean", None, 0, 3),
    bad(ValueError, r"`reduction` is \['sum'\]", X, i32(0, 1), ["sum"], None, 0, 3),
    bad(TypeError, "`enable_index_broadcast` must be True or False", X, i32(0, 1), "sum", None, 0, 3, "no"),
    bad(ValueError, "`axis_size` is -1", X, i32(0, 1), "sum", None, 0, -1),
    bad(TypeError, r"`axis_size` must be an integer; got 2\.0 \(float\)", X, i32(0, 1), "sum", None, 0, 2.0),
    bad(TypeError, r"`axis` must be an integer; got None", X, i32(0, 1), "sum", None, None, 2),
    bad(TypeError, r"`initial_values` must be a Tensor; got 1 \(int\)", X, i32(0, 1), "sum", 1),
    bad(PopxlError, "axis 2 does not exist", X, i32(0, 1), "sum", None, 2, 3),
    bad(PopxlError, "axis -3 does not exist", X, i32(0, 1), "sum", None, -3, 3),
    bad(PopxlError, "rank 0", scalar(1), i32(0), "sum", None, 0, 3),
    bad(PopxlError, r"`indices` has the shape \(3,\); expected that of `data`, \(2, 3\), or.*\(2,\) or \(2, 1\)",
        X, i32(0, 1, 2), "sum", None, 0, 3),
    bad(PopxlError, r"`indices` has the shape \(2, 2\)", X, i32([0, 1], [0, 1]), "max", None, 0, 3),
    bad(PopxlError, r"`indices` has the shape \(1,\)", X, i32(0), "max", None, 0, 3),
    bad(PopxlError, "`indices`, of shape .* is larger than `data`", X, i32(0, 1, 2), "sum", None, 0, 3, False),
    bad(PopxlError, "`indices`, of shape .* is larger than `data`", X, i32([[0]]), "sum", None, 0, 3, False),
    bad(PopxlError, r"`initial_values` has the shape \(4, 2\); in all dimensions but 0 .* \(2, 3\)",
        X, i32(0, 1), "sum", values("float32", (4, 2))),
    bad(PopxlError, r"`initial_values` has the shape \(4,\)", X, i32(0, 1), "sum", f32(1, 2, 3, 4)),
]  # fmt: skip


SCATTER = [
    Row("onehot", hot,
        [*(sample(values("int32", (2, 3), 0, 1), 4, values(d, (2,)), axis, dtype=d if "f" in d else None)
           for d in ANY.split() for axis in (0, 1, 2, -1)),
         sample(i32(1, 5), 6, f32(0, 1), 0, dtype="float32"),
         sample(scalar(2, "int32"), 3, f32(0, 1), 0, dtype="float32"),
         sample(i32(1, 5, -1, -6, 2**31 - 1), 5, f32(0.5, 2), -1, dtype="float32"),
         sample(u32(1, 2**32 - 1), 3, f32(0.5, 2), -1, dtype="float32"),
         sample(np.array([255, 3], np.uint8), 300, f32(1, 2), 0, dtype="float32"),
         sample(np.array([-1, 127], np.int8), 300, f32(1, 2), 1, dtype="float32"),
         sample(i32(1, 0), 0, f32(1, 2), 1, dtype="float32")],
        "OneHot", "onehot_out", adds=2, differentiable=(1,), tolerance=0, build=onehot,
        bad=[bad(PopxlError, "known only when the program runs", INTS, scalar(3, "int32"), f32(0, 1), 0),
             bad(PopxlError, "`num_classes` has to be a single integer", INTS, i32(3, 4), f32(0, 1), 0),
             bad(PopxlError, "`num_classes` has to be a single integer", INTS, scalar(3), f32(0, 1), 0)]),
    Row("scatter", scattered,
        [*(sample(values(d, (3, 4)), i32([1, 0, 2], [0, 2, 1]), values(d, (2, 3), seed=1)) for d in ANY.split()),
         sample(np.zeros((3, 3), np.float32), i32([1, 0, 2], [0, 2, 1]), f32([-1, -1.1, -1.2], [2, 2.1, 2.2])),
         sample(np.zeros((3, 3), np.float32), i32([1, 0, 2], [0, 2, 1]), f32([-1, -1.1, -1.2], [2, 2.1, 2.2]), 1),
         sample(values("float32", (5,)), i32(4, 1), values("float32", (3,))),
         sample(values("float32", (4, 3)), i32([3], [0]), values("float32", (2, 2), seed=1)),
         sample(values("float32", (4, 3)), i32([2, 0, 1]), values("float32", (2, 3), seed=1), -1,
                available_memory_proportion=0.3),
         sample(CUBE, i32([[3, 0], [1, 2]]), values("float32", (2, 2, 2), seed=1), axis=2),
         sample(CUBE, u32([[0, 2], [1, 0]]), values("float32", (1, 2, 2), seed=1), axis=1, torch=False),
         sample(T3, i32([-1, 0, 3], [0, -3, 2**30]), V3, torch=False),
         sample(values("float32", (300, 2)), np.array([[255, 3]], np.uint8), values("float32", (1, 2), seed=1)),
         sample(values("float32", (2, 2)), i32([5], [1], [0]), values("float32", (3, 1), seed=1), torch=False),
         sample(T3, np.zeros((2, 0), np.int32), V3)],
        "Scatter", "scatter_out", differentiable=(0, 2), tolerance=0, torch=torch_scatter,
        rules=[rule(f32(1, 2, 3), i32(2, -1, 2), f32(5, 6, 7), g=f32(1, 2, 4),
                    gives=(f32(1, 2, 0), None, f32(4, 0, 4)))],
        bad=[bad(PopxlError, "axis 2 does not exist", T3, i32([0]), V3, 2),
             bad(PopxlError, "axis -3 does not exist", T3, i32([0]), V3, -3),
             bad(PopxlError, "rank 0", scalar(1), scalar(1, "int32"), scalar(2)),
             bad(PopxlError, "have to have the same rank", T3, i32(0), V3),
             bad(PopxlError, "have to have the same rank", T3, i32([0]), f32(0)),
             bad(PopxlError, "in dimension 1 there are 3 `indices` for 2 `values`", T3, i32([0, 1, 2]), f32([0, 1])),
             bad(PopxlError, r"in dimension 1, which is not `axis`, .* 3 > 2", values("float32", (4, 2)),
                 i32([0, 1, 2]), V3),
             bad(TypeError, r"^scatter: `axis` must be an integer; got 0\.0 \(float\)", T3, i32([0]), V3, 0.0)]),
    Row("scatter_reduce", reduced, REDUCED, "ScatterReduce", "scatterreduce_out", differentiable=(0, 2),
        rules=REDUCED_RULES, torch=torch_scatter_reduce, bad=REDUCED_BAD),
    Row("grouped_scatter_reduce", grouped_reduced,
        [*(s for s in REDUCED if len(s.operands) < 7),
         *(sample(values(d, (2, 3, 2)), i32([3, 0, 1], [1, 1, 1]), r, None, axis=1, axis_size=4, group_size=2)
           for d in FLOATS.split() for r in ("sum", "max", "min")),
         sample(TWO[0], i32([3, 0, 1], [-1, 2, 9]), "none", None, 1, 4, 2),
         sample(CUBE, values("int32", (2, 3, 4), 0, 1, seed=1), "sum", values("float32", (2, 3, 6)), -1, group_size=2),
         sample(CUBE, i32([1, 0, 5, 1], [3, 3, 0, -1]), "max", values("float32", (2, 3, 6)), -1, None, 2),
         sample(CUBE, i32([[2, 0]], [[0, 0]]), "sum", None, 1, 3, 2, enable_index_broadcast=False)],
        "ScatterReduce", "scatterreduce_out", differentiable=(0, 2),
        rules=[*REDUCED_RULES,
               rule(f32([1, 3, 3], [1, 3, 3]), i32([2, 2, -1], [0, 1, 1]), "none", f32([3, 9, 5], [3, 9, 5]),
                    1, None, 2, g=f32([1, 2, 4], [1, 2, 4]),
                    gives=(f32([4, 4, 0], [1, 2, 2]), None, f32([1, 2, 0], [0, 0, 4])))],
        bad=[*(b for b in REDUCED_BAD if len(b.operands) < 7),
             bad(ValueError, "`group_size` is 0", X, INTS, "sum", None, 1, 3, 0),
             bad(PopxlError, "`axis` is -2, the dimension of the 2 groups", X, INTS, "sum", None, -2, 3, 2),
             bad(PopxlError, r"`data` has the shape \(2, 3\); its first dimension .* 3 groups",
                 X, INTS, "sum", None, 1, 3, 3),
             bad(PopxlError, r"`indices` has the shape \(3,\); its first dimension .* 2 groups",
                 X, i32(1, 2, 3), "sum", None, 1, 3, 2)]),
]  # fmt: skip
