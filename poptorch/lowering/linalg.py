"""Linear algebra: matrix products, solvers, decompositions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.emission import wanted
from poptorch.lowering.operands import cast_like, promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.kernels import conjugate, products, round_once, widen
from popxl.extend.ops import REAL

# Products -------------------------------------------------------------------------------------------------------------


def product(lhs: popxl.Tensor, rhs: popxl.Tensor) -> popxl.Tensor:
    """Matrix product. float16 products round to float16, so gradients are float16 products, too."""
    lhs, rhs = promoted(lhs, rhs)
    return ops.matmul(lhs, rhs)


def _declare_product(names: str, other: str) -> None:
    """Declare a matrix product; `other` names the second factor."""
    lowers(*names.split())(lambda input, **factor: product(input, factor[other]))


_declare_product("torch.matmul", "other")
_declare_product("aten.mm aten.bmm", "mat2")
_declare_product("aten.mv", "vec")
_declare_product("aten.dot", "tensor")


@lowers("aten.vdot")
def vdot(input: popxl.Tensor, other: popxl.Tensor) -> popxl.Tensor:
    return product(conjugate(input), other)


@jax_op(title="GroupedMatMul")
def _grouped_mm(a: Any, b: Any, ends: Any = None) -> Any:
    """Grouped matrix product. Groups of a matrix are contiguous; `ends` contains their end offsets."""
    return widen(_by_group(products.factor(a), products.factor(b), ends))


def _by_group(a: Any, b: Any, ends: Any) -> Any:
    if a.ndim == b.ndim == 3:
        return a @ b
    sizes = jnp.diff(ends, prepend=0)
    if b.ndim == 3:
        return lax.ragged_dot(a, b, sizes)
    if a.ndim == 3:
        return lax.ragged_dot(b.T, a.swapaxes(1, 2), sizes).T
    rows = jnp.arange(b.shape[0])
    in_group = (rows < ends[:, None]) & (rows >= (ends - sizes)[:, None])
    return jnp.where(in_group[:, None], a, 0) @ b


@lowers("torch.grouped_mm")
def grouped_mm(
    mat_a: popxl.Tensor, mat_b: popxl.Tensor, offs: popxl.Tensor | None = None, bias: None = None, out_dtype: Any = None
) -> popxl.Tensor:
    a, b = promoted(mat_a, mat_b)
    return _grouped_mm(a, b) if offs is None else _grouped_mm(a, b, offs)


def _rows(t: popxl.Tensor) -> popxl.Tensor:
    """Flatten all dimensions but the last."""
    return ops.reshape(t, (-1, t.shape[-1]))


@jax_op(title="LinearWeightsGrad")
def _weights_gradient(g: Any, input: Any) -> Any:
    # Rows stay in several dimensions: if another product takes these operands unmerged, XLA would copy them for TPUs.
    return products.weights_gradient(g, input, is_rounded=True).astype(g.dtype)


@jax_op(
    title="Linear",
    gradient={
        "input": lambda g, weight: product(g, weight),
        "weight": lambda g, input: _weights_gradient(g, input),
        "bias": lambda g: ops.sum(_rows(g), 0),
    },
)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    # Weights have a row for each result. They are not transposed: each product would keep a transposed copy for its
    # gradient.
    out = products.linear(input, weight, is_rounded=bias is None)
    return (out if bias is None else out + widen(bias)).astype(input.dtype)


@lowers("torch.linear")
def linear(input: popxl.Tensor, weight: popxl.Tensor, bias: popxl.Tensor | None = None) -> popxl.Tensor:
    if weight.rank == 2 and input.dtype == weight.dtype and (input.dtype.is_half or input.dtype is popxl.float32):
        return _linear(input, weight) if bias is None else _linear(input, weight, bias)
    out = product(input, ops.transpose(weight))  # for integers, or for a single row
    return out if bias is None else ops.add(*promoted(out, bias))


def _declare_sum(name: str, multiplied: Callable[..., popxl.Tensor]) -> None:
    """Declare `beta * input + alpha * product`; `multiplied` computes the product from factors by name."""

    def lowering(input: popxl.Tensor, beta: float = 1, alpha: float = 1, **factors: popxl.Tensor) -> popxl.Tensor:
        if alpha == 0:  # the product is ignored, infinities and NaN included
            spec = wanted()
            out = ops.init(spec.shape, spec.dtype, "zeros", "zero")
        else:
            out = multiplied(**factors)
            out = out if alpha == 1 else out * alpha
        if beta == 0:  # likewise the input
            return out
        return ops.add(*promoted(out, input if beta == 1 else cast_like(input, out.dtype) * beta))

    lowers(f"aten.{name}")(lowering)


def _summed_products(batch1: popxl.Tensor, batch2: popxl.Tensor) -> popxl.Tensor:
    """Sum of batched products, as one product of horizontally and vertically stacked matrices."""
    batch, rows, inner = batch1.shape
    stacked = ops.reshape(ops.transpose(batch1, (1, 0, 2)), (rows, batch * inner))
    return product(stacked, ops.reshape(batch2, (batch * inner, batch2.shape[2])))


_declare_sum("addmm", lambda mat1, mat2: product(mat1, mat2))
_declare_sum("addmv", lambda mat, vec: product(mat, vec))
_declare_sum("baddbmm", lambda batch1, batch2: product(batch1, batch2))
_declare_sum("addbmm", _summed_products)
_declare_sum("addr", lambda vec1, vec2: product(ops.reshape(vec1, (-1, 1)), ops.reshape(vec2, (1, -1))))


@lowers("torch.einsum")
def einsum(equation: str, operands: Any) -> popxl.Tensor:
    given = operands[0] if isinstance(operands[0], tuple) else operands
    return _einsum(*promoted(*given), equation=equation.replace(" ", ""))


@jax_op(title="Einsum")
def _einsum(*operands: Any, equation: str) -> Any:
    return jnp.einsum(equation, *operands)  # float16 and bfloat16 are summed in float32


@lowers("torch.bilinear")
def bilinear(
    input1: popxl.Tensor, input2: popxl.Tensor, weight: popxl.Tensor, bias: popxl.Tensor | None = None
) -> popxl.Tensor:
    out = _einsum(input1, weight, input2, equation="...i,oij,...j->...o")
    return out if bias is None else ops.add(*promoted(out, bias))


@jax_op("aten.linalg_cross")
@round_once
def cross(input: Any, other: Any, *, dim: int = -1) -> Any:
    return jnp.cross(input, other, axis=dim)


# Solvers and decompositions -------------------------------------------------------------------------------------------
#
# A program cannot raise an error that depends on numbers. A matrix that cannot be factored gives NaN or infinity, and
# PyTorch's error code. Unused results are not computed.


def _declare_matrix_op(names: str, function: Callable[..., Any], title: str = "") -> None:
    """Declare an op on matrices; its title in printed graphs is by default derived from the first name."""
    first, *_ = names.split()
    plain = first.removeprefix("_").removeprefix("linalg_").removesuffix("_ex")
    title = title or "".join(map(str.capitalize, plain.split("_")))
    jax_op(*(f"aten.{name}" for name in names.split()), title=title)(function)


def _adjoint(matrix: Any) -> Any:
    return matrix.mT.conj()


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _hermitian(matrix: Any, upper: bool) -> Any:
    """Hermitian matrix from one triangle; gradients are Hermitian, as in PyTorch."""
    triangle, rest = (jnp.triu(matrix), jnp.triu(matrix, 1)) if upper else (jnp.tril(matrix), jnp.tril(matrix, -1))
    return triangle + _adjoint(rest)


@_hermitian.defjvp
def _(upper: bool, matrices: Any, tangents: Any) -> Any:
    (matrix,), (tangent,) = matrices, tangents
    return _hermitian(matrix, upper), (tangent + _adjoint(tangent)) / 2


def _cholesky(input: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    matrix = _hermitian(input, upper)
    factor = jnp.linalg.cholesky(matrix, symmetrize_input=False)
    return _adjoint(factor) if upper else factor, _first_indefinite(lax.stop_gradient(matrix))


def _first_indefinite(matrix: Any) -> Any:
    """Order of the first leading principal minor that is not positive definite; 0 if none."""

    def eliminate_column(k: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        rest, found = state
        pivot, column = rest[..., k, k].real, rest[..., :, k]
        found = jnp.where((found == 0) & ~(pivot > 0), k + 1, found)
        return rest - column[..., :, None] * (column.conj() / pivot[..., None])[..., None, :], found

    not_found = jnp.zeros(matrix.shape[:-2], jnp.int32)
    return lax.fori_loop(jnp.int32(0), matrix.shape[-1], eliminate_column, (matrix, not_found))[1]


def _first_zero(packed: Any) -> Any:
    """1-based index of the first zero on the diagonal of a triangular factor; 0 if none."""
    zero = jnp.diagonal(packed, axis1=-2, axis2=-1) == 0
    return jnp.where(zero.any(-1), zero.argmax(-1) + 1, 0).astype(jnp.int32)


def _inverse(A: Any, *, check_errors: bool = False) -> Any:
    return jnp.linalg.inv(A), _first_zero(lax.linalg.lu(lax.stop_gradient(A))[0])


def _solve(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    packed, pivots, _ = lax.linalg.lu(lax.stop_gradient(A))
    return _solution(A, B, left), packed, pivots + 1, _first_zero(packed)


def _solution(A: Any, B: Any, left: bool) -> Any:
    """Solution `X` of `AX = B`, or of `XA = B`."""
    if not left:
        return _solution(A.mT, B.mT, True).mT
    if B.ndim == A.ndim - 1 and B.shape == A.shape[:-1]:  # vectors
        return jnp.linalg.solve(A, B[..., None])[..., 0]
    return jnp.linalg.solve(A, B)


def _broadcast_batches(*matrices: Any) -> Any:
    """Broadcast all dimensions but the last two."""
    batch = jnp.broadcast_shapes(*(m.shape[:-2] for m in matrices))
    return [jnp.broadcast_to(m, batch + m.shape[-2:]) for m in matrices]


def _solve_triangular(input: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    input, B = _broadcast_batches(input, B)
    return lax.linalg.triangular_solve(input, B, left_side=left, lower=not upper, unit_diagonal=unitriangular)


def _triangular_solve(
    input: Any, A: Any, *, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    matrix, flipped = (A.mT, not upper) if transpose else (A, upper)
    return _solve_triangular(matrix, input, upper=flipped, unitriangular=unitriangular), A


def _least_squares(input: Any, b: Any, *, rcond: float | None = None, driver: str | None = None) -> Any:
    """Minimum-norm least-squares solution, residuals, rank and singular values."""
    vectors, none = b.ndim == input.ndim - 1, jnp.zeros((0,))
    known = b[..., None] if vectors else b
    solution = _pinv(input, rtol=rcond) @ known
    has_residuals = driver not in (None, "gelsy") and input.shape[-2] > input.shape[-1]
    residuals = ((input @ solution - known) ** 2).sum(-2) if has_residuals else none
    rank = jnp.linalg.matrix_rank(input, rtol=rcond) if driver != "gels" else none
    values = jnp.linalg.svd(input, compute_uv=False) if driver in ("gelsd", "gelss") else none
    return solution[..., 0] if vectors else solution, residuals, rank, values


def _cholesky_solve(input: Any, input2: Any, *, upper: bool = False) -> Any:
    input, input2 = _broadcast_batches(input, input2)
    return jax.scipy.linalg.cho_solve((input2, not upper), input)


def _cholesky_inverse(input: Any, *, upper: bool = False) -> Any:
    return _cholesky_solve(
        jnp.broadcast_to(jnp.eye(input.shape[-1], dtype=input.dtype), input.shape), input, upper=upper
    )


def _lu(A: Any, *, pivot: bool = True) -> Any:
    packed, _, rows = lax.linalg.lu(A)
    return _unpacked(packed, rows)


def _unpacked(packed: Any, rows: Any) -> Any:
    """Permutation, lower factor and upper factor."""
    count = packed.shape[-2]
    size = min(packed.shape[-2:])
    lower = jnp.tril(packed[..., :size], -1) + jnp.eye(count, size, dtype=packed.dtype)
    permutation = jnp.swapaxes(jax.nn.one_hot(rows, count, dtype=packed.dtype), -1, -2)
    return permutation, lower, jnp.triu(packed[..., :size, :])


def _lu_unpack(LU_data: Any, LU_pivots: Any, *, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    rows = lax.linalg.lu_pivots_to_permutation(LU_pivots - 1, LU_data.shape[-2])
    permutation, lower, upper = _unpacked(LU_data, rows)
    none = jnp.zeros((0,))
    return (permutation if unpack_pivots else none), *((lower, upper) if unpack_data else (none, none))


def _lu_factor(A: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    packed, pivots, _ = lax.linalg.lu(A)
    return packed, pivots + 1, _first_zero(packed)


def _lu_solve(LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:
        return _adjoint(_lu_solve(LU, pivots, _adjoint(B), adjoint=not adjoint))
    LU, B = _broadcast_batches(LU, B)
    rows = jnp.broadcast_to(lax.linalg.lu_pivots_to_permutation(pivots - 1, LU.shape[-1]), LU.shape[:-1])
    solve = partial(lax.linalg.triangular_solve, LU, left_side=True, transpose_a=adjoint, conjugate_a=adjoint)
    if adjoint:
        out = solve(solve(B), lower=True, unit_diagonal=True)
        return jnp.take_along_axis(out, jnp.argsort(rows)[..., None], -2)
    return solve(solve(jnp.take_along_axis(B, rows[..., None], -2), lower=True, unit_diagonal=True))


def _householder_product(input: Any, tau: Any) -> Any:
    """Leading columns of the product of all Householder reflections; JAX's version lacks a derivative."""
    rows, columns = input.shape[-2:]
    out = jnp.broadcast_to(jnp.eye(rows, columns, dtype=input.dtype), input.shape)
    vectors = jnp.moveaxis(jnp.tril(input, -1) + out, -1, 0)

    def reflected(t: Any, reflection: Any) -> tuple[Any, None]:
        vector, factor = reflection
        return t - factor[..., None, None] * vector[..., None] * (vector.conj()[..., None, :] @ t), None

    factors = jnp.moveaxis(tau, -1, 0)
    return lax.scan(reflected, out, (vectors[: len(factors)], factors), reverse=True)[0]


