"""Losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import popxl
from popxl import ops
from poptorch.lowering.operands import promoted
from poptorch.lowering.registry import jax_op, lowers


def reduced(losses: popxl.Tensor, reduction: str) -> popxl.Tensor:
    """The losses of all elements, as one."""
    return {"mean": ops.mean, "sum": ops.sum, "none": lambda t: t}[reduction](losses)


@lowers("torch.mse_loss")
def mse_loss(input: popxl.Tensor, target: popxl.Tensor, reduction: str = "mean", **deprecated: Any) -> popxl.Tensor:
    difference = ops.sub(*promoted(input, target))
    return reduced(difference * difference, reduction)


@lowers("poptorch.identity_loss")
def identity_loss(x: popxl.Tensor, reduction: str) -> popxl.Tensor:
    return ops.identity(x) if reduction == "none" else reduced(x, reduction)
