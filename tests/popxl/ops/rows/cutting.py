"""Rows of ops that cut and join tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    ANY,
    INTS,
    Array,
    Inplace,
    PopxlError,
    Row,
    X,
    Y,
    bad,
    over,
    sample,
    scalar,
    torch_function,
    values,
)


def sliced(t: Array, start: Any = None, stop: Any = None, step: Any = None, axis: Any = None) -> Array:
    given = [[v] if isinstance(v, int) else v for v in (start, stop, step, axis)]
    count = max(len(v) for v in given if v is not None)
    at = range(count) if given[3] is None else given[3]
    begin, end, by = ([None] * count if v is None else v for v in given[:3])
    cuts = [slice(None)] * t.ndim
    for a, *cut in zip(at, begin, end, by, strict=True):
        cuts[a] = slice(*cut)
    return t[tuple(cuts)]


def cut(t: Array, splits: Any, axis: int = 0) -> list[Array]:
    return np.split(t, splits if isinstance(splits, int) else np.cumsum(splits)[:-1], axis)


SPLIT = [values("float32", shape, seed=i) for i, shape in enumerate([(2, 1, 4), (2, 3, 4), (2, 2, 4)])]


CUTTING = [
    Row("slice", sliced,
        [*over(ANY, (5, 3), start=1, stop=4), *over("float32", (6,), start=-2, step=-1),
         *over("float32", (6,), stop=3, step=-1), *over("float32", (5, 3), start=[1, None], stop=[None, 2]),
         *over("float32", (8, 3, 4), start=[0, 5], stop=[2, 2], step=[1, -1], axis=[2, 0]),
         *over("float32", (5, 3), start=-100, stop=100, axis=-1), *over("float32", (5, 3), step=[-1], axis=[1]),
         *over("float32", (5, 3), start=[None], stop=[None]), *over("float32", (4,), stop=-1),
         *over("float32", (4,), start=3, stop=1, step=-1)],
        "Slice", "slice_out", differentiable=(0,), keeps=0, tolerance=0,
        inplace=Inplace("slice_", "SliceInplace", "slice_out", view=True),
        bad=[bad(ValueError, "different lengths.*'start': 1, 'stop': 2", X, [0], [1, 2]),
             bad(PopxlError, "axis 2 does not exist", X, 0, 1, None, 2),
             bad(PopxlError, "axis 2 does not exist", X, [0, 0, 0]),
             bad(ValueError, r"names a dimension twice: \(1, -1\)", X, [0, 0], [1, 2], None, [1, -1]),
             bad(ValueError, "steps are 1 or -1", X, 0, 2, 2), bad(ValueError, "steps are 1 or -1", X, 0, 2, 0)]),
    Row("subsample", lambda t, strides: t[tuple(slice(None, None, s) for s in np.atleast_1d(strides))],
        [*over(ANY, (5, 3), strides=2), *over("float32", (5, 4), strides=[2, 3]),
         *over("float32", (5, 4), strides=(1, 9)),
         *over("float32", (5, 4), strides=np.array([3, 1])), *over("float32", (5, 4), strides=[])],
        "Subsample", "subsample_out", differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "3 entries for a tensor of rank 2", X, [1, 1, 1]),
             bad(PopxlError, "contains 0", X, [1, 0]),
             bad(ValueError, "negative entries", X, -1)]),
    Row("split", cut,
        [*over(ANY, (6, 2), splits=3), *over("float32", (2, 6, 1), splits=[1, 3, 2], axis=1),
         *over("float32", (2, 6), splits=2, axis=-1), *over("float32", (2, 3), splits=[2])],
        "Split", "{0}_split_0 {0}_split_1 {0}_split_2", differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "cannot be cut into 2 equal parts", X, 2, 1), bad(ValueError, "into 0 equal parts", X, 0),
             bad(PopxlError, r"the parts \(1, 1\) do not add up", X, [1, 1], 1),
             bad(PopxlError, r"the parts \(-1, 4\) do not add up", X, [-1, 4], 1),
             bad(PopxlError, "axis 2 does not exist", X, [1, 1], 2),
             bad(PopxlError, "axis -3 does not exist", X, 2, -3),
             bad(PopxlError, "rank 0", scalar(1, "float32"), 2)]),
    Row("concat", lambda ts, axis=0: np.concatenate(ts, axis),
        [sample([values(d, (2, 3)), values(d, (1, 3)), values(d, (2, 3), seed=1)]) for d in ANY.split()]
        + [sample(SPLIT, axis=1), sample(SPLIT, axis=-2), sample([X]), sample((Y, Y))],
        "Concat", "concat_out", differentiable=(0, 1, 2), keeps=0, tolerance=0,
        torch=lambda ts, axis=0: torch_function("cat")(ts, dim=axis),
        inplace=Inplace("concat_", "ConcatInplace", "concat_out", view=True),
        bad=[bad(TypeError, "^All inputs to a concat operation must have the same type", [X, INTS]),
             bad(ValueError, "at least one tensor", []), bad(TypeError, "`ts` must be a list of tensors", X),
             bad(TypeError, r"`ts` must be a list of tensors; got 1 \(int\)", 1),
             bad(PopxlError, "differ in more than dimension 0", [X, Y]),
             bad(PopxlError, "differ in more than dimension 1", [X, values("float32", (3, 3))], 1),
             bad(PopxlError, "axis 2 does not exist", [X, X], 2), bad(PopxlError, "axis -3 does not exist", [X, X], -3),
             bad(PopxlError, "rank 0", [scalar(1, "float32")])]),
    Row("stack", lambda ts, axis=0: np.stack(ts, axis),
        [sample([values(d, (2, 3)), values(d, (2, 3), seed=1)], axis=-1) for d in ANY.split()]
        + [sample([X, X + 1, X + 2]), sample([X, X + 1, X + 2], axis=1), sample([scalar(1), scalar(2)])],
        "Stack", "stack_out", differentiable=(0, 1, 2), keeps=0, tolerance=0,
        torch=lambda ts, axis=0: torch_function("stack")(ts, dim=axis),
        bad=[bad(TypeError, "must have the same type", [X, INTS]), bad(ValueError, "at least one tensor", []),
             bad(PopxlError, r"the shapes \(2, 3\) and \(3,\) differ", [X, Y]),
             bad(PopxlError, "axis 3 does not exist", [X, X], 3)]),
]  # fmt: skip