def _eigh(A: Any, *, UPLO: str = "L", compute_v: bool = True) -> Any:
    return tuple(jnp.linalg.eigh(_hermitian(A, UPLO.upper() == "U"), symmetrize_input=False))


def _svd(A: Any, *, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None) -> Any:
    if compute_uv:
        return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))
    values = jnp.linalg.svd(A, compute_uv=False)
    return jnp.zeros((0,)), values, jnp.zeros((0,))


def _qr(A: Any, *, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros((0,)), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


def _pinv(input: Any, atol: Any = None, rtol: Any = None, *, hermitian: bool = False) -> Any:
    """Pseudoinverse; singular values up to `max(atol, rtol * largest)` count as 0."""
    input = _hermitian(input, False) if hermitian else input
    largest = jnp.linalg.svd(input, compute_uv=False).max(-1)
    default = max(input.shape[-2:]) * jnp.finfo(input.dtype).eps if atol is None else 0
    relative = default if rtol is None else rtol
    cutoff = relative if atol is None else jnp.maximum(relative, atol / largest)
    return jnp.linalg.pinv(input, rtol=cutoff, hermitian=hermitian)


_declare_matrix_op("linalg_pinv", _pinv)
_declare_matrix_op("_linalg_det", lambda A: jnp.linalg.det(A), "Determinant")
_declare_matrix_op("_linalg_slogdet", lambda A: tuple(jnp.linalg.slogdet(A)), "LogDeterminant")
_declare_matrix_op("linalg_inv_ex", _inverse, "Inverse")
_declare_matrix_op("linalg_matrix_exp", lambda input: jax.scipy.linalg.expm(input))
_declare_matrix_op("linalg_cholesky_ex cholesky", _cholesky)
_declare_matrix_op("linalg_lu", _lu, "LU")
_declare_matrix_op("linalg_lu_factor_ex", _lu_factor, "LUFactor")
_declare_matrix_op("linalg_lu_solve", _lu_solve, "LUSolve")
_declare_matrix_op("lu_unpack", _lu_unpack, "LUUnpack")
_declare_matrix_op("triangular_solve", _triangular_solve, "TriangularSolve")
_declare_matrix_op("linalg_householder_product", _householder_product)
_declare_matrix_op("_linalg_solve_ex", _solve)
_declare_matrix_op("linalg_solve_triangular", _solve_triangular)
_declare_matrix_op("cholesky_solve", _cholesky_solve)
_declare_matrix_op("cholesky_inverse", _cholesky_inverse)
_declare_matrix_op("_linalg_eigh", _eigh)
_declare_matrix_op("_linalg_svd", _svd, "SVD")
_declare_matrix_op("linalg_qr", _qr, "QR")
# Complex matrices are refused: PyTorch's shape inference states a complex dtype for their residuals, which are real.
jax_op("aten.linalg_lstsq", title="LeastSquares", traits=REAL)(_least_squares)
