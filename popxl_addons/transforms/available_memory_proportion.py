"""Proportion of memory for intermediate results of ops, in `popxl_addons.no_effect`."""

from popxl_addons.no_effect import set_available_memory_proportion_by_ipu, set_graph_available_memory_proportion_by_ipu

__all__ = ["set_available_memory_proportion_by_ipu", "set_graph_available_memory_proportion_by_ipu"]
