"""Rows of ops that update a tensor in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import ANY, MIXED, Array, PopxlError, Row, X, Y, bad, f32, over, sample, scalar, values


def accumulated(t: Array, X: Array, f: Any = None) -> Array:
    return t + X if f is None else t + f * X


VAR_UPDATES = [
    Row("accumulate_", accumulated,
        [*over("float32 float16 int32 uint32", (2, 3), (2, 3)), sample(X, X * 3, 0.5), sample(X, X * 3, f32(0.5)),
         sample(X, values("float16", (2, 3)), scalar(0.5, "float16")),
         sample(values("float16", (2, 3)), X), sample(values("float16", (2, 3)), X, 0.1),
         sample(f32(1, 2), f32(np.inf, np.nan), 0, expect=f32(1, 2))],
        "Accumulate", "accumulate__{0}", overwrites=True, numbers=(2,),
        bad=[bad(PopxlError, "the same shape; nothing is broadcast", X, Y)]),
    Row("copy_var_update_", lambda t, X: X, over(ANY, (2, 3), (2, 3)), "CopyVarUpdate", "updated__{0}", overwrites=True,
        tolerance=0, bad=[bad(PopxlError, "the same shape; nothing is broadcast", X, Y), MIXED]),
]  # fmt: skip
