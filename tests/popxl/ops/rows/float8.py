"""Rows of the ops that read or make float8."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import popxl
from tests.popxl.ops.rows.schema import Array, PopxlError, Row, X, bad, f16, f32, i32, sample, scalar, values

F143, F152 = popxl.float8_143, popxl.float8_152


@functools.cache
def numbers(name: str) -> list[float]:
    """The value of each byte, by the definition of the format; 0x80 is the only NaN."""
    exponent_bits = int(name[-2])
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1)
    found = []
    for byte in range(256):
        sign, (e, m) = 1 - 2 * (byte >> 7), divmod(byte & 0x7F, 2**mantissa_bits)
        fraction = m / 2**mantissa_bits
        value = (1 + fraction) * 2.0 ** (e - bias) if e else fraction * 2.0 ** (1 - bias)
        found.append(float("nan") if byte == 0x80 else sign * value)
    return found


def decoded(t: Array) -> Array:
    """The values of a float8 array, in double precision."""
    (name,) = t.dtype.names or ()
    return np.array(numbers(name))[t.view(np.uint8)]


def encoded(t: Any, dtype: popxl.dtype) -> Array:
    """The nearest float8 of each number; of two, the one with an even byte. Beyond half a step after the last, NaN."""
    positive = np.array(numbers(dtype.name)[:0x80])
    steps = np.append(positive, 2 * positive[-1] - positive[-2])

    def byte(x: float) -> int:
        distances = np.abs(steps - abs(x))
        near = np.flatnonzero(distances == distances.min()) if np.isfinite(x) else np.array([0x80])
        found = int(near[near % 2 == 0][0] if len(near) > 1 else near[0])
        return found if x > 0 or found in (0, 0x80) else found + 0x80

    bytes_ = [byte(x) for x in np.asarray(t, np.float64).ravel()]
    return np.array(bytes_, np.uint8).reshape(np.shape(t)).view(dtype.as_numpy())


def to_fp8(t: Array, log2_scale: Array, data_type: popxl.dtype) -> Array:
    return encoded(t * 2.0 ** int(log2_scale), data_type)


def from_fp8(t: Array, log2_scale: Array, data_type: popxl.dtype) -> Array:
    return (decoded(t) * 2.0 ** int(log2_scale)).astype(data_type.as_numpy())


def scaled_product(lhs: Array, rhs: Array, log2_scale: Array, *hints: Any) -> Array:
    return decoded(lhs) @ decoded(rhs) * 2.0 ** int(log2_scale)


def float8(dtype: popxl.dtype, *shape: int, seed: int = 0) -> Array:
    return encoded(values("float32", shape, seed=seed), dtype)


def scale(k: int) -> Array:
    return np.array(k, np.int32)


BYTES = {dtype: np.arange(256, dtype=np.uint8).reshape(2, 128).view(dtype.as_numpy()) for dtype in (F143, F152)}
EDGES = [0.75, 250, -250, 8.5, 8.50390625, 247.9, 248, 70000, 61440, -57344, np.inf, -np.inf, np.nan, -0.0, -1e-7]
TIES = [0.5, 1.5, -0.25, 2.5, 3.5, -0.5, -1.5]  # with the scale -10, between the smallest float8_143
A8 = float8(F143, 2, 3)
BAD_SCALES = [
    (ValueError, r"`log2_scale` must be a scalar tensor; it has the shape \(2,\)", i32(1, 2)),
    (ValueError, "must be a scalar tensor", f32(1)),
    (TypeError, "`log2_scale` must be of type popxl.int32; it is float32", scalar(1)),
    (TypeError, "must be of type popxl.int32; it is int8", scalar(1, "int8")),
]


FLOAT8 = [
    Row("pow2scale_cast_to_fp8", to_fp8,
        [*(sample(t, scale(k), d) for d in (F143, F152) for k in (0, -2, 1, -32, 31)
           for t in (values("float32", (2, 3)), values("float16", (3,)), values("bfloat16", (3,)))),
         *(sample(t, scale(k), d) for d in (F143, F152) for t in (f32(*EDGES), f32(*TIES), f16(*TIES))
           for k in (0, -10, -17)),
         sample(scalar(0.3), scale(-1), F143)],
        "Pow2ScaleThenCast", "{0}_float8_143", refused=True, colocated=False, tolerance=0,
        bad=[*(bad(error, f"^pow2scale_cast_to_fp8: .*{message}", X, k, F143) for error, message, k in BAD_SCALES),
             bad(TypeError, r"`data_type` is popxl\.dtypes\.float16; expected popxl\.float8_143 or popxl\.float8_152",
                 X, scale(0), popxl.float16),
             bad(TypeError, "`data_type` is <class 'numpy.float16'>", X, i32(1, 2), np.float16),
             bad(PopxlError, r"expected `t` to be popxl\.float16, popxl\.bfloat16 or popxl\.float32; it is int32",
                 i32(1), scale(0), F143),
             bad(PopxlError, "it is float8_143", A8, scale(0), F152)]),
    Row("pow2scale_cast_from_fp8", from_fp8,
        [*(sample(BYTES[d], scale(k), to, dtype=to.name) for d in (F143, F152) for k in (0, 3, -32, 31)
           for to in (popxl.float16, popxl.bfloat16, popxl.float32)),
         sample(float8(F152), scale(-1), popxl.float32, dtype="float32")],
        "CastThenPow2Scale", "{0}_float16", refused=True, colocated=False, tolerance=0,
        bad=[*(bad(error, f"^pow2scale_cast_from_fp8: .*{message}", A8, k, popxl.float16)
               for error, message, k in BAD_SCALES),
             bad(TypeError, "`data_type` is popxl.dtypes.float8_152; expected popxl.float16, popxl.bfloat16 or",
                 A8, scale(0), F152),
             bad(PopxlError, r"expected `t` to be popxl\.float8_143 or popxl\.float8_152; it is float32",
                 X, scale(0), popxl.float16)]),
    Row("matmul_pow2scaled", scaled_product,
        [*(sample(float8(a, 2, 3), float8(b, 3, 4), scale(k), dtype="float16") for a in (F143, F152)
           for b in (F143, F152) for k in (0, -3, 5)),
         sample(float8(F143, 3), float8(F143, 3), scale(1), dtype="float16"),
         sample(float8(F143, 2, 1, 2, 3), float8(F152, 4, 3, 2), scale(0), dtype="float16"),
         sample(float8(F143, 3), float8(F152, 2, 3, 4), scale(0), 0.3, dtype="float16"),
         sample(float8(F143, 2, 3, 4), float8(F152, 4), scale(-32), dtype="float16")],
        "MatMul", "matmul_pow2scaled_out", refused=True,
        bad=[*(bad(error, f"^matmul_pow2scaled: .*{message}", A8, A8, k) for error, message, k in BAD_SCALES),
             bad(TypeError, "`lhs` must be float8_143 or float8_152; it is float32", X, A8, i32(1)),
             bad(TypeError, "`rhs` must be float8_143 or float8_152; it is float32", A8, X, i32(1)),
             bad(PopxlError, "inner dimensions differ; expected `rhs` to have 3 rows, and it has 2", A8, A8, scale(0)),
             bad(PopxlError, "scalar", float8(F143), A8, scale(0))]),
]  # fmt: skip
