"""A scale for float8 with the least mean square error."""

from popxl_addons.ops.fp8_mse_scale.fp8_mse_scale import (
    CandidateConfig,
    fp8_mse_scale,
    max_scaling_bias,
    min_scaling_bias,
)

__all__ = ["CandidateConfig", "fp8_mse_scale", "max_scaling_bias", "min_scaling_bias"]
