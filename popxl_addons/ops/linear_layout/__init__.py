"""A copy with another layout on the device."""

from popxl_addons.no_effect import linear_layout

__all__ = ["linear_layout"]
