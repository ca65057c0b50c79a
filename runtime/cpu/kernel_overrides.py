"""Kernel overrides for CPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax

from popxl.base.arrays import Array
from popxl.ops import float8, pooling
from popxl.ops.kernels import convolutions, elements, memory, products, sums, words
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from popxl.ops.windows import Windows
from runtime.cpu import convolutions as of_convolutions
from runtime.cpu import elements as of_elements
from runtime.cpu import random_bits as of_random_bits
from runtime.cpu import reductions as of_reductions
from runtime.cpu.platform_dependent import if_platform_cpu
from runtime.fake_dependency import computed_after


def weights_gradient(g: Array, t: Array, is_rounded: bool = False, precision: Any = None) -> Array:
    """`popxl.ops.kernels.products.weights_gradient`, flattened: XLA for CPUs would copy `g` with several row axes."""
    g, t = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (g, t))
    return products.weights_gradient.plain(g, t, precision=precision)


def _over_windows_by_axes(combining: pooling.Combining, t: Any, windows: Sequence[Windows]) -> Any:
    """Reduce windows of images along one axis after another: on CPUs, XLA processes windows element by element."""

    def by_axes(first: int, t: Any) -> Any:
        for axis, along in enumerate(windows, first):
            t = combining.along(t, axis, along)
        return t

    plain = partial(pooling.over_windows.plain, combining, windows=windows)
    return if_platform_cpu(partial(of_elements.spatial, by_axes, len(windows)), plain)(t)


def _available_together(values: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """`values` with fake dependencies on the first elements of `others`; and `others`.

    XLA for CPUs drops optimization barriers before it merges equal computations. Without others, the values depend on
    their own first elements, which still keeps XLA from merging the computations.
    """
    waited_for = others if any(other.size for other in others) else values
    return [_with_dependency(value, waited_for) for value in values], others


@jax.custom_jvp
def _with_dependency(value: Any, others: Sequence[Any]) -> Any:
    return computed_after(value, others)


@_with_dependency.defjvp
def _tangent_after(values: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """Tangent without dependency, since the dependency works on bits, which have no derivative."""
    return _with_dependency(*values), tangents[0]


OVERRIDES: Mapping[Kernel, KernelImpl] = {
    convolutions.convolved: of_convolutions.convolved,
    convolutions.transposed: of_convolutions.transposed,
    convolutions.weights_gradient: of_convolutions.weights_gradient,
    elements.materialize: of_elements.materialize,
    elements.of_elements: of_elements.of_elements,
    elements.spatial: of_elements.spatial,
    elements.quotient: of_elements.quotient,
    float8.as_factor: float8.decode,
    memory.available_together: _available_together,
    memory.computed_after: computed_after,
    pooling.over_windows: _over_windows_by_axes,
    products.weights_gradient: weights_gradient,
    sums.largest: of_reductions.reduce_max,
    sums.summed: of_reductions.reduce_sum,
    words.fold_in: of_random_bits.fold_in,
    words.words: of_random_bits.random_bits,
}
