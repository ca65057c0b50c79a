"""Patches for PyTorch modules that read tensor contents or check dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def averaging() -> AbstractContextManager[None]:
    """Give batch norms without momentum a tensor-valued momentum, to average over all batches.

    It is one over the number of batches, which they would read: `momentum=None` stands for the plain average.
    """
    changed: set[int] = set()

    def enter_batch_norm(module: torch.nn.Module) -> None:
        if isinstance(module, _BatchNorm) and module.momentum is None and module.num_batches_tracked is not None:
            changed.add(id(module))
            module.momentum = torch.reciprocal((module.num_batches_tracked + 1).float())  # type: ignore[assignment]

    def exit_batch_norm(module: Any) -> None:
        if id(module) in changed:
            changed.remove(id(module))
            module.momentum = None

    return around_forward(enter_batch_norm, exit_batch_norm)


def recurrent_in_any_dtype() -> AbstractContextManager[None]:
    """Accept inputs of recurrent modules whose dtype differs from their weights, as the underlying functions do."""

    def enter_rnn(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.RNNBase):
            check, dtype = module.check_input, module.weight_ih_l0.dtype
            vars(module)["check_input"] = lambda input, batch_sizes: check(input.to(dtype), batch_sizes)

    def exit_rnn(module: torch.nn.Module) -> None:
        vars(module).pop("check_input", None)

    return around_forward(enter_rnn, exit_rnn)


@contextmanager
def around_forward(
    before: Callable[[torch.nn.Module], None], after: Callable[[torch.nn.Module], None]
) -> Iterator[None]:
    """Run callbacks before and after `forward` of every module within a block, even if `forward` raises an error."""
    handles = (
        register_module_forward_pre_hook(lambda module, args: before(module)),
        register_module_forward_hook(lambda module, args, result: after(module), always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
