"""Products: of matrices, of floats and of float8; outer products, and any that `einsum` expresses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl.base.arguments import check_type
from popxl.context import get_current_context
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.tracing import abstract_evaluation
from popxl.core.traits import REFUSED, Colocated, Contracts, ShardingRule
from popxl.dtypes import check_dtype
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.ops.convert import cast_if_needed
from popxl.ops.float8 import SCALE, as_factor, check_float8, check_scale, pow2
from popxl.ops.kernels.products import contracted, product, weights_gradient
from popxl.ops.shape import reshape, transpose
from popxl.values.shapes import broadcast_shapes, same_dtype, set_hints
from popxl.values.spec import TensorSpec


def _matmul(
    lhs: Any, rhs: Any, *, output_type: dtype_ | None, partials_type: dtype_ | None = None, **hints: Any
) -> Any:
    wanted = lhs.dtype if output_type is None else output_type.as_jax()
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return jnp.matmul(lhs, rhs)
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    return product(lhs, rhs, wanted, _precision(partials_type))


def _precision(partials_type: dtype_ | None) -> lax.Precision | None:
    """Half partials allow fewer digits. Otherwise the session says how exactly numbers are multiplied."""
    return lax.Precision.DEFAULT if partials_type is dtypes.float16 else None


def _shape(
    lhs: Any, rhs: Any, *, output_type: dtype_ | None, partials_type: dtype_ | None = None, **hints: Any
) -> TensorSpec:
    if output_type is not None:
        check_dtype(output_type, "`output_type`")
    if partials_type not in (None, dtypes.float16, dtypes.float32):
        raise ValueError(f"`partials_type` is {partials_type!r}; expected popxl.float16 or popxl.float32.")
    result = _product(lhs, rhs)
    if not any(a.dtype.is_half and b.dtype is dtypes.float32 for a, b in ((lhs, rhs), (rhs, lhs))):
        same_dtype(lhs, rhs)
    return TensorSpec(result, output_type or lhs.dtype)


def _product(lhs: Any, rhs: Any) -> tuple[int, ...]:
    """The shape of a product, by NumPy's rules."""
    if not lhs.shape or not rhs.shape:
        raise PopxlError("a scalar cannot be multiplied as a matrix; use `*`.")
    inner, rows = lhs.shape[-1], rhs.shape[-2] if len(rhs.shape) > 1 else rhs.shape[0]
    if inner != rows:
        raise PopxlError(f"the inner dimensions differ; expected `rhs` to have {inner} rows, and it has {rows}.")
    batch = broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    return batch + lhs.shape[-2:-1] + rhs.shape[-1:] * (len(rhs.shape) > 1)


def _subscripts(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    rows, columns = (len(shape) > 1 for shape in shapes)
    return f"{'...i' * rows}k,{'...' * columns}k{'j' * columns}->...{'i' * rows}{'j' * columns}"


def _lhs_gradient(g: Tensor, lhs_spec: TensorSpec, rhs: Tensor) -> Tensor:
    g, rhs = _in_the_wider(g, rhs)
    if rhs.rank == 1:  # a column: g has lost its axis
        return reshape(g, (*g.shape, 1)) * rhs
    if len(lhs_spec.shape) == 1:
        g = reshape(g, (*g.shape[:-1], 1, g.shape[-1]))
        row = _to_be_summed(g, _flipped(rhs), lhs_spec)
        return reshape(row, (*row.shape[:-2], row.shape[-1]))
    return _to_be_summed(g, _flipped(rhs), lhs_spec)


def _rhs_gradient(g: Tensor, lhs: Tensor, rhs_spec: TensorSpec) -> Tensor:
    g, lhs = _in_the_wider(g, lhs)
    if len(rhs_spec.shape) == 1:
        return reshape(g, (-1,)) @ _as_matrix(lhs)
    if len(rhs_spec.shape) == 2 and lhs.rank > 2:  # one matrix for all of lhs: one product, not one for each batch
        return _over_rows(lhs, g, **set_hints(partials_type=_partials(None)))
    if len(rhs_spec.shape) == 2:
        return _flipped(_as_matrix(lhs)) @ _as_matrix(g)
    if lhs.rank == 1:  # a row: lhs and g have lost their axis
        lhs, g = reshape(lhs, (1, lhs.shape[0])), reshape(g, (*g.shape[:-1], 1, g.shape[-1]))
    return _to_be_summed(_flipped(lhs), g, rhs_spec)


def _to_be_summed(lhs: Tensor, rhs: Tensor, spec: TensorSpec) -> Tensor:
    """Operand gradient product; keeps full precision before summing broadcast halves."""
    summed = broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2]) != spec.shape[:-2]
    return matmul(lhs, rhs, output_type=dtypes.float32 if summed and lhs.dtype.is_half else None)


