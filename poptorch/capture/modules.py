"""Modules of PyTorch that read numbers in tensors, made not to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["averaging"]


@contextmanager
def averaging() -> Iterator[None]:
    """Have batch norms without a momentum average over all batches with one that is a tensor.

    It is one over the number of batches, which they would read: `momentum=None` stands for the plain average.
    """
    changed: set[int] = set()

    def before(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, _BatchNorm) and module.momentum is None and module.num_batches_tracked is not None:
            changed.add(id(module))
            module.momentum = torch.reciprocal((module.num_batches_tracked + 1).float())  # type: ignore[assignment]

    def after(module: Any, args: Any, result: Any) -> None:
        if id(module) in changed:
            changed.remove(id(module))
            module.momentum = None

    handles = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
