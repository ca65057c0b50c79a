"""A scale for float8 with the least mean square error. The search on the host is in `popxl.fp8_utils`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import popxl
from popxl.fp8_utils import CandidateConfig as CandidateConfig
from popxl.fp8_utils import max_scaling_bias, min_scaling_bias
from popxl_addons.ops.fp8_utils import check_scale_arguments, float8_definitions, floor_log2

__all__ = ["fp8_mse_scale"]


def _mse_scale(src: Any, *, data_type: popxl.dtype) -> Any:
    """The argument of the smallest error, without a histogram.

    A format covers a window of adjacent binades; a scale defines its beginning. Values outside of it are lost (or
    clipped) and count with their squares, so the best window is the one with the largest sum of squares. A binade
    weighs four times as much as the one below it, and windows are so long (18 binades or more) that the largest value
    outweighs 2**34 values below a window that ends with it: it must be inside. Of the windows that contain it, the best
    are those that leave out nothing that one of them can contain, and they are adjacent. They are equally good: take
    the middle.
    """
    format_ = float8_definitions[data_type]
    length = format_.max_exp - format_.min_exp + 1
    earliest, latest = format_.min_exp + min_scaling_bias, format_.min_exp + max_scaling_bias

    magnitudes = jnp.abs(src.astype(jnp.float32))
    reached = (magnitudes >= 2.0**earliest) & (magnitudes < 2.0 ** (latest + length))
    largest = floor_log2(magnitudes.max(where=reached, initial=0))
    first = jnp.maximum(earliest, largest - length + 1)
    held = reached & (magnitudes >= jnp.ldexp(jnp.float32(1), first))
    last = jnp.minimum(latest, floor_log2(magnitudes.min(where=held, initial=2.0**127)))
    middle = first + (last - first + 1) // 2
    return jnp.where(reached.any(), format_.min_exp - middle, 0)


_Fp8Scale = popxl.OpKind("Fp8Scale", _mse_scale, gradient=None)


def fp8_mse_scale(src: popxl.Tensor, dtype: popxl.dtype = popxl.float8_143) -> popxl.Tensor:
    """Power-of-two scale with minimal float8 conversion error for `src`.

    The scale that `popxl.fp8_utils.host_fp8_mse_scale` finds. The two may differ only for data of which that function,
    which adds up squares in float64, no longer sees a part: beside infinities and magnitudes too large for any scale,
    or for float8_152 beside many that are 2**32 times as large.

    Args:
        src: float16, bfloat16 or float32 tensor of any shape.
        dtype: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        An int32 scalar from -31 to 31: the `log2_scale` of `ops.pow2scale_cast_to_fp8`. No gradient flows.

    Raises:
        RuntimeError: for any other dtype of `src`, or another `dtype`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     scale = fp8_mse_scale(popxl.constant([1.0, 2.0, 4.0]))  # -3
        >>> scale.dtype, scale.shape
        (popxl.dtypes.int32, ())
    """
    check_scale_arguments("fp8_mse_scale", src, dtype)
    return _Fp8Scale(src, data_type=dtype)