def _in_the_wider(*ts: Tensor) -> Iterator[Tensor]:
    """Two tensors in a dtype that holds both: products may have another than their operands."""
    wider = jnp.promote_types(*(t.dtype.as_jax() for t in ts))
    return (cast_if_needed(t, dtype_.as_dtype(wider)) for t in ts)


def _flipped(t: Tensor) -> Tensor:
    """The last two dimensions exchanged."""
    *batch, rows, columns = range(t.rank)
    return transpose(t, (*batch, columns, rows))


def _as_matrix(t: Tensor) -> Tensor:
    """Flatten leading dimensions; vectors become single rows."""
    return t if t.rank == 2 else reshape(t, (-1, t.shape[-1]))


def _matmul_over_rows(lhs: Any, rhs: Any, *, partials_type: dtype_ | None = None) -> Any:
    """The product of the rows of both, over all dimensions but the last. XLA for TPUs would copy rows that are made one
    dimension, where another product takes them as they are."""
    return weights_gradient(lhs, rhs, is_rounded=True, precision=_precision(partials_type)).astype(lhs.dtype)


_over_rows = OpKind(
    "MatMul",
    _matmul_over_rows,
    shape=lambda lhs, rhs, **hints: TensorSpec((lhs.shape[-1], rhs.shape[-1]), lhs.dtype),
    result="matmul_out",
    key="MatMulOverRows",
    gradient={"lhs": lambda g, rhs: rhs @ _flipped(g), "rhs": lambda g, lhs: lhs @ g},
    traits=[ShardingRule("...i,...j->ij", ("lhs", "rhs"))],
)
_kind = OpKind(
    "MatMul",
    _matmul,
    shape=_shape,
    result="matmul_out",
    gradient={"lhs": _lhs_gradient, "rhs": _rhs_gradient},
    traits=[
        Contracts(lambda op: (op.inputs[0].rank - 1, max(op.inputs[1].rank - 2, 0))),
        ShardingRule(_subscripts, ("lhs", "rhs")),
    ],
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
        lhs: tensor of shape `(..., m, k)`, or `(k,)`: a row, whose dimension is dropped from the result.
        rhs: tensor of shape `(..., k, n)`, or `(k,)`: a column, whose dimension is dropped from the result. It has the
            dtype of `lhs`; the only mixed pairs are of float16 or bfloat16 with float32.
        available_memory_proportion: accepted for programs that tune memory; no effect.
        output_type: dtype of the result; that of `lhs` by default.
        partials_type: float32 (the default, unless the session option `partialsTypeMatMuls` says `"half"`) or
            float16. Sums of products are made in float32 and rounded once in any case; float16 allows accelerators to
            multiply float32 numbers with fewer digits, which is faster.

    Returns:
        A new tensor of shape `(..., m, n)`; leading dimensions broadcast.

    Raises:
        PopxlError: if an operand is a scalar, the inner dimensions or the dtypes differ, or leading dimensions do not
            broadcast.
        TypeError: if `output_type` is not a popxl dtype.
        ValueError: for an unknown `partials_type`, or another text in the session option `partialsTypeMatMuls`.

    See also: `numpy.matmul`.

    Example:
        >>> y = ops.matmul(x, w)      # the same as x @ w
    """
    hints = set_hints(
        available_memory_proportion=available_memory_proportion,
        partials_type=_partials(partials_type),
    )
    return _kind(lhs, rhs, output_type=output_type, **hints)


def _partials(partials_type: dtype_ | None) -> dtype_ | None:
    """Requested accumulation type, from arguments or session options."""
    if partials_type is not None:
        return partials_type
    option = get_current_context().ir.options.partialsTypeMatMuls
    if option.lower() not in ("", "half", "float"):
        raise ValueError(f"matmul: the session option partialsTypeMatMuls is {option!r}; expected 'half' or 'float'.")
    return dtypes.float16 if option.lower() == "half" else None


# Of several tensors -------------------------------------------------------------------------------------------------


def _table(lhs: Any, rhs: Any) -> TensorSpec:
    same_dtype(lhs, rhs)
    return TensorSpec((math.prod(lhs.shape), math.prod(rhs.shape)), lhs.dtype)


_outer = OpKind(
    "Outer",
    jnp.outer,
    shape=_table,
    operands=("lhs", "rhs"),
    gradient={
        "lhs": lambda g, lhs_spec, rhs: reshape(g @ reshape(rhs, (-1,)), lhs_spec.shape),
        "rhs": lambda g, lhs, rhs_spec: reshape(reshape(lhs, (-1,)) @ g, rhs_spec.shape),
    },
)


def _contracted(*ts: Any, subscripts: str) -> Any:
    if not jnp.issubdtype(ts[0].dtype, jnp.floating):
        return jnp.einsum(subscripts, *ts)
    return contracted(subscripts, *ts).astype(ts[0].dtype)


def _contracted_spec(*ts: Any, subscripts: str) -> TensorSpec | tuple[TensorSpec, ...]:
    same_dtype(*ts)
    return abstract_evaluation(_einsum.on_arrays(None, {"subscripts": subscripts}), [t.spec for t in ts])


def _written_out(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    """Subscripts with explicit result subscripts."""
    text = attributes["subscripts"].replace(" ", "")
    if "->" in text:
        return text
    letters = text.replace(",", "").replace("...", "")
    once = sorted(each for each in letters if letters.count(each) == 1)
    return f"{text}->{'...' * ('...' in text)}{''.join(once)}"


_einsum: OpKind = OpKind(
    "Einsum",
    _contracted,
    shape=_contracted_spec,
    traits=[ShardingRule(_written_out, ("ts[i]",))],
)


def einsum(subscripts: str, *ts: Tensor) -> Tensor:
    """The sum of products that `subscripts` says, as in NumPy. Sums are made in float32 and rounded once.

    Args:
        subscripts: a letter for each dimension of each operand, and after `->` those of the result: `"bqd,bkd->bqk"`.
            Letters that the result lacks are summed over. `...` stands for any dimensions.
        *ts: one or more tensors of one dtype.

    Returns:
        A new tensor.

    Raises:
        TypeError: if `subscripts` is not a string.
        ValueError: if no tensor is given.
        PopxlError: if the subscripts do not fit the shapes, or the dtypes differ.

    See also: `numpy.einsum`.

    Example:
        >>> products = ops.einsum("ik,jk->ij", x, x)
    """
    check_type(subscripts, str, "einsum: `subscripts`", "a string")
    if not ts:
        raise ValueError("einsum: at least one tensor is needed; none was given.")
    return _einsum(*ts, subscripts=subscripts)


def outer(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Outer product table of `lhs` and `rhs` elements.

    Args:
        lhs, rhs: tensors of one dtype, of any shape.

    Returns:
        A new tensor of shape `(lhs.nelms, rhs.nelms)`.

    Raises:
        PopxlError: if the dtypes differ.

    See also: `numpy.outer`.

    Example:
        >>> products = ops.outer(x, x)
    """
    return _outer(lhs, rhs)


# Of float8 ----------------------------------------------------------------------------------------------------------


_pow2scaled_kind = OpKind(
    "MatMul",
    lambda lhs, rhs, log2_scale, **hints: (
        jnp.matmul(as_factor(lhs), as_factor(rhs), preferred_element_type=jnp.float32) * pow2(log2_scale)
    ),
    shape=lambda lhs, rhs, log2_scale, **hints: TensorSpec(_product(lhs, rhs), dtypes.float16),
    result="matmul_pow2scaled_out",
    key="MatMulPow2Scaled",
    gradient=REFUSED,
    traits=[SCALE, Colocated("lhs", "rhs")],
)


def matmul_pow2scaled(
    lhs: Tensor, rhs: Tensor, log2_scale: Tensor, available_memory_proportion: float | None = None
) -> Tensor:
    """Matrix product of float8, times `2**log2_scale`: `(lhs @ rhs) * 2**log2_scale` in float16.

    Accumulated and scaled in float32, and rounded once. No gradient: autodiff refuses it.

    Args:
        lhs: float8 tensor; shapes are as for `matmul`.
        rhs: float8 tensor; its format may be the other one.
        log2_scale: int32 scalar, from -32 to 31. It may change while the program runs.
        available_memory_proportion: accepted for programs that tune memory; no effect.

    Returns:
        A new float16 tensor.

    Raises:
        TypeError: if an operand is not float8, or `log2_scale` not int32.
        ValueError: for a `log2_scale` that is not a scalar.
        PopxlError: if the shapes do not fit.
        ApplicationRuntimeError: by `session.run`, for a `log2_scale` out of range, unless the session option
            `throwIfLog2ScaleTensorNotInRange` is false.

    See also: `numpy.matmul`.

    Example:
        >>> y = ops.matmul_pow2scaled(x8, w8, popxl.constant(-4))
    """
    check_float8("matmul_pow2scaled", lhs=lhs, rhs=rhs)
    check_scale("matmul_pow2scaled", log2_scale)
    return _pow2scaled_kind(lhs, rhs, log2_scale, **set_hints(available_memory_proportion=available_memory_proportion))
