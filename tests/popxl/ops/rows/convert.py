"""Rows of ops that give a value another dtype, name or place."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from tests.popxl.ops.rows.schema import ANY, Array, Inplace, Row, X, bad, f16, f32, i32, over, rule, sample


def converted(t: Array, data_type: Any) -> Array:
    wanted = data_type.as_numpy()
    if wanted.kind in "iu" and t.dtype.kind == "f":
        limits = np.iinfo(wanted)
        return np.trunc(np.clip(t, limits.min, limits.max)).astype(wanted)
    return t.astype(wanted)


CONVERT = [
    Row("cast", converted,
        [sample(f32(2.7, -2.7, 0.5, 300, -5, 1e10, -1e10, 0), data_type=to) for to in
         (popxl.int32, popxl.uint8, popxl.int8, popxl.int16, popxl.uint16, popxl.uint32, popxl.bool, popxl.float32)]
        + [sample(f32(2.7, 1 / 3, 65519, 2049, 6e-8), data_type=popxl.float16, dtype="float16")]
        + [sample(f16(2.7, -2.7, 300, np.inf), data_type=to, dtype="float32")
           for to in (popxl.uint8, popxl.uint32, popxl.bool, popxl.float32)]
        + [sample(i32(300, -1, 0, 2**31 - 1), data_type=to, dtype="float32")
           for to in (popxl.uint8, popxl.int8, popxl.uint32, popxl.bool, popxl.float32)]
        + [sample(i32(300, -1), data_type=popxl.float16, dtype="float16")]
        + [sample(np.array([True, False]), data_type=to, dtype="float32") for to in (popxl.int8, popxl.float32)]
        + [sample(f32(np.nan, 0), data_type=popxl.bool, expect=np.array([True, False]))],
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
        bad=[bad(ValueError, r"Could not infer the ipu.*Please specify `source`", X, 1)]),
    Row("io_tile_copy", lambda t: t, over(ANY, (2, 3)), "IoTileCopy", "{0}_iotilecopy", tolerance=0),
]  # fmt: skip
