"""Declarations of ops: `op` turns a function of tensors into one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from poptorch.base.leaves import Leaf
from poptorch.capture.constants import HOST_FUNCTIONS
from poptorch.capture.tracer import current

F = TypeVar("F", bound=Callable[..., Any])


Tensors = list[torch.Tensor]


def op(has_effect: bool = False) -> Callable[[F], F]:
    """Decorator that declares a function of tensors as an op, with its body as host computation."""

    def declare(function: F) -> F:
        signature = inspect.signature(function)
        name = f"poptorch.{function.__name__}"
        HOST_FUNCTIONS[name] = function

        @functools.wraps(function)
        def op(*args: Any, **kwargs: Any) -> Any:
            tracer = current()
            if tracer is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return tracer.record(name, function, bound.arguments, has_effect)

        return cast(F, op)

    return declare


def shapes_text(tensors: Iterable[torch.Tensor | Leaf]) -> str:
    return ", ".join(f"{list(t.shape)} of {t.dtype}" for t in tensors) or "nothing"


def tracked_like(result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Mark a result as differentiable if any input is: a dependency hidden from PyTorch."""
    tracked = any(t.requires_grad for t in inputs) and result.dtype.is_floating_point
    return result.requires_grad_() if tracked and not result.requires_grad else result
