"""The sum of squares of a gradient, for its norm."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import popxl
from popxl.extend.kernels import number
from popxl.extend.ops import factor, one_number
from popxl.op import REFUSED, ShardingRule


def _sum_of_squares(t: Any, loss_scaling: Any = 1.0) -> Any:
    wide = t.astype(jnp.float32)
    return (wide * wide).sum() / number(loss_scaling, jnp.float32) ** 2


def _shape(t: Any, loss_scaling: Any = 1.0) -> popxl.TensorSpec:
    one_number(loss_scaling)
    return popxl.TensorSpec((), popxl.float32)


_GradReduceSquareAdd = popxl.OpKind(
    "GradReduceSquareAdd", _sum_of_squares, shape=_shape, gradient=REFUSED, traits=[ShardingRule("...->")]
)


def grad_reduce_square_add(t: popxl.Tensor, loss_scaling: float | popxl.Tensor) -> popxl.Tensor:
    """The sum of squares of a gradient whose loss was scaled, without that scaling: ``sum(t**2) / loss_scaling**2``.

    Add up those of all gradients; the square root is the global norm that `AdamOptimizerStep` takes. Computed in
    float32.

    Args:
        t: float tensor of any shape.
        loss_scaling: a number, or a tensor of one element.

    Returns:
        A float32 scalar. No gradient: autodiff refuses it.

    Raises:
        TypeError: if `loss_scaling` is neither a number nor a tensor.
        PopxlError: if `loss_scaling` has several elements.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     gradient = popxl.constant(np.arange(6, dtype=np.float32))
        ...     square = grad_reduce_square_add(gradient, loss_scaling=64)  # 55 / 64**2 = 0.0134277
        ...     norm = popxl.ops.sqrt(square)
        >>> square.dtype, square.shape
        (popxl.dtypes.float32, ())
    """
    return _GradReduceSquareAdd(t, factor(loss_scaling, "grad_reduce_square_add: `loss_scaling`"))
