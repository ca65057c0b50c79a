"""Optimisers: graphs that update one variable in place."""

from popxl_addons.optimizers.adam import AdamOptimizerStep

__all__ = ["AdamOptimizerStep"]
