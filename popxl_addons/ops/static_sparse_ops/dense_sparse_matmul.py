"""Products with sparse matrices that are constant in the program."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

import popxl
from popxl.extend.arguments import integer


class SparseMatrix(Protocol):
    """Protocol of SciPy's sparse matrices."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def tocoo(self) -> Any: ...


def random_sparse(dense: np.ndarray, density: float = 0.5) -> np.ndarray:
    """Zero random array elements in place, keeping each with probability `density`.

    At least one is kept. The choice comes from NumPy's global generator.

    Args:
        dense: array of any shape; it is changed.
        density: share of elements that are kept, from 0 to 1.

    Returns:
        The same array.

    Raises:
        ValueError: if `density` is not a probability.

    Example:
        >>> int(np.count_nonzero(random_sparse(np.ones((3, 4)), density=0.0)))
        1
    """
    if not 0 <= density <= 1:
        raise ValueError(f"random_sparse: `density` is {density}; expected a probability, from 0 to 1.")
    kept = np.random.random_sample(dense.shape) < density
    if dense.size and not kept.any():
        kept.flat[np.random.randint(dense.size)] = True
    dense[~kept] = 0
    return dense


def _product(lhs: Any, values: Any, rows: Any, columns: Any, *, output_cols: int) -> Any:
    """Multiply densely from sparse storage: faster except for extreme sparsity."""
    dense = jnp.zeros((lhs.shape[-1], output_cols), values.dtype).at[rows, columns].add(values)
    wide = jnp.matmul(lhs, dense, preferred_element_type=jnp.float32)
    return wide.astype(lhs.dtype)


_SparseMatmul = popxl.OpKind("SparseMatmul", _product)


def dense_const_sparse_matmul(lhs: popxl.Tensor, rhs: SparseMatrix, output_cols: int) -> popxl.Tensor:
    """``lhs @ rhs`` for a sparse matrix that becomes a constant of the program.

    Summed in float32 and rounded once.

    Args:
        lhs: float16, bfloat16 or float32 tensor of shape (m, k) or (1, m, k).
        rhs: a `scipy.sparse.csr_matrix`, or another sparse matrix of SciPy's, of shape (k, n). Its values are converted
            to the dtype of `lhs`.
        output_cols: columns of the result: n, or more, as SciPy may infer an n that leaves out empty last columns.

    Returns:
        A new tensor with the dtype of `lhs`, and its shape but for the last axis, which has size `output_cols`.
        Unlike in PopXL, a gradient flows to `lhs`.

    Raises:
        RuntimeError: for any other dtype of `lhs`.
        TypeError: if `rhs` is not a sparse matrix.
        ValueError: if the shapes do not fit.

    See also: `scipy.sparse.csr_matrix`.

    Example:
        >>> from scipy.sparse import csr_matrix
        >>> with popxl.Ir().main_graph:
        ...     x = popxl.constant([[1.0, 2.0, 3.0]])
        ...     y = dense_const_sparse_matmul(x, csr_matrix([[0.0, 4.0], [0.0, 0.0], [5.0, 0.0]]), 2)  # [[15, 4]]
        >>> y.shape
        (1, 2)
    """
    name = "dense_const_sparse_matmul"
    if not (lhs.dtype.is_half or lhs.dtype is popxl.float32):
        raise RuntimeError(f"{name}: `lhs` is of {lhs.dtype.name}; expected float16, bfloat16 or float32.")
    if not hasattr(rhs, "tocoo"):
        raise TypeError(
            f"{name}: `rhs` is a {type(rhs).__name__}; expected a sparse matrix such as scipy.sparse.csr_matrix(array)."
        )
    columns = integer(output_cols, f"{name}: `output_cols`")
    if lhs.rank not in (2, 3) or (lhs.rank == 3 and lhs.shape[0] != 1) or lhs.shape[-1] != rhs.shape[0]:
        raise ValueError(
            f"{name}: `lhs` has the shape {lhs.shape} and `rhs` {rhs.shape}; expected (m, {rhs.shape[0]}) or "
            f"(1, m, {rhs.shape[0]}) for `lhs`."
        )
    if columns < rhs.shape[1]:
        raise ValueError(f"{name}: `output_cols` is {columns}; expected {rhs.shape[1]}, the columns of `rhs`, or more.")
    entries = rhs.tocoo()
    values = popxl.constant(entries.data, lhs.dtype, "sparse_values")
    places = [popxl.constant(axis, popxl.int32, "sparse_indices") for axis in (entries.row, entries.col)]
    return _SparseMatmul(lhs, values, *places, output_cols=columns)
