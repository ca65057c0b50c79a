"""`TensorStorage`, `TensorView`: storages and tensors of a capture, with their current values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from poptorch.capture.gradient_flow import record_gradient
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.trace import Value, View


@dataclass(eq=False)
class TensorStorage:
    """A storage.

    Attributes:
        base: tensor of all of it, which is kept alive.
        layout: layout of the base.
        value: current value.
        blocks_grad: whether gradients stop at a view of it that needs none, according to PyTorch.
        version: number of writes.
        pending: values of views for which `record_gradient` is pending, with its arguments.
    """

    base: torch.Tensor
    layout: TensorLayout
    value: Value
    blocks_grad: bool = True
    version: int = 0
    pending: list[tuple[Value, torch.Tensor, bool]] = field(default_factory=list)

    def resolve_requires_grad(self) -> None:
        """Record the gradient flow of pending values."""
        for value, t, blocks_grad in self.pending:
            record_gradient(value, t, blocks_grad)
        self.pending.clear()


@dataclass(eq=False)
class TensorView:
    """A tensor of the model.

    Attributes:
        tensor: the tensor, which is kept alive.
        storage: its storage.
        lens: views that lead from the storage's base to it.
        value: its value at its last read.
        version: version of the storage at that read.
        is_frozen: whether gradients of its uses stop at it, after `t.requires_grad_(False)`.
    """

    tensor: torch.Tensor
    storage: TensorStorage
    lens: tuple[View, ...]
    value: Value
    version: int
    is_frozen: bool = False
