"""Products of matrices whose rows stand in several dimensions."""

from __future__ import annotations

from typing import Any

from jax import lax

from popxl.ops.kernels.kernel import Kernel
from popxl.ops.precision import wide_dtype


@Kernel
def weights_gradient(g: Any, t: Any) -> Any:
    """The gradient of a matrix that all rows of `t` were multiplied with, for the gradient `g` of the results.

    It has a row for each column of `g`, and is in the dtype that sums are made in.
    """
    rows = tuple(range(t.ndim - 1))
    return lax.dot_general(g, t, ((rows, rows), ((), ())), preferred_element_type=wide_dtype(g, t))
