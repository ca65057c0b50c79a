"""Floating point operations of an op, counted in the trace of its JAX function.

A user's op is counted like any other, and so is the gradient that JAX derives from an op. Nothing is compiled, and no
device is started. Ops that move data to and from streams, remote buffers and other replicas have bytes instead:
`moved`.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

from popxl.core.recording import Op
from popxl.core.tracing import traces_in
from popxl.values.spec import size_in_bytes


class Flops(NamedTuple):
    """Operations of an op.

    Attributes:
        products: operations in matrix products and convolutions; a multiplication and an addition count as two.
        others: one for each element that is computed or reduced: a sum, an exponential. Complex numbers count two, one
            for each part, and six for a product; a Fourier transform of n numbers counts 5 n log₂ n.
    """

    products: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.products + self.others

    def plus(self, more: Flops, times: int = 1) -> Flops:
        """Add operations, `times` times."""
        return Flops(self.products + times * more.products, self.others + times * more.others)


def own_flops(op: Op) -> Flops:
    """Count the operations of one op, excluding called graphs.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     y = popxl.variable(np.ones((3, 4))) @ popxl.variable(np.ones((4, 8)))
        >>> own_flops(main.ops[-1])
        Flops(products=192, others=0)
    """
    if op.kind.is_carried_out_by_others:
        return Flops()
    return op.remembered("flops", lambda: _trace_flops(op.traced()))


def moved(op: Op) -> int:
    """Bytes moved by a data-movement op: the larger of result and first operand.

    For an op that stores, the bytes of the stored operand count; for one that gathers from replicas or scatters over
    them, those of the larger side.
    """
    return max(sum(map(size_in_bytes, side)) for side in (op.outputs, op.inputs[:1]))


# In a trace ----------------------------------------------------------------------------------------------------------

_OF_RESULTS = frozenset(
    "add sub mul div rem neg abs sign max min pow integer_pow square sqrt rsqrt cbrt exp exp2 log expm1 log1p logistic "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc erf_inv lgamma digamma floor ceil "
    "round nextafter clamp add_any".split()
)
"""Primitives that compute each element of their result with one operation."""

_OF_OPERANDS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum cumprod cummax cummin cumlogsumexp".split()
)
"""Primitives that take in each element of their operand with one operation."""

_OF_UPDATES = frozenset("scatter-add scatter_add scatter-mul scatter_mul".split())
"""Primitives that change one element for each element of their last operand."""

_OF_WINDOWS = frozenset("reduce_window_sum reduce_window_max reduce_window_min".split())
"""Primitives that reduce a window for each element of their result."""


def _trace_flops(jaxpr: Any) -> Flops:
    return reduce(Flops.plus, map(_of_equation, jaxpr.eqns), Flops())


def _of_equation(equation: Any) -> Flops:
    """Operations of one trace equation, including nested traces."""
    name, parameters = equation.primitive.name, equation.params
    given, made = ([v.aval for v in side] for side in (equation.invars, equation.outvars))
    if name in _PRODUCTS:
        return Flops(products=_PRODUCTS[name](equation))
    if name in _OF_RESULTS:
        return Flops(others=_numbers(made[0]) * (3 if name == "mul" and _is_complex(made[0]) else 1))
    if name in _OF_OPERANDS:
        return Flops(others=_numbers(given[0]))
    if name in _OF_UPDATES:
        return Flops(others=_numbers(given[-1]))
    if name in _OF_WINDOWS:
        return Flops(others=made[0].size * math.prod(parameters["window_dimensions"]))
    if name == "fft":
        return Flops(others=_of_fourier(equation))
    inner = traces_in(equation)
    if name == "cond" and parameters.get("branches_platforms"):  # alternatives for platforms, the plain one last
        return _trace_flops(inner[-1])
    if name == "cond":
        return max(map(_trace_flops, inner), key=lambda flops: flops.total)
    return Flops().plus(reduce(Flops.plus, map(_trace_flops, inner), Flops()), parameters.get("length", 1))


def _is_complex(array: Any) -> bool:
    return array.dtype.kind == "c"


def _numbers(array: Any) -> int:
    """How many real numbers an array has."""
    return array.size * (2 if _is_complex(array) else 1)


def _of_fourier(equation: Any) -> int:
    """Operations of a Fourier transform: half for a real operand or result."""
    given, made, size = equation.invars[0].aval, equation.outvars[0].aval, math.prod(equation.params["fft_lengths"])
    of_real = not (_is_complex(given) and _is_complex(made))
    count = (made if _is_complex(given) else given).size // size
    return round(count * 5 * size * math.log2(size)) // (2 if of_real else 1)


class ProductSizes(NamedTuple):
    """Sizes of a product of matrices, (batch, rows, depth) times (batch, depth, columns)."""

    batch: int
    rows: int
    columns: int
    depth: int


def product_sizes(equation: Any) -> ProductSizes:
    """Sizes of an equation with the primitive `dot_general`."""
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval, equation.outvars[0].aval
    depth, batch = (math.prod(left.shape[d] for d in each) for each in (contracted, batched))
    rows = left.size // max(1, depth * batch)
    return ProductSizes(batch, rows, result.size // max(1, rows * batch), depth)


def _of_product(equation: Any) -> int:
    return (8 if _is_complex(equation.outvars[0].aval) else 2) * math.prod(product_sizes(equation))


def _of_convolution(equation: Any) -> int:
    """One product and one sum per result element and weight of one channel."""
    kernel, numbers = equation.invars[1].aval, equation.params["dimension_numbers"]
    return 2 * equation.outvars[0].aval.size * kernel.size // kernel.shape[numbers.rhs_spec[0]]


_PRODUCTS = {"dot_general": _of_product, "conv_general_dilated": _of_convolution}
