"""The matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from popxl import dtypes
from popxl.context import get_current_context
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.op import OpKind
from popxl.ops.convert import cast_if_needed
from popxl.ops.shape import reshape, transpose
from popxl.shapes import broadcast_shapes, same_dtype
from popxl.spec import TensorSpec
from popxl.tensor import Tensor


def _matmul(lhs: Any, rhs: Any, *, output_type: dtype_ | None, **hints: Any) -> Any:
    wanted = lhs.dtype if output_type is None else output_type.as_jax()
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return jnp.matmul(lhs, rhs)
    return jnp.matmul(lhs, rhs, preferred_element_type=jnp.promote_types(wanted, jnp.float32))


def _shape(lhs: Any, rhs: Any, *, output_type: dtype_ | None, **hints: Any) -> TensorSpec:
    if not lhs.shape or not rhs.shape:
        raise PopxlError("a scalar cannot be multiplied as a matrix; use `*`.")
    same_dtype(lhs, rhs)
    inner, rows = lhs.shape[-1], rhs.shape[-2] if len(rhs.shape) > 1 else rhs.shape[0]
    if inner != rows:
        raise PopxlError(f"the inner dimensions differ; expected `rhs` to have {inner} rows, and it has {rows}.")
    batch = broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    return TensorSpec(batch + lhs.shape[-2:-1] + rhs.shape[-1:] * (len(rhs.shape) > 1), output_type or lhs.dtype)


def _lhs_gradient(g: Tensor, lhs_spec: TensorSpec, rhs: Tensor) -> Tensor:
    g, rhs = _in_the_wider(g, rhs)
    if rhs.rank == 1:  # a column: g has lost its axis
        return reshape(g, (*g.shape, 1)) * rhs
    if len(lhs_spec.shape) == 1:
        g = reshape(g, (*g.shape[:-1], 1, g.shape[-1]))
        return _as_row(g @ _flipped(rhs))
    return g @ _flipped(rhs)


def _rhs_gradient(g: Tensor, lhs: Tensor, rhs_spec: TensorSpec) -> Tensor:
    g, lhs = _in_the_wider(g, lhs)
    if len(rhs_spec.shape) == 1:
        return reshape(g, (*g.shape, 1)) * lhs
    if lhs.rank == 1:  # a row: lhs and g have lost their axis
        return reshape(lhs, (lhs.shape[0], 1)) @ reshape(g, (*g.shape[:-1], 1, g.shape[-1]))
    return _flipped(lhs) @ g


def _in_the_wider(*ts: Tensor) -> Iterator[Tensor]:
    """Two tensors in the wider of their dtypes: products may have another than their operands."""
    wider = max((t.dtype for t in ts), key=lambda dtype: dtype.itemsize)
    return (cast_if_needed(t, wider) for t in ts)


def _flipped(t: Tensor) -> Tensor:
    """The last two dimensions exchanged."""
    *batch, rows, columns = range(t.rank)
    return transpose(t, (*batch, columns, rows))


def _as_row(t: Tensor) -> Tensor:
    """Without the dimension of size 1 before the last."""
    return reshape(t, (*t.shape[:-2], t.shape[-1]))


_kind = OpKind(
    "MatMul", _matmul, shape=_shape, result="matmul_out", gradient={"lhs": _lhs_gradient, "rhs": _rhs_gradient}
)


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None = None,
    output_type: dtype_ | None = None,
    partials_type: dtype_ | None = None,
) -> Tensor:
    """Matrix product, by the rules of `numpy.matmul`.

    Args:
        lhs: of shape `(..., m, k)`, or `(k,)`: a row, whose dimension is dropped from the result.
        rhs: of shape `(..., k, n)`, or `(k,)`: a column, whose dimension is dropped from the result.
        available_memory_proportion: accepted for programs that tune memory; without effect.
        output_type: dtype of the result; that of the operands by default.
        partials_type: float16 or float32: the precision that sums of products need at least. They are always
            accumulated in float32 here, and rounded once.

    Returns:
        A new tensor of shape `(..., m, n)`; leading dimensions broadcast.

    Raises:
        PopxlError: if an operand is a scalar, the inner dimensions or the dtypes differ, or leading dimensions do not
            broadcast.
        TypeError: if `output_type` is no popxl dtype.
        ValueError: for another `partials_type`.

    See also: `numpy.matmul`.

    Example:
        >>> y = ops.matmul(x, w)      # the same as x @ w
    """
    if not isinstance(output_type, dtype_ | None):
        raise TypeError(f"matmul: `output_type` must be a popxl dtype such as popxl.float16; got {output_type!r}.")
    hints: dict[str, Any] = {
        "available_memory_proportion": available_memory_proportion,
        "partials_type": _partials(partials_type),
    }
    return _kind(lhs, rhs, output_type=output_type, **{name: v for name, v in hints.items() if v is not None})


def _partials(partials_type: dtype_ | None) -> dtype_ | None:
    """The accumulation type that was asked for, here or in the session options."""
    if partials_type is None:
        option = get_current_context().ir.options.partialsTypeMatMuls.lower()
        if option not in ("", "half", "float"):
            raise ValueError(
                f"matmul: the session option partialsTypeMatMuls is {option!r}; expected 'half' or 'float'."
            )
        return dtypes.float16 if option == "half" else None
    if partials_type not in (dtypes.float16, dtypes.float32):
        raise ValueError(f"matmul: `partials_type` is {partials_type!r}; expected popxl.float16 or popxl.float32.")
    return partials_type
