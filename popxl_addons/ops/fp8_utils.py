"""Float8 as a target of scaling: ranges of floating point formats, and helpers of the two scale ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

import popxl
from popxl import fp8_utils


class FpDef(NamedTuple):
    """Binary floating-point format: fields of `popxl.fp8_utils.FpDef`, plus derived range."""

    num_exp_bits: int
    num_mantissa_bits: int
    fix_exponent_bias: int
    include_denorm: bool
    has_nans: bool
    max_value: float
    max_exp: int
    """Exponent of the largest power of two."""
    min_exp: int
    """Exponent of the smallest power of two."""


ieee_fp32_no_denorms = FpDef(*fp8_utils.ieee_fp32_no_denorms, max_value=3.4028235e38, max_exp=127, min_exp=-126)
ieee_fp16_denorms = FpDef(*fp8_utils.ieee_fp16_denorms, max_value=65504, max_exp=15, min_exp=-14)
float8_152_def = FpDef(*fp8_utils.float8_152_def, max_value=57344, max_exp=15, min_exp=-17)
float8_143_def = FpDef(*fp8_utils.float8_143_def, max_value=240, max_exp=7, min_exp=-10)

float8_definitions = {popxl.float8_143: float8_143_def, popxl.float8_152: float8_152_def}


def check_scale_arguments(function: str, src: popxl.Tensor, dtype: popxl.dtype) -> None:
    """Raise `RuntimeError` unless tensor (half or float32) and format (float8) permit scaling."""
    if not isinstance(src, popxl.Tensor) or not (src.dtype.is_half or src.dtype is popxl.float32):
        raise RuntimeError(f"{function}: `src` is {src!r}; expected a tensor of float16, bfloat16 or float32.")
    if dtype not in float8_definitions:
        raise RuntimeError(f"{function}: `dtype` is {dtype!r}; expected popxl.float8_143 or popxl.float8_152.")


def floor_log2(x: Any) -> Any:
    """Exact exponent of positive numbers; floating-point logarithms may miss powers of two by one ulp."""
    return jnp.frexp(x)[1] - 1
