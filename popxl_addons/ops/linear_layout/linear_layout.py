"""A copy with another layout on the device, in `popxl_addons.no_effect`."""

from popxl_addons.no_effect import linear_layout

__all__ = ["linear_layout"]
