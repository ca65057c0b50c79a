"""Kernel overrides for CPUs."""

from __future__ import annotations

from collections.abc import Mapping

from popxl.ops import float8, pooling
from popxl.ops.kernels import convolutions, elements, memory, products, sums, words
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from runtime.cpu import convolutions as of_convolutions
from runtime.cpu import elements as of_elements
from runtime.cpu import products as of_products
from runtime.cpu import random_bits as of_random_bits
from runtime.cpu import recomputation
from runtime.cpu import reductions as of_reductions
from runtime.cpu.windows import over_windows_by_axes
from runtime.fake_dependency import computed_after

OVERRIDES: Mapping[Kernel, KernelImpl] = {
    convolutions.convolved: of_convolutions.convolved,
    convolutions.transposed: of_convolutions.transposed,
    convolutions.weights_gradient: of_convolutions.weights_gradient,
    elements.materialize: of_elements.materialize,
    elements.of_elements: of_elements.of_elements,
    elements.spatial: of_elements.spatial,
    elements.quotient: of_elements.quotient,
    float8.as_factor: float8.decode,
    memory.available_together: recomputation.available_together,
    memory.computed_after: computed_after,
    pooling.over_windows: over_windows_by_axes,
    products.weights_gradient: of_products.weights_gradient,
    sums.largest: of_reductions.reduce_max,
    sums.summed: of_reductions.reduce_sum,
    words.fold_in: of_random_bits.fold_in,
    words.words: of_random_bits.random_bits,
}
