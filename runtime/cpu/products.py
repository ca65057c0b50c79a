"""Products of matrices for CPUs."""

from __future__ import annotations

import math
from typing import Any

from popxl.base.arrays import Array
from popxl.ops.kernels.products import weights_gradient as plain


def weights_gradient(g: Array, t: Array, is_rounded: bool = False, precision: Any = None) -> Array:
    """`popxl.ops.kernels.products.weights_gradient`, flattened: XLA for CPUs would copy `g` with several row axes."""
    g, t = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (g, t))
    return plain.plain(g, t, precision=precision)
