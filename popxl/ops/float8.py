"""Float8 with a power of two as scale: conversions to and from wider floats, and helpers of the scaled products.

Float8 has no arithmetic of its own. Values are converted with a scale here, moved like any other element, or multiplied
by `matmul_pow2scaled` and the scaled convolutions, which decode them exactly. The conversions agree bit for bit with
those of `popxl.fp8_utils` on the host.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.recording import not_a_tensor
from popxl.core.tensor import Tensor
from popxl.core.traits import REFUSED, Colocated, Requirement
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.ops.kernels.kernel import Kernel
from popxl.values.spec import TensorSpec

# Helpers of scaled ops ----------------------------------------------------------------------------------------------

SCALE = Requirement(
    "log2_scale",
    lambda k: (k >= -32) & (k < 32),
    "has to be in [-32, 32)",
    option="throwIfLog2ScaleTensorNotInRange",
)
"""Requirement of ops on their operand `log2_scale`."""


def check_scale(function_name: str, log2_scale: Tensor) -> None:
    """Check that the scale of a scaled op is an int32 scalar, before recording.

    Raises:
        ValueError: for a tensor with dimensions.
        TypeError: for any other dtype, or a value that is not a tensor.
    """
    if not isinstance(log2_scale, Tensor):
        raise not_a_tensor(function_name, "log2_scale", log2_scale)
    if log2_scale.shape:
        raise ValueError(
            f"{function_name}: `log2_scale` must be a scalar tensor; it has the shape {log2_scale.shape}. One scale "
            "serves all elements; reshape it to ()."
        )
    if log2_scale.dtype is not dtypes.int32:
        raise TypeError(
            f"{function_name}: `log2_scale` must be of type popxl.int32; it is {log2_scale.dtype.name}. Make it with "
            "`popxl.constant(k)`, or convert it with `ops.cast`."
        )


def check_float8(function_name: str, **operands: Tensor) -> None:
    """Check that operands of a scaled product are float8, of either format; to be called before the op is added.

    Raises:
        TypeError: for any other dtype, or a value that is not a tensor.
    """
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise not_a_tensor(function_name, name, t)
        if not t.dtype.is_float8:
            raise TypeError(
                f"{function_name}: `{name}` must be float8_143 or float8_152; it is {t.dtype.name}. Convert it with "
                "`ops.pow2scale_cast_to_fp8`."
            )


def decode(t: Any) -> Any:
    """Decode float8 values exactly to float32."""
    return t.astype(jnp.float32)


@Kernel
def as_factor(t: Any) -> Any:
    """Decode float8 values exactly to float16, which accelerators multiply fast.

    Units for float8 know other formats: theirs end at 448 where float8_143 ends at 240, and have fewer tiny numbers.
    """
    return t.astype(jnp.float16)


@Kernel
def as_convolved(t: Any) -> Any:
    """Decode float8 values exactly to float16, for a convolution."""
    return as_factor(t)


def pow2(k: Any) -> Any:
    """2**k as float32, exactly. (`jnp.exp2` is an ulp off for some integers on some machines.)"""
    return jnp.ldexp(np.float32(1), k)


# Conversion ---------------------------------------------------------------------------------------------------------


def _scaled(t: Any, log2_scale: Any, *, data_type: dtype_) -> Any:
    return (t.astype(jnp.float32) * pow2(log2_scale)).astype(data_type.as_jax())


def _conversion(name: str, accepted: tuple[dtype_, ...]) -> OpKind:
    """Declare a float conversion between accepted types. As in PopXL, operands may be in two places."""

    def shape(t: Any, log2_scale: Any, *, data_type: dtype_) -> TensorSpec:
        if t.dtype not in accepted:
            raise PopxlError(f"expected `t` to be {_either(accepted)}; it is {t.dtype.name}.")
        return TensorSpec(t.shape, data_type, t.meta_shape)

    result = "{t}_{data_type.name}"
    return OpKind(name, _scaled, shape=shape, result=result, gradient=REFUSED, traits=[SCALE, Colocated()])


def _either(accepted: tuple[dtype_, ...]) -> str:
    *others, last = (f"popxl.{dtype.name}" for dtype in accepted)
    return f"{', '.join(others)} or {last}"


def _check(name: str, log2_scale: Tensor, data_type: dtype_, accepted: tuple[dtype_, ...]) -> None:
    if not isinstance(data_type, dtype_) or data_type not in accepted:
        raise TypeError(f"{name}: `data_type` is {data_type!r}; expected {_either(accepted)}.")
    check_scale(name, log2_scale)


_FLOAT8 = (dtypes.float8_143, dtypes.float8_152)
_WIDER = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

_to_fp8 = _conversion("Pow2ScaleThenCast", _WIDER)
_from_fp8 = _conversion("CastThenPow2Scale", _FLOAT8)


def pow2scale_cast_to_fp8(t: Tensor, log2_scale: Tensor, data_type: dtype_) -> Tensor:
    """`t * 2**log2_scale`, rounded to the nearest float8, ties to even.

    The product is computed in float32 and rounded once. Numbers that round beyond the largest float8 (240 for
    float8_143, 57344 for float8_152) become NaN, and so do infinities; up to half a step beyond it, they round down.
    Underflow becomes zero; there is no negative zero. No gradient: autodiff refuses it.

    Args:
        t: float16, bfloat16 or float32 tensor of any shape.
        log2_scale: int32 scalar, from -32 to 31. It may change while the program runs.
        data_type: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        A new tensor of the shape of `t`, named `<name of t>_<dtype>`.

    Raises:
        TypeError: for an unknown `data_type`, or a `log2_scale` that is not int32.
        ValueError: for a `log2_scale` that is not a scalar.
        PopxlError: for any other dtype of `t`.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    See also: `popxl.fp8_utils.host_pow2scale_cast_to_fp8`.

    Example:
        >>> x8 = ops.pow2scale_cast_to_fp8(x, popxl.constant(3), popxl.float8_143)
    """
    _check("pow2scale_cast_to_fp8", log2_scale, data_type, _FLOAT8)
    return _to_fp8(t, log2_scale, data_type=data_type)


def pow2scale_cast_from_fp8(t: Tensor, log2_scale: Tensor, data_type: dtype_) -> Tensor:
    """The value of each float8, times `2**log2_scale`, as a wider float.

    The product is formed in float32, where it is exact, and rounded once. Undoes `pow2scale_cast_to_fp8` when
    `log2_scale` has the opposite sign. No gradient: autodiff refuses it.

    Args:
        t: float8 tensor of any shape.
        log2_scale: int32 scalar, from -32 to 31. It may change while the program runs.
        data_type: `popxl.float16`, `popxl.bfloat16` or `popxl.float32`.

    Returns:
        A new tensor of the shape of `t`, named `<name of t>_<dtype>`.

    Raises:
        TypeError: for an unknown `data_type`, or a `log2_scale` that is not int32.
        ValueError: for a `log2_scale` that is not a scalar.
        PopxlError: for any other dtype of `t`.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    See also: `popxl.fp8_utils.host_pow2scale_cast_from_fp8`.

    Example:
        >>> x = ops.pow2scale_cast_from_fp8(x8, popxl.constant(-3), popxl.float16)
    """
    _check("pow2scale_cast_from_fp8", log2_scale, data_type, _WIDER)
    return _from_fp8(t, log2_scale, data_type=data_type)
