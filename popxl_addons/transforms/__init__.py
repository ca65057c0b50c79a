"""Graph in, graph out: what can be made from a finished graph. Each module holds one transform."""

from popxl_addons.transforms.autodiff import autodiff as autodiff

__all__ = ["autodiff"]
