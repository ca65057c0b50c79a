"""A fully connected layer that multiplies in float8."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import popxl
from popxl import ops
from popxl.replica_grouping import Groups
from popxl_addons.layers.linear import Linear
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale, max_scaling_bias, min_scaling_bias

ScaleMetric = Literal["amax", "mse", "manual_scale"]

_GRADIENT_MARGIN = 3
"""Headroom for outliers of gradients: binades that their scale is reduced by."""


class LinearFP8(Linear):
    """`Linear` with float8 operands: float8_143 in the forward product, float8_152 for the gradient.

    Products are summed in float32 and rounded once, to the dtype of `x` (in PopXL to float16). The gradient is written
    by hand, and keeps operands in float8; so outline the layer with `call_module`, or use its own graph.

    Args:
        out_features, bias, replica_grouping, group_axis: as for `Linear`.
        scale_metric: choice of the scales of `x`, `weight` and the gradient: ``"amax"`` (`fp8_amax_scale`), ``"mse"``
            (`fp8_mse_scale`), or ``"manual_scale"``.
        scale: the power of two for ``"manual_scale"``, from -31 to 31.

    Raises:
        ValueError: for an unknown `scale_metric` or invalid `scale`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = LinearFP8(3, scale_metric="mse").create_graph(popxl.TensorSpec((5, 4), popxl.float32))
        ...     grad = graph.autodiff()
        >>> [gradient.shape for gradient in grad.graph.outputs]
        [(5, 4), (4, 3), (3,)]
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        scale_metric: ScaleMetric = "amax",
        scale: int = 0,
        replica_grouping: Groups | None = None,
        group_axis: int | None = None,
    ):
        super().__init__(out_features, bias, replica_grouping, group_axis)
        if scale_metric not in get_args(ScaleMetric):
            raise ValueError(f"LinearFP8: `scale_metric` is {scale_metric!r}; expected one of {get_args(ScaleMetric)}.")
        if not min_scaling_bias <= scale <= max_scaling_bias:
            raise ValueError(f"LinearFP8: `scale` is {scale}; expected a power of two from -31 to 31.")
        self.scale_metric = scale_metric
        self.scale = scale

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (..., in) to (..., out_features)."""
        weight = self._weight(x)
        x8 = _Float8.quantize(x, self._scale(x, popxl.float8_143), popxl.float8_143)
        weight8 = _Float8.quantize(weight, self._scale(weight, popxl.float8_143), popxl.float8_143)
        self.aux["x"], self.aux["x_scale"] = x8
        self.aux["weight"], self.aux["weight_scale"] = weight8
        return self._with_bias(_matmul(x8.value, weight8.value, x.dtype))

    def build_grad(self, dLdy: popxl.Tensor) -> popxl.Tensor:
        """Gradient of `x`; variable gradients go to `var_grad`."""
        x8 = _Float8(self.aux["x"], self.aux["x_scale"])
        weight8 = _Float8(self.aux["weight"], self.aux["weight_scale"])
        scale = self._scale(dLdy, popxl.float8_152) - _GRADIENT_MARGIN
        scale = ops.clip(scale, min_scaling_bias, max_scaling_bias)
        gradient = _Float8.quantize(dLdy, scale, popxl.float8_152).value
        self.var_grad["weight"] = _matmul(_rows(x8.value).T, _rows(gradient), dLdy.dtype)
        if self.bias:
            self.var_grad["bias"] = ops.sum(_rows(dLdy), axis=0)
        return _matmul(gradient, weight8.value.T, dLdy.dtype)

    def _scale(self, t: popxl.Tensor, dtype: popxl.dtype) -> popxl.Tensor:
        if self.scale_metric == "manual_scale":
            return popxl.constant(self.scale, popxl.int32)
        return (fp8_amax_scale if self.scale_metric == "amax" else fp8_mse_scale)(t, dtype)


class _Float8(NamedTuple):
    """A float8 tensor with its power-of-two scale."""

    scaled: popxl.Tensor
    log2_scale: popxl.Tensor

    @staticmethod
    def quantize(t: popxl.Tensor, log2_scale: popxl.Tensor, dtype: popxl.dtype) -> _Float8:
        return _Float8(ops.pow2scale_cast_to_fp8(t, log2_scale, dtype), log2_scale)

    @property
    def value(self) -> popxl.Tensor:
        """Float32 value without scale."""
        return ops.pow2scale_cast_from_fp8(self.scaled, -self.log2_scale, popxl.float32)


def _matmul(lhs: popxl.Tensor, rhs: popxl.Tensor, dtype: popxl.dtype) -> popxl.Tensor:
    """Product of float8 values, exact at any machine's lowest precision.

    `ops.matmul_pow2scaled` takes one scale, which the sum of two can exceed: zeros and small gradients have large ones.
    """
    return ops.matmul(lhs, rhs, output_type=dtype, partials_type=popxl.float16)


def _rows(t: popxl.Tensor) -> popxl.Tensor:
    """Flatten all axes except the last."""
    return t if t.rank == 2 else t.reshape((-1, t.shape[-1]))
