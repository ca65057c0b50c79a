"""Products of matrices for CPUs."""

from __future__ import annotations

import math

from popxl.base.arrays import Array
from popxl.ops.kernels.products import weights_gradient as plain


def weights_gradient(g: Array, t: Array, is_rounded: bool = False) -> Array:
    """`popxl.ops.kernels.products.weights_gradient`, flattened: XLA for CPUs would copy `g` with several row axes."""
    return plain.plain(*(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (g, t)))
