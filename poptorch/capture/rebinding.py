"""`not_rebound`: parameters and buffers stay the objects that they are while `forward` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from poptorch.base.patching import patched, restoring
from poptorch.errors import createPoptorchError

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


@dataclass(frozen=True)
class _Holder:
    """A module's dictionary of parameters or buffers.

    Attributes:
        kind: `"Parameter"` or `"Buffer"`.
        prefix: module path, before the name of a tensor.
        is_exempt: whether its tensors may be replaced.
        tensors: the dictionary.
        contents: its contents before `forward`.
    """

    kind: str
    prefix: str
    is_exempt: bool
    tensors: dict[str, Any]
    contents: dict[str, Any]

    def check(
        self, moved: Mapping[tuple[int, str], torch.Tensor], is_made: Callable[[str, torch.Tensor], bool]
    ) -> None:
        """Check that all tensors are in place, or converted; arguments: see `_moving` and `not_rebound`."""
        for name, tensor in self.contents.items():
            now = self.tensors.get(name)
            if self.is_exempt or now is moved.get((id(self.tensors), name), tensor):
                continue
            if self.kind == "Parameter" or now is None or not is_made(self.prefix + name, now):
                raise _rebound(self.kind, self.prefix + name, name in self.tensors, tensor is None)


@contextmanager
def not_rebound(
    module: torch.nn.Module, is_made: Callable[[str, torch.Tensor], bool] = lambda name, t: False
) -> Iterator[None]:
    """Check that a block leaves every parameter and buffer in place, and restore them in any case.

    New ones are removed. Batch norms are exempt. A conversion of a module (`self.layer.half()`) lasts for the rest of
    the block.

    Args:
        module: the module whose `forward` runs in the block.
        is_made: whether a buffer of this name may become this tensor: a table that is recomputed for another shape.

    Raises:
        Error: if a parameter or buffer is reassigned or removed, after the block; or if there is a new parameter,
            directly or in a new module, that is another object in each run.

    Example:
        >>> module = torch.nn.Linear(2, 3)
        >>> with not_rebound(module):
        ...     y = module(torch.ones(2))
    """
    modules = {each: path for path, each in torch.nn.Module.named_modules(module)}
    holders = [
        _Holder(kind, f"{path}." if path else "", isinstance(each, _BATCH_NORMS), tensors, dict(tensors))
        for each, path in modules.items()
        for kind, tensors in (("Parameter", each._parameters), ("Buffer", each._buffers))
    ]
    with restoring(*(holder.tensors for holder in holders), *(each._modules for each in modules)):
        with _moving() as moved:
            yield
        for holder in holders:
            holder.check(moved, is_made)
        known = {holder.prefix + name for holder in holders for name in holder.contents}
        for name, t in torch.nn.Module.named_parameters(module):
            if name not in known and not is_made(name, t):
                raise _made_late("Parameter", name, "not there")


@contextmanager
def _moving() -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Make `Module.to` and similar methods replace parameters and buffers by converted tensors within a block.

    PyTorch changes them where they are, which tensors without numbers cannot do. Gives those that were replaced, by
    the dictionary that holds them and their name.
    """
    moved: dict[tuple[int, str], torch.Tensor] = {}

    def replace(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and (other := function(tensor)) is not tensor:
                    tensors[name] = moved[id(tensors), name] = other
        return module

    with patched(torch.nn.Module, _apply=replace):
        yield moved


def _made_late(kind: str, name: str, before: str) -> Exception:
    return createPoptorchError(
        f"{kind} {name} is {before}, and is made within the model when running forward, of what another run brings "
        "anew. What a device keeps from run to run has to be there before: make it in `__init__`."
    )


def _rebound(kind: str, name: str, is_there: bool, was_none: bool) -> Exception:
    if was_none:
        return _made_late(kind, name, "None")
    if is_there:
        return createPoptorchError(
            f"{kind} {name} is reassigned within the model when calling the forward method. This is not supported. "
            f"Consider using self.{name}.copy_(src) to copy data from a source tensor, where src is the name of the "
            "source tensor."
        )
    return createPoptorchError(
        f"{kind} {name} is removed from the model when calling the forward method. This is not supported. A model "
        f"keeps its parameters and buffers; to change the numbers, use self.{name}.copy_(src)."
    )
