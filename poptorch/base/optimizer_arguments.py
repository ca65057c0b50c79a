"""Arguments of optimisers: those of torch alone, constants of a program, and checks of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from poptorch.base.logging_ import logger

TORCH_ONLY = ("capturable", "differentiable", "foreach", "fused")
"""Attributes that only torch's own steps know."""

ACCUM_TYPES = (
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
)

FIXED = {
    "amsgrad",
    "bias_correction",
    "centered",
    "decoupled_weight_decay",
    "initial_accumulator_value",
    "maximize",
    "use_combined_accum",
    "use_tf_variant",
}
"""Hyperparameters that determine the form of a program, or the initial state."""

NEVER_VARIABLE = {*TORCH_ONLY, *ACCUM_TYPES, *FIXED}
"""Arguments that are constants of the compiled program."""


def check_hyperparameters(name: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check hyperparameters at construction."""
    for attribute, value in own.items():
        if attribute.endswith("accum_type") and value not in (torch.float32, torch.float16):
            raise AssertionError(f"{name}: `{attribute}` is {value!r}; expected torch.float32 or torch.float16.")
    for attribute in ("loss_scaling", "velocity_scaling"):
        if not 0 < _number(own.get(attribute, 1.0)) < math.inf:  # they are divided by
            raise ValueError(f"{name}: `{attribute}` is {own[attribute]!r}; expected a positive number.")
    for attribute in ("max_grad_norm", "max_weight_norm"):
        if not _number(own.get(attribute, 0.0)) >= 0:  # nor NaN
            raise ValueError(
                f"{name}: `{attribute}` is {own[attribute]!r}; expected 0 or more, or infinity for no limit."
            )
    if given.get("velocity_scaling", 1.0) != 1.0 and not own["use_combined_accum"]:
        logger.warning("%s: velocity_scaling has no effect without use_combined_accum=True.", name)
    if given.get("bias_correction") is False and name == "AdamW":
        logger.warning("AdamW: bias_correction=False has no effect; the moments are always corrected.")


def check_as_torch(name: str, numbers: Mapping[str, Any]) -> None:
    """Check hyperparameters as torch's classes do, for a class without counterpart in torch."""
    for attribute in ("lr", "eps", "weight_decay"):
        if not 0 <= _number(numbers[attribute]) < math.inf:
            raise ValueError(f"{name}: `{attribute}` is {numbers[attribute]!r}; expected a number, 0 or more.")
    betas = numbers["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= _number(beta) < 1 for beta in betas):
        raise ValueError(f"{name}: `betas` is {betas!r}; expected two numbers from 0 to below 1.")


def _number(value: Any) -> float:
    """Number from a tensor or scalar; NaN for other objects."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
