"""Ops that update a tensor in place: accumulators, and copies into variables."""

from popxl.ops.var_updates.accumulate import accumulate_
from popxl.ops.var_updates.copy_var_update import copy_var_update_

__all__ = ["accumulate_", "copy_var_update_"]
