"""Kernel overrides for TPUs."""

from __future__ import annotations

from collections.abc import Mapping

from popxl.ops.attention import attention_backward, attention_forward
from popxl.ops.kernels import convolutions
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from popxl.ops.kernels.sums import rounded, softmax_gradient
from popxl.ops.kernels.windows import first_largest, first_largest_gradient
from runtime import memory_spaces
from runtime.tpu import attention as of_attention
from runtime.tpu import convolutions as of_convolutions
from runtime.tpu import sums as of_sums
from runtime.tpu import windows as of_windows

OVERRIDES: Mapping[Kernel, KernelImpl] = {
    **memory_spaces.OVERRIDES,
    attention_forward: of_attention.attention_forward,
    attention_backward: of_attention.attention_backward,
    first_largest: of_windows.first_largest,
    first_largest_gradient: of_windows.first_largest_gradient,
    convolutions.convolved: convolutions.convolved_halves,
    rounded: of_sums.rounded,
    softmax_gradient: of_sums.softmax_gradient,
    convolutions.weights_gradient: of_convolutions.weights_gradient,
}
