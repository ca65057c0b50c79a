"""Layer norm over an axis that is divided among replicas."""

from popxl_addons.ops.layer_norm_distributed.layer_norm_distributed import layer_norm_distributed

__all__ = ["layer_norm_distributed"]
