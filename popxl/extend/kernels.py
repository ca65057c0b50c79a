"""Functions of arrays used by built-in ops, and `Kernel`: a function that a platform may implement differently.

A kernel is plain JAX. `Kernel.override` gives it another implementation for one platform, with the same numbers.

Example:
    >>> from popxl.extend.kernels import Kernel
    >>> cube = Kernel(lambda t: t**3)
    >>> @cube.override("tpu")
    ... def _(t):
    ...     return t * t * t
    >>> Cube = popxl.OpKind("Cube", lambda x: cube(x))
"""

from popxl.base.arrays import Array
from popxl.ops.attention import attention_backward, attention_forward, attention_specs
from popxl.ops.complex import conjugate
from popxl.ops.kernels import products, sums
from popxl.ops.kernels.elements import full_after, materialize, of_elements, spatial
from popxl.ops.kernels.kernel import Kernel
from popxl.ops.kernels.windows import first_largest, first_largest_gradient
from popxl.ops.kernels.words import fold_in
from popxl.ops.precision import round_once, wide_dtype, widen
from popxl.ops.random import draw_sharded
from popxl.ops.resample import Taps, apply_taps, cubic_kernel, transposed
from popxl.ops.var_updates.factors import number
from popxl.ops.windows import Windows

__all__ = [
    "Array",
    "Kernel",
    "Taps",
    "Windows",
    "attention_forward",
    "attention_backward",
    "attention_specs",
    "materialize",
    "conjugate",
    "cubic_kernel",
    "fold_in",
    "draw_sharded",
    "first_largest",
    "first_largest_gradient",
    "number",
    "of_elements",
    "spatial",
    "products",
    "full_after",
    "round_once",
    "sums",
    "apply_taps",
    "transposed",
    "wide_dtype",
    "widen",
]
