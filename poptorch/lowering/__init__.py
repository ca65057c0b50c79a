"""Convert a `Trace` to ops of popxl: one lowering per PyTorch op, in files by family."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from poptorch.lowering.emission import Emission
from poptorch.lowering.registry import has_lowering, lowerings

__all__ = ["Emission", "has_lowering", "lowerings"]

# The families declare their lowerings on import.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
