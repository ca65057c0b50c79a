"""The kernels of ops that are computed in another form on CPUs."""

from __future__ import annotations

from collections.abc import Mapping

from popxl.ops import convolutions, float8, kernels, pooling, sums
from popxl.ops.kernels import Form, Kernel
from runtime.cpu import convolutions as of_convolutions
from runtime.cpu import elements
from runtime.cpu import sums as of_sums
from runtime.cpu.windows import over_windows_by_axes

FORMS: Mapping[Kernel, Form] = {
    convolutions.convolved: of_convolutions.convolved,
    convolutions.transposed: of_convolutions.transposed,
    convolutions.weights_gradient: of_convolutions.weights_gradient,
    float8.as_factor: float8.decode,
    kernels.computed_once: elements.computed_once,
    kernels.of_elements: elements.of_elements,
    kernels.over_images: elements.over_images,
    kernels.quotient: elements.quotient,
    pooling.over_windows: over_windows_by_axes,
    sums.largest: of_sums.largest,
    sums.summed: of_sums.summed,
}
