"""A copy with another layout on the device."""

from popxl_addons.ops.linear_layout.linear_layout import linear_layout

__all__ = ["linear_layout"]
