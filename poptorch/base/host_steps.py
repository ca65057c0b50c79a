"""CPU implementations of optimiser steps that torch lacks.

The formulas are those of `poptorch.program.formulas`, written again on purpose: these compute with torch, in the dtype
of a parameter, those with JAX, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Group = Mapping[str, Any]
State = dict[str, Any]
Step = Callable[[torch.Tensor, torch.Tensor, Group, State], None]


@torch.no_grad()
def step_of_each(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None, step: Step) -> float | None:
    """Step every parameter with a gradient, after the closure; returns the closure's result."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                step(parameter, parameter.grad, group, optimizer.state[parameter])
    return loss


def rmsprop_of_tensorflow(w: torch.Tensor, g: torch.Tensor, group: Group, state: State) -> None:
    """Update `w` as TensorFlow's RMSprop does, by its gradient `g`."""
    starts = {"step": 0, "square_avg": torch.ones_like(w), "grad_avg": torch.zeros_like(w)}
    for name, start in {**starts, "momentum_buffer": torch.zeros_like(w)}.items():
        state.setdefault(name, start)  # a device omits state that no hyperparameter needs
    state["step"] += 1
    d = (-g if group["maximize"] else g) + group["weight_decay"] * w
    variance = state["square_avg"].lerp_(d * d, 1 - group["alpha"])
    if group["centered"]:
        mean = state["grad_avg"].lerp_(d, 1 - group["alpha"])
        variance = (variance - mean * mean).clamp(min=0)
    q = group["lr"] * d / (variance + group["eps"]).sqrt()
    w -= state["momentum_buffer"].mul_(group["momentum"]).add_(q)


def lamb(w: torch.Tensor, g: torch.Tensor, group: Group, state: State, bias_correction: bool) -> None:
    """Update `w` as LAMB does, by its gradient `g`."""
    g = -g if group.get("maximize") else g
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
    state["step"] += 1
    corrections = (1.0, 1.0)
    for beta, name, value in zip(group["betas"], ("exp_avg", "exp_avg_sq"), (g, g * g), strict=True):
        state[name].lerp_(value, 1 - beta)
    if bias_correction:
        corrections = tuple(1 - beta ** state["step"] for beta in group["betas"])
    first, second = state["exp_avg"] / corrections[0], state["exp_avg_sq"] / corrections[1]
    x = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * w
    norm, length = w.norm().clamp(max=group["max_weight_norm"]), x.norm()
    ratio = norm / length if norm > 0 and length > 0 else 1.0
    w -= group["lr"] * ratio * x
