"""From a `Trace` to ops of popxl: one lowering for each op of PyTorch, in files by family."""

from __future__ import annotations

from poptorch.lowering import (  # noqa: F401  (they declare)
    activations,
    control,
    creation,
    elementwise,
    losses,
    nn,
    poptorch_ops,
    random,
    shape,
)
from poptorch.lowering.emission import Emission
from poptorch.lowering.registry import has_lowering, lowerings

__all__ = ["Emission", "has_lowering", "lowerings"]
