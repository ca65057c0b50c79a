"""Rows of the ops that read, and write, what an index tensor points at."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    ANY,
    INTS,
    NUMBERS,
    Array,
    Inplace,
    PopxlError,
    Row,
    Sample,
    X,
    bad,
    f32,
    i32,
    rule,
    sample,
    scalar,
    u32,
    values,
)


def gathered(t: Array, indices: Array, axis: int = 0, zero_OOR: bool = False, **hints: Any) -> Array:
    size = t.shape[axis]
    indices = indices.astype(np.int64)
    inside = (indices >= 0) & (indices < size)
    taken = np.take(t, np.where(inside, indices, 0), axis=axis)
    rows = inside.reshape((1,) * (axis % t.ndim) + inside.shape + (1,) * (t.ndim - axis % t.ndim - 1))
    return np.where(rows, taken, 0).astype(t.dtype) if zero_OOR else taken


def grouped(t: Array, indices: Array, axis: int = 0, group_size: int = 1, **how: Any) -> Array:
    if group_size == 1:
        return gathered(t, indices, axis, **how)
    return np.stack([gathered(*pair, axis % t.ndim - 1, **how) for pair in zip(t, indices, strict=True)])


def block(t: Array, index: Array, axes: Any, sizes: Any) -> tuple[slice, ...]:
    cuts = [slice(None)] * t.ndim
    for axis, start, size in zip(axes, index.ravel().tolist(), sizes, strict=True):
        first = max(0, min(start, t.shape[axis] - size))
        cuts[axis] = slice(first, first + size)
    return tuple(cuts)


def cut_out(t: Array, index: Array, axes: Any, sizes: Any, no_overlap: bool) -> Array:
    return t[block(t, index, axes, sizes)].copy()


def replaced(t: Array, index: Array, t_update: Array, axes: Any, sizes: Any, no_overlap: bool) -> Array:
    out = t.copy()
    out[block(t, index, axes, sizes)] = t_update
    return out


CUBE = values("float32", (3, 5, 7))

PICKED = [
    *(sample(values(d, (4, 3)), i32(3, 0, 3)) for d in ANY.split()),
    sample(X, i32([0, 2], [1, 1]), axis=1),
    sample(values("float32", (2, 3, 4)), u32(2, 0), axis=-2),
    sample(X, scalar(1, "int32")),
    sample(X, np.zeros((0, 2), np.int32), axis=1),
    sample(X, i32(1, 7, -1, 0), zero_OOR=True),
    sample(X, u32(1, 2**32 - 1), zero_OOR=True),
    sample(X, i32([-1, 2]), axis=1, zero_OOR=True, available_memory_proportion=0.3),
    sample(INTS, i32(0, 2, -3), zero_OOR=True),
    sample(values("bool", (5, 2)), i32(4, 5, 1), zero_OOR=True),
    sample(values("float32", (300, 1)), np.array([255, 3], np.uint8), zero_OOR=True),
    sample(values("float32", (300, 1)), np.array([127, 3, -1], np.int8), zero_OOR=True),
]
PICKED_RULES = [
    rule(f32(1, 2, 3), i32(0, 2, 0), g=f32(1, 2, 3), gives=(f32(4, 0, 2), None)),
    rule(f32(1, 2, 3), i32(-1, 1, 9), zero_OOR=True, g=f32(1, 2, 3), gives=(f32(0, 2, 0), None)),
    rule(f32(1, 2, 3), i32(-1, 1, 9), g=f32(1, 2, 3), gives=(f32(0, 2, 0), None)),
]
PICKED_BAD = [
    bad(PopxlError, "axis 2 does not exist", X, i32(0), 2),
    bad(PopxlError, "axis -3", X, i32(0), -3),
    bad(PopxlError, "rank 0", scalar(1, "float32"), i32(0)),
]


def slices(dtype: str) -> Sample:
    return sample(values(dtype, (3, 5)), i32(1, 2), [0, 1], [2, 3], True)


def updates(dtype: str) -> Sample:
    return sample(values(dtype, (3, 5)), i32(1, 2), values(dtype, (2, 3), seed=1), [0, 1], [2, 3], True)


def blocks_bad(*more: Array) -> list[Any]:
    """What is wrong with axes and sizes."""
    return [
        bad(PopxlError, "axis 2 does not exist", X, i32(0), *more, [2], [1], True),
        bad(PopxlError, "axis -3 does not exist", X, i32(0), *more, [-3], [1], True),
        bad(
            ValueError,
            r"`axes` \(0, 1\) and `sizes` \(1,\) have different lengths",
            X,
            i32(0),
            *more,
            [0, 1],
            [1],
            True,
        ),
        bad(ValueError, r"names a dimension twice: \(1, -1\)", X, i32(0, 0), *more, [1, -1], [1, 1], True),
        bad(TypeError, r"`axes` must be a sequence of integers; got 0 \(int\)", X, i32(0), *more, 0, [1], True),
        bad(TypeError, r"`sizes` must hold integers; got 1\.0 \(float\)", X, i32(0), *more, [0], [1.0], True),
        bad(ValueError, r"`sizes` is \(-1,\); sizes are not negative", X, i32(0), *more, [0], [-1], True),
    ]


INDEX = [
    Row("gather", gathered, PICKED, "Gather", "gather_out", differentiable=(0,), tolerance=0, rules=PICKED_RULES,
        bad=PICKED_BAD),
    Row("tied_gather", gathered, PICKED, "PopartTiedGather", "tiedgather_out", differentiable=(0,), tolerance=0,
        rules=PICKED_RULES, bad=PICKED_BAD),
    Row("groupedgather", grouped,
        [*PICKED, *(sample(values(d, (2, 4, 3)), i32([3, 0, 3], [1, 1, 2]), axis=1, group_size=2) for d in ANY.split()),
         sample(CUBE, values("int32", (3, 2, 4), 0, 1.5), axis=-1, group_size=3),
         sample(CUBE, u32(0, 4, 2), 1, 3),
         sample(CUBE, i32([0, -1], [5, 4], [2**30, -5]), 1, 3, zero_OOR=True)],
        "Gather", "gather_out", differentiable=(0,), tolerance=0,
        rules=[*PICKED_RULES, rule(f32([1, 2, 3], [4, 5, 6]), i32([0, 2, 0], [1, -1, 3]), axis=1, group_size=2,
                                   g=f32([1, 2, 3], [4, 5, 6]), gives=(f32([4, 0, 2], [0, 4, 0]), None))],
        bad=[*PICKED_BAD, bad(PopxlError, "`axis` is 0, the dimension of the 2 groups", X, INTS, 0, 2),
             bad(PopxlError, "`axis` is -2, the dimension of the 2 groups", X, INTS, -2, 2),
             bad(ValueError, "`group_size` is 0; expected the number of groups", X, INTS, 1, 0),
             bad(TypeError, r"^groupedgather: `group_size` must be an integer; got None", X, INTS, 1, None)]),
    Row("dynamic_slice", cut_out,
        [*map(slices, ANY.split()), sample(CUBE, i32(1, 2), [0, 2], [1, 3], False),
         sample(CUBE, i32(4, 1), (2, 0), (2, 2), True), sample(CUBE, i32([[3], [2]]), [-1, 1], [4, 1], True),
         sample(X, scalar(1, "uint32"), [1], [2], False), sample(CUBE, i32(0), [1], [5], True),
         sample(CUBE, i32(-1, 9), [0, 1], [2, 2], True), sample(CUBE, u32(2**32 - 1), [2], [3], True),
         sample(values("float32", (300,)), np.array([127], np.int8), [0], [2], True),
         sample(values("float32", (300,)), np.array([255], np.uint8), [0], [2], True),
         sample(CUBE, i32(2), [1], [0], True), sample(X, np.zeros(0, np.int32), [], [], True)],
        "DynamicSlice", "dynamic_slice_out", differentiable=(0,), keeps=1, tolerance=0, bad=blocks_bad()),
    Row("dynamic_update", replaced,
        [*map(updates, NUMBERS.split()), updates("bool"),
         sample(CUBE, i32(1, 2), values("float32", (1, 5, 3)), [0, 2], [1, 3], False),
         sample(CUBE, i32(1, 2), values("float32", (5, 3)), [0, 2], [1, 3], False),
         sample(X, u32(1), values("float32", (3,)), (0,), (1,), True),
         sample(CUBE, i32([[3], [2]]), values("float32", (3, 1, 4)), [-1, 1], [4, 1], True),
         sample(CUBE, i32(-1, 9), values("float32", (2, 2, 7)), [0, 1], [2, 2], True),
         sample(X, u32(2**32 - 1), values("float32", (2, 2)), [1], [2], True)],
        "DynamicUpdate", "dynamic_update_out", differentiable=(0, 2), tolerance=0,
        inplace=Inplace("dynamic_update_", "DynamicUpdateInplace", "dynamicupdateinplace_out"), bad=blocks_bad(X)),
]  # fmt: skip
