"""Rows of ops that give a value another dtype, name or place."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from tests.popxl.ops.rows.schema import (
    ANY,
    INTEGERS,
    LIMITS,
    Array,
    Inplace,
    Row,
    X,
    bad,
    f16,
    f32,
    i32,
    over,
    rule,
    sample,
    values,
)

TARGETS = [popxl.dtype.from_name(name) for name in (*INTEGERS.split(), "bool", "float32")]


def converted(t: Array, data_type: Any) -> Array:
    wanted = data_type.as_numpy()
    if wanted.kind in "iu" and t.dtype.kind == "f":
        limits = np.iinfo(wanted)
        return np.trunc(np.clip(t, limits.min, limits.max)).astype(wanted)
    return t.astype(wanted)


CONVERT = [
    Row("cast", converted,
        [sample(f32(2.7, -2.7, 0.5, 300, -5, 1e10, -1e10, 0, np.inf, -np.inf), data_type=to) for to in TARGETS]
        + [sample(f32(2.7, 1 / 3, 65519, 2049, 6e-8), data_type=popxl.float16, dtype="float16")]
        + [sample(f32(65520, -1e30, np.inf, np.nan), data_type=popxl.float16,
                  expect=f16(np.inf, -np.inf, np.inf, np.nan), dtype="float16")]
        + [sample(f16(2.7, -2.7, 300, np.inf), data_type=to, dtype="float32") for to in TARGETS]
        + [sample(limits, data_type=to, dtype="float32") for limits in LIMITS.values() for to in TARGETS]
        + [sample(i32(300, -1, 2**24 + 1, 2**24 + 3), data_type=to, dtype="float32") for to in TARGETS]
        + [sample(i32(300, -1, 2049, 65519), data_type=dtype, dtype=dtype.name)
           for dtype in (popxl.float16, popxl.bfloat16)]
        + [sample(f32(2.7, 1 / 3, 1e38, 257, 259), data_type=popxl.bfloat16, dtype="bfloat16"),
           sample(values("bfloat16", (2, 3)), data_type=popxl.float32, dtype="float32"),
           sample(values("bfloat16", (2, 3)), data_type=popxl.int32)]
        + [sample(np.array([True, False]), data_type=to, dtype="float32") for to in TARGETS]
        + [sample(f32(np.nan, 0), data_type=popxl.bool, expect=np.array([True, False]))]
        + [sample(f32(np.nan, 7), data_type=to, expect=np.array([0, 7], to.as_numpy()))
           for to in TARGETS if to.is_int],
        "Cast", "{0}_int32", differentiable=(0,), tolerance=0, steps=True,
        rules=[rule(f16(1, 2), data_type=popxl.float32, g=f32(0.1, 3), gives=(f16(0.1, 3),)),
               rule(f32(1, 2), data_type=popxl.float32, g=f32(1, 3), gives=(f32(1, 3),)),
               rule(f32(1, 2), data_type=popxl.float16, g=f16(0.1, 3), gives=(f32(np.float16(0.1), 3),))],
        bad=[bad(TypeError, "float8_143; float8 is converted with a scale", X, data_type=popxl.float8_143),
             bad(TypeError, "float8_152", X, data_type=popxl.float8_152),
             bad(TypeError, "`data_type` must be a popxl dtype", X, data_type=np.float16)]),
    Row("detach", lambda t: t, over(ANY, (2, 3)), "Detach", "detach_out", tolerance=0,
        inplace=Inplace("detach_", "DetachInplace", "detach_out", view=True)),
    Row("identity", lambda t, output_name=None: t, over(ANY, (2, 3)) + [sample(X, "renamed"), sample(X, "")],
        "Identity", "identity_{0}", aliases=("rename",), differentiable=(0,), keeps=0, tolerance=0),
    Row("ipu_copy", lambda t, destination, source=None: t, over(ANY, (2, 3), destination=1, source=0), "IpuCopy",
        "{0}_c1", tolerance=0, differentiable=(0,),
        bad=[bad(ValueError, r"Could not infer the ipu.*Please specify `source`", X, 1),
             bad(TypeError, "`destination` must be an integer", X, 1.0, 0)]),
    Row("io_tile_copy", lambda t: t, over(ANY, (2, 3)), "IoTileCopy", "{0}_iotilecopy", tolerance=0),
    Row("available_after", lambda t, other: t,
        [sample(X, f32(np.nan, 2)), sample(i32(3, -4), f32(0)), sample(values("bfloat16", (2, 3)), X)],
        "AvailableAfter", "{0}_after", tolerance=0, differentiable=(0,), keeps=0, colocated=False),
    Row("offload", lambda t: t, over(ANY, (2, 3)), "Offload", "{0}_offloaded", tolerance=0,
        differentiable=(0,), keeps=0),
    Row("reload", lambda t: t, over(ANY, (2, 3)), "Reload", "{0}_reloaded", tolerance=0, differentiable=(0,), keeps=0),
]  # fmt: skip
