"""Casts of `torch.autocast` for functions that are recorded as one op."""

from __future__ import annotations

import torch

NARROWED = frozenset({"torch.linear", "torch.matmul", "torch.scaled_dot_product_attention"})
"""Preserved functions that `torch.autocast` computes in the narrower type."""


def autocast_dtype() -> torch.dtype | None:
    """Dtype in which `torch.autocast` computes products; `None` if autocast is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def narrowed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor as `torch.autocast` casts operands of products."""
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t
