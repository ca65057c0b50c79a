"""Products of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.ops.kernels.kernel import Kernel, KernelImpl
from popxl.ops.precision import is_half, wide_dtype, widen


@Kernel
def product(lhs: Any, rhs: Any, dtype: Any, precision: Any = None) -> Any:
    """Multiply float matrices, returning `dtype` or a wider one, for rounding by the caller. Accumulates in float32 or
    wider."""
    return jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=jnp.promote_types(dtype, jnp.float32))


def rounded_product(lhs: Any, rhs: Any, dtype: Any, precision: Any = None) -> Any:
    """`product` for GPUs, whose units sum products of halves in float32, and round what they write.

    Where XLA makes one product of several, as of all that one text is multiplied with, it would write float32 for a
    rounding that comes afterwards.
    """
    if lhs.dtype == rhs.dtype == dtype and is_half(lhs):
        return jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=dtype)
    return product.plain(lhs, rhs, dtype, precision)


@Kernel
def factor(t: Any) -> Any:
    """Operand of a product: halves as float32, on platforms that compute products of halves in float32."""
    return widen(t)


def times(rows: Any, matrix: Any) -> Any:
    """Matrix product in the dtype of `matrix`, accumulated in the corresponding wide dtype."""
    return jnp.matmul(rows.astype(matrix.dtype), matrix, preferred_element_type=wide_dtype(matrix))


@Kernel
def contracted(subscripts: str, *ts: Any) -> Any:
    """`jnp.einsum` over arrays of one dtype, returning that dtype or a wider one, for rounding by the caller."""
    return jnp.einsum(subscripts, *ts, preferred_element_type=wide_dtype(*ts))


def contracted_halves(subscripts: str, *ts: Any) -> Any:
    """`contracted` for GPUs, without intermediate rounding for three or more operands."""
    wanted = ts[0].dtype if len(ts) < 3 else wide_dtype(*ts)
    return jnp.einsum(subscripts, *ts, preferred_element_type=wanted)


@Kernel
def linear(t: Any, weight: Any, is_rounded: bool = False) -> Any:
    """Multiply rows by a transposed weight matrix, returning accumulation precision; for immediately rounded results
    possibly the dtype of `t`."""
    return lax.dot_general(widen(t), widen(weight), _of_columns(t))


def linear_of_halves(t: Any, weight: Any, is_rounded: bool = False) -> Any:
    """`linear` for GPUs with half-precision units."""
    wanted = t.dtype if is_rounded else wide_dtype(t, weight)
    return lax.dot_general(t, weight, _of_columns(t), preferred_element_type=wanted)


def _of_columns(t: Any) -> Any:
    return (((t.ndim - 1,), (1,)), ((), ()))


@Kernel
def weights_gradient(g: Any, t: Any, is_rounded: bool = False, precision: Any = None) -> Any:
    """Gradient of a weight matrix multiplied by all rows of `t`, given the result gradient `g`.

    One row per column of `g`, in the dtype of sums; possibly in the dtype of `g`, where the result is rounded to it
    next.
    """
    return _of_rows(g, t, wide_dtype(g, t), precision)


def weights_gradient_of_halves(g: Any, t: Any, is_rounded: bool = False, precision: Any = None) -> Any:
    """`weights_gradient` for GPUs, whose units round what they write."""
    return _of_rows(g, t, g.dtype if is_rounded else wide_dtype(g, t), precision)


def _of_rows(g: Any, t: Any, dtype: Any, precision: Any) -> Any:
    rows = tuple(range(t.ndim - 1))
    return lax.dot_general(g, t, ((rows, rows), ((), ())), precision=precision, preferred_element_type=dtype)


OF_HALVES: Mapping[Kernel, KernelImpl] = {
    product: rounded_product,
    factor: lambda t: t,
    contracted: contracted_halves,
    linear: linear_of_halves,
    weights_gradient: weights_gradient_of_halves,
}
"""The forms for GPUs, whose units multiply halves, sum in float32, and round what they write. XLA for TPUs sees through
conversions to float32, and fuses the rounding; a step of a Llama takes 1.03 × the cycles in these forms there."""
