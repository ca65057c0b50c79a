"""Work of an op: floating point operations, counted in the trace of its JAX function, and bytes.

A user's op is counted like any other, and so is the gradient that JAX derives from an op. Nothing is compiled, and no
device is started. Ops that move data to and from streams, remote buffers and other replicas have bytes instead:
`moved`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

from popxl.core.recording import Op
from popxl.core.tracing import leaf_equations, traces_in
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


class MatrixProduct(NamedTuple):
    """A product of matrices, (batch, rows, depth) times (batch, depth, columns).

    A convolution is the product of a matrix of its windows and its weights, with a batch for each group.

    Attributes:
        dtype: NumPy's name of the dtype of the factors.
        flops: operations: a multiplication and an addition count as two.
    """

    dtype: str
    flops: int
    batch: int
    rows: int
    columns: int
    depth: int


class OpWork(NamedTuple):
    """Work of one op, excluding called graphs.

    Attributes:
        flops: operations of the function.
        products: matrix products and convolutions, each with how often the op computes it.
        is_elementwise: whether the function of the op computes elements only from elements, and moves them: nothing is
            reduced, sorted or looked up.
        is_view: whether it only moves elements in ways that kernels can read: strides, slices and broadcasts.
        read: bytes of operands, each once.
        written: bytes of results.
    """

    flops: Flops
    products: Mapping[MatrixProduct, int]
    is_elementwise: bool
    is_view: bool
    read: int
    written: int


def own_flops(op: Op) -> Flops:
    """Count the operations of one op, excluding called graphs.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     y = popxl.variable(np.ones((3, 4))) @ popxl.variable(np.ones((4, 8)))
        >>> own_flops(main.ops[-1])
        Flops(products=192, others=0)
    """
    return op_work(op).flops


def op_work(op: Op) -> OpWork:
    """Work of one op, excluding called graphs. What the runtime or another op carries out has only bytes.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     y = popxl.ops.tanh(popxl.variable(np.ones((3, 4)), popxl.float32))
        >>> work = op_work(main.ops[-1])
        >>> work.flops.total, work.read, work.written, work.is_elementwise
        (12, 48, 48, True)
    """
    function_work = op.remembered("work", lambda: _of_function(op))
    return OpWork(*function_work, *(sum(map(size_in_bytes, tensors)) for tensors in ({*op.inputs}, op.outputs)))


def moved(op: Op) -> int:
    """Bytes moved by a data-movement op: the larger of result and first operand.

    For an op that stores, the bytes of the stored operand count; for one that gathers from replicas or scatters over
    them, those of the larger side.
    """
    return max(sum(map(size_in_bytes, tensors)) for tensors in (op.outputs, op.inputs[:1]))


# In a trace ----------------------------------------------------------------------------------------------------------

_OF_RESULTS = frozenset(
    "add sub mul div rem neg abs sign max min pow integer_pow square sqrt rsqrt cbrt exp exp2 log expm1 log1p logistic "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc erf_inv lgamma digamma floor ceil "
    "round nextafter clamp add_any".split()
)
"""Primitives that compute each element of their result with one operation."""

ELEMENTWISE_PRIMITIVES = _OF_RESULTS | frozenset(
    "eq ne lt le gt ge and or xor not shift_left shift_right_arithmetic shift_right_logical is_finite select_n "
    "convert_element_type bitcast_convert_type reduce_precision copy copy_p stop_gradient real imag conj "
    "complex".split()
)
"""Elementwise primitives."""

_VIEWS = frozenset("reshape transpose squeeze slice split broadcast_in_dim expand_dims copy stop_gradient".split())
"""Primitives that kernels do without, as they read arrays with strides."""

_MOVES = _VIEWS | frozenset(
    "concatenate stack unstack pad rev dynamic_slice dynamic_update_slice iota random_bits random_fold_in random_wrap "
    "random_unwrap".split()
)
"""Primitives that move elements, number them, or draw them."""

_OF_OPERANDS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum cumprod cummax cummin cumlogsumexp".split()
)
"""Reductions: one operation per element of the operand."""

_OF_UPDATES = frozenset("scatter-add scatter_add scatter-mul scatter_mul".split())
"""Primitives that change one element for each element of their last operand."""

_OF_WINDOWS = frozenset("reduce_window_sum reduce_window_max reduce_window_min".split())
"""Primitives that reduce a window for each element of their result."""


class _Count(NamedTuple):
    """Products, with their number, and other operations."""

    products: Mapping[MatrixProduct, int] = MappingProxyType({})
    others: int = 0

    @property
    def flops(self) -> Flops:
        return Flops(sum(count * product.flops for product, count in self.products.items()), self.others)

    def plus(self, more: _Count, times: int = 1) -> _Count:
        """Add operations, `times` times."""
        products = Counter(self.products)
        products.update({product: times * count for product, count in more.products.items()})
        return _Count(products, self.others + times * more.others)


def _of_function(op: Op) -> tuple[Flops, Mapping[MatrixProduct, int], bool, bool]:
    """Work of an op's function, from its jaxpr."""
    if op.kind.is_carried_out_by_others:
        return Flops(), {}, False, False
    traced = op.traced()
    count, names = _of_trace(traced), {equation.primitive.name for equation in leaf_equations(traced)}
    return count.flops, count.products, names <= ELEMENTWISE_PRIMITIVES | _MOVES, names <= _VIEWS


