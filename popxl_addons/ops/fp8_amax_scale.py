"""A scale for float8 that makes the largest magnitude fit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import popxl
from popxl.fp8_utils import max_scaling_bias, min_scaling_bias
from popxl_addons.ops.fp8_utils import check_scale_arguments, float8_definitions, floor_log2


def _amax_scale(src: Any, *, data_type: popxl.dtype) -> Any:
    largest = jnp.abs(src.astype(jnp.float32)).max(initial=0)
    ratio = float8_definitions[data_type].max_value / largest
    return floor_log2(jnp.clip(ratio, 2.0**min_scaling_bias, 2.0**max_scaling_bias))


_Fp8AmaxScale = popxl.OpKind("Fp8AmaxScale", _amax_scale, gradient=None)


def fp8_amax_scale(src: popxl.Tensor, dtype: popxl.dtype = popxl.float8_143) -> popxl.Tensor:
    """The largest power of two by which `src` can be multiplied without exceeding a float8 format.

    ``clip(floor(log2(M / max|src|)), -31, 31)``, where M is the largest number of the format: 240 or 57344. Zeros have
    the scale 31.

    Args:
        src: float16, bfloat16 or float32 tensor of any shape.
        dtype: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        An int32 scalar: the `log2_scale` of `ops.pow2scale_cast_to_fp8`. No gradient flows.

    Raises:
        RuntimeError: for any other dtype of `src`, or another `dtype`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     x = popxl.constant([-3.0, 1.0])
        ...     scale = fp8_amax_scale(x)  # 6, because 3 * 2**6 = 192
        ...     x8 = popxl.ops.pow2scale_cast_to_fp8(x, scale, popxl.float8_143)
        >>> scale.dtype, scale.shape
        (popxl.dtypes.int32, ())
    """
    check_scale_arguments("fp8_amax_scale", src, dtype)
    return _Fp8AmaxScale(src, data_type=dtype)
