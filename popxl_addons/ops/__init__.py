"""Functions on tensors that popxl itself does not have. Further ones are imported from their packages."""

from popxl_addons.ops.cross_entropy import cross_entropy as cross_entropy
from popxl_addons.ops.cross_entropy import cross_entropy_with_grad
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale as fp8_amax_scale
from popxl_addons.ops.ring_attention import ring_attention as ring_attention
from popxl_addons.ops.rotary_positions import rotary_positions as rotary_positions
from popxl_addons.ops.sampling import sample_token
from popxl_addons.ops.streams import host_load, host_store

__all__ = [
    "cross_entropy",
    "cross_entropy_with_grad",
    "fp8_amax_scale",
    "host_load",
    "host_store",
    "ring_attention",
    "rotary_positions",
    "sample_token",
]
