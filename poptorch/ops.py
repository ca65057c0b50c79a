"""The ops of poptorch that models use. On the host each computes what it does in a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from poptorch.capture.tracer import current

__all__ = ["identity_loss"]

F = TypeVar("F", bound=Callable[..., Any])


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss."""
    assert reduction in ("sum", "mean", "none"), f"identity_loss: `reduction` is {reduction!r}; expected 'sum', 'mean' or 'none'."

    def compute(x: torch.Tensor, reduction: str) -> torch.Tensor:
        return {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}[reduction](x)

    if (tracer := current()) is None:
        return compute(x, reduction)
    return cast(torch.Tensor, tracer.record("poptorch.identity_loss", compute, {"x": x, "reduction": reduction}))
