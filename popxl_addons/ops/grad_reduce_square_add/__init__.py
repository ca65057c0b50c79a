"""The sum of squares of a gradient, for its norm."""

from popxl_addons.ops.grad_reduce_square_add.grad_reduce_square_add import grad_reduce_square_add

__all__ = ["grad_reduce_square_add"]
