"""Modules of PyTorch that look at the numbers in tensors, or at their dtypes, made not to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def averaging() -> AbstractContextManager[None]:
    """Have batch norms without a momentum average over all batches with one that is a tensor.

    It is one over the number of batches, which they would read: `momentum=None` stands for the plain average.
    """
    changed: set[int] = set()

    def before(module: torch.nn.Module) -> None:
        if isinstance(module, _BatchNorm) and module.momentum is None and module.num_batches_tracked is not None:
            changed.add(id(module))
            module.momentum = torch.reciprocal((module.num_batches_tracked + 1).float())  # type: ignore[assignment]

    def after(module: Any) -> None:
        if id(module) in changed:
            changed.remove(id(module))
            module.momentum = None

    return _around_forward(before, after)


def recurrent_in_any_dtype() -> AbstractContextManager[None]:
    """Have recurrent modules take an input of another dtype than their weights': the functions that they call do."""

    def before(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.RNNBase):
            check, dtype = module.check_input, module.weight_ih_l0.dtype
            vars(module)["check_input"] = lambda input, batch_sizes: check(input.to(dtype), batch_sizes)

    def after(module: torch.nn.Module) -> None:
        vars(module).pop("check_input", None)

    return _around_forward(before, after)


@contextmanager
def _around_forward(
    before: Callable[[torch.nn.Module], None], after: Callable[[torch.nn.Module], None]
) -> Iterator[None]:
    """Have all modules do something before their `forward`, and after it whatever has happened."""
    handles = (
        register_module_forward_pre_hook(lambda module, args: before(module)),
        register_module_forward_hook(lambda module, args, result: after(module), always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
