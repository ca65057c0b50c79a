"""Cross entropy over classes that are divided among replicas."""

from popxl_addons.ops.cross_entropy_sharded_loss.cross_entropy_sharded_loss import (
    REDUCTION_TYPE,
    cross_entropy_sharded_loss,
)

__all__ = ["REDUCTION_TYPE", "cross_entropy_sharded_loss"]
