"""Products with sparse matrices that are constant in the program."""

from popxl_addons.ops.static_sparse_ops.dense_sparse_matmul import dense_const_sparse_matmul, random_sparse

__all__ = ["dense_const_sparse_matmul", "random_sparse"]
