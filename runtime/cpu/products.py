"""Products of matrices for CPUs."""

from __future__ import annotations

import math

from popxl.base.arrays import Array
from popxl.ops.kernels.products import weights_gradient as plain


def weights_gradient(g: Array, t: Array, is_rounded: bool = False) -> Array:
    """`popxl.ops.kernels.products.weights_gradient`. Of several dimensions of rows, XLA would copy `g` for CPUs."""
    return plain.plain(*(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (g, t)))
