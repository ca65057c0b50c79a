"""Storages and tensors of a capture, with their current values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from poptorch.capture.gradient_flow import record_gradient
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.trace import Value, View


@dataclass(eq=False)
class TensorStorage:
    """A storage: current value, layout of its base tensor, which it keeps alive, and a version count."""

    base: torch.Tensor
    layout: TensorLayout
    value: Value
    blocks_grad: bool = True
    """Whether PyTorch knows of a tensor that looks at it, and needs no gradient, that none flow through it."""
    version: int = 0
    unsettled: list[tuple[Value, torch.Tensor, bool]] = field(default_factory=list)
    """Values of tensors that look at it, of which it is not known yet whether gradients flow through them."""

    def resolve_requires_grad(self) -> None:
        """Record gradient flow of unsettled values."""
        for value, t, blocks_grad in self.unsettled:
            record_gradient(value, t, blocks_grad)
        self.unsettled.clear()


@dataclass(eq=False)
class TensorView:
    """A tensor: its storage, views into this storage, and the value at its last read."""

    tensor: torch.Tensor
    storage: TensorStorage
    lens: tuple[View, ...]
    value: Value
    version: int
    is_frozen: bool = False
    """Whether gradients from its uses stop here for now: `t.requires_grad_(False)`."""