def _of_trace(jaxpr: Any) -> _Count:
    return reduce(_Count.plus, map(_of_equation, jaxpr.eqns), _Count())


def _of_equation(equation: Any) -> _Count:
    """Operations of one trace equation, including nested traces."""
    name, parameters = equation.primitive.name, equation.params
    operands, results = ([v.aval for v in variables] for variables in (equation.invars, equation.outvars))
    if name in _PRODUCTS:
        return _Count({_PRODUCTS[name](equation): 1})
    if name in _OF_RESULTS:
        return _Count(others=_numbers(results[0]) * (3 if name == "mul" and _is_complex(results[0]) else 1))
    if name in _OF_OPERANDS:
        return _Count(others=_numbers(operands[0]))
    if name in _OF_UPDATES:
        return _Count(others=_numbers(operands[-1]))
    if name in _OF_WINDOWS:
        return _Count(others=results[0].size * math.prod(parameters["window_dimensions"]))
    if name == "fft":
        return _Count(others=_of_fourier(equation))
    inner = traces_in(equation)
    if name == "cond" and parameters.get("branches_platforms"):  # alternatives for platforms, the plain one last
        return _of_trace(inner[-1])
    if name == "cond":
        return max(map(_of_trace, inner), key=lambda count: count.flops.total)
    return _Count().plus(reduce(_Count.plus, map(_of_trace, inner), _Count()), parameters.get("length", 1))


def _is_complex(array: Any) -> bool:
    return array.dtype.kind == "c"


def _numbers(array: Any) -> int:
    """Number of real numbers in an array; two per complex element."""
    return array.size * (2 if _is_complex(array) else 1)


def _of_fourier(equation: Any) -> int:
    """Operations of a Fourier transform: half for a real operand or result."""
    operand, result, size = equation.invars[0].aval, equation.outvars[0].aval, math.prod(equation.params["fft_lengths"])
    of_real = not (_is_complex(operand) and _is_complex(result))
    count = (result if _is_complex(operand) else operand).size // size
    return round(count * 5 * size * math.log2(size)) // (2 if of_real else 1)


def _of_product(equation: Any) -> MatrixProduct:
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    operand, result = equation.invars[0].aval, equation.outvars[0].aval
    depth, batch = (math.prod(operand.shape[d] for d in axes) for axes in (contracted, batched))
    rows = operand.size // max(1, depth * batch)
    columns = result.size // max(1, rows * batch)
    of_pair = 8 if _is_complex(result) else 2
    return MatrixProduct(operand.dtype.name, of_pair * batch * rows * columns * depth, batch, rows, columns, depth)


def _of_convolution(equation: Any) -> MatrixProduct:
    """One product and one sum per result element and weight of one channel."""
    image, kernel, result = (v.aval for v in (*equation.invars, *equation.outvars))
    features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]
    rows, columns, depth = result.size // features, features // groups, kernel.size // features
    return MatrixProduct(image.dtype.name, 2 * result.size * depth, groups, rows, columns, depth)


_PRODUCTS = {"dot_general": _of_product, "conv_general_dilated": _of_convolution}
