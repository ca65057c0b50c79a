"""Joint planning of matrix products and those of their gradients, in `popxl_addons.no_effect`."""

from popxl_addons.no_effect import disable_fc_pass, enable_fc_pass

__all__ = ["disable_fc_pass", "enable_fc_pass"]
