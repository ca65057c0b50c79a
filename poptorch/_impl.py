"""Underscore-prefixed names imported by packages built on PopTorch. New programs need none of them.

`poptorch._utils` and `poptorch._poplar_executor` re-export these names. Each docstring names the public equivalent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from poptorch.errors import createPoptorchError
from poptorch.run import watched, weights
from poptorch.run.executor import PoplarExecutor
from poptorch.run.hooks import Substitution, register_substitution

__all__ = [
    "PoplarExecutor",
    "combine_batch_tensors_gen",
    "createPoptorchError",
    "rewrapModelIfNecessary",
    "unwrapModelIfNecessary",
]


class _OverwriteContextManager:
    """Registry of capture-time substitutions, used by packages built on PopTorch."""

    @staticmethod
    def registerSubsitutionManager(manager: type[Substitution]) -> None:
        """Register a class instantiated for each model capture: `replace()` is called before, `restore()` after.

        Args:
            manager: the class. Several are called in the order of their registration, and restore in reverse.

        Raises:
            poptorch.Error: if it is not a class with these methods.
        """
        register_substitution(manager)


def combine_batch_tensors_gen(batches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Join batches along the first axis; `poptorch.DataLoader(..., batch_sampler=...)` does this automatically.

    Args:
        batches: tensors of each batch, in the same order.

    Returns:
        For each place in that order one tensor, as `ICustomArgParser.reconstruct` takes them.

    Example:
        >>> batches = ([torch.ones(2, 3), torch.zeros(2)] for _ in range(4))
        >>> [list(t.shape) for t in combine_batch_tensors_gen(batches)]
        [[8, 3], [8]]
    """
    rows = [[batch] if isinstance(batch, torch.Tensor) else batch for batch in batches]
    return (torch.cat(tensors) for tensors in zip(*rows, strict=True))


def unwrapModelIfNecessary(model: Any) -> Any:
    """Restore a trained module's original class, for saving. Weights are copied back from the device first.

    Saving a wrapped module directly does the same: `torch.save(module)`.

    Args:
        model: module, or its wrapper. Other models are returned unchanged.

    Returns:
        The same.
    """
    watched.suspend(_module_of(model))
    return model


def rewrapModelIfNecessary(model: Any) -> Any:
    """Re-enable lazy copying of weights from the device on reads, after `unwrapModelIfNecessary`.

    Args:
        model: module, or its wrapper. A module that is not trained is unchanged.

    Returns:
        The same.
    """
    weights.rewatch(_module_of(model))
    return model


def _module_of(model: Any) -> Any:
    return model.model if isinstance(model, PoplarExecutor) else model
