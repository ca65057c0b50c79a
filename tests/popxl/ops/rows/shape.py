"""Rows of ops that change shapes."""

from __future__ import annotations

import numpy as np

from tests.popxl.ops.rows.schema import (
    ANY,
    Inplace,
    PopxlError,
    Row,
    X,
    bad,
    over,
    torch_function,
    values,
)

SHAPE = [
    Row("reshape", lambda t, shape: t.reshape(shape),
        [*over(ANY, (2, 6), shape=(3, 4)), *over("float32", (2, 6), shape=[-1, 3]), *over("float32", (), shape=(1, 1)),
         *over("float32", (1,), shape=())],
        "Reshape", "{0}_reshaped", differentiable=(0,), keeps=0, tolerance=0,
        inplace=Inplace("reshape_", "ReshapeInplace", "{0}_reshaped", view=True),
        bad=[bad(ValueError, r"Invalid shape value in reshape.*\(0, 4\)", X, (0, 4)),
             bad(ValueError, r"Invalid shape value in reshape.*\[-2, 3\]", X, [-2, 3]),
             bad(ValueError, r"Reshape shape can contain at most one '-1' value.*\(-1, -1\)", X, (-1, -1)),
             bad(PopxlError, r"a tensor of 6 elements cannot have the shape \(2, 4\)", X, (2, 4)),
             bad(PopxlError, r"cannot have the shape \(4, -1\)", X, (4, -1)),
             bad(TypeError, r"^reshape: `shape` must be a sequence of integers; got 6 \(int\)", X, 6),
             bad(TypeError, r"^reshape: `shape` must hold integers; got 2\.0 \(float\)", X, (2.0, 3))]),
    Row("flatten", lambda t: t.reshape(-1), over(ANY, (2, 3)) + over("float32", ()), "Reshape", "{0}_reshaped",
        differentiable=(0,), keeps=0, tolerance=0, torch=torch_function("ravel"),
        inplace=Inplace("flatten_", "ReshapeInplace", "{0}_reshaped", view=True)),
    Row("squeeze", lambda t, axes=None: np.squeeze(t, None if axes is None else tuple(axes)),
        [*over(ANY, (1, 2, 1, 3)), *over("float32", (1, 2, 1, 3), axes=[-2]),
         *over("float32", (1, 2, 1, 3), axes=[2, 0]),
         *over("float32", (2, 3)), *over("float32", (2, 1), axes=[])],
        "Reshape", "{0}_reshaped", differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "names a dimension twice", values("float32", (1, 2)), [0, -2]),
             bad(ValueError, "no dimension 1 of size 1", values("float32", (1, 2)), [1]),
             bad(ValueError, "no dimension 2 of size 1", values("float32", (1, 2)), [2]),
             bad(ValueError, "no dimension -1 of size 1", values("float32", (1, 2)), [-3])]),
    Row("transpose", lambda t, permutation=None: np.transpose(t, permutation or None),
        [*over(ANY, (2, 3, 4)), *over("float32", (2, 3, 4), permutation=(2, 0, 1)),
         *over("float32", (2, 3, 4), permutation=[0, 2, 1]), *over("float32", (2, 3), permutation=()),
         *over("float32", ())],
        "Transpose", "{0}_T", differentiable=(0,), keeps=0, tolerance=0,
        inplace=Inplace("transpose_", "TransposeInplace", "{0}_T", view=True),
        bad=[bad(ValueError, r"Values in permutation must be less than.*rank 4.*\(7, 9\)",
                 values("float32", (2, 3, 1, 4)), (0, 7, 2, 9)),
             bad(PopxlError, "does not name all 2 dimensions", X, (0,)),
             bad(ValueError, "each dimension", X, (0, 0)), bad(ValueError, "each dimension", X, (0, -1))]),
]  # fmt: skip
