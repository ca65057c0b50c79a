"""Functions on tensors that popxl itself does not have, made of the ones it has."""

from popxl_addons.ops.cross_entropy import cross_entropy as cross_entropy
from popxl_addons.ops.cross_entropy import cross_entropy_with_grad
from popxl_addons.ops.streams import host_load, host_store

__all__ = ["cross_entropy", "cross_entropy_with_grad", "host_load", "host_store"]
