"""Cross entropy over classes that are divided among the IPUs of one replica."""

from popxl_addons.ops.cross_entropy_sharded_wr_loss.cross_entropy_sharded_wr_loss import cross_entropy_sharded_wr_loss

__all__ = ["cross_entropy_sharded_wr_loss"]
