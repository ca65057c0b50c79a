"""Learning rates that change from step to step, computed in the program without feeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import popxl
from popxl import ops

__all__ = ["Schedule", "cosine", "inverse_square_root", "linear"]

Schedule = Callable[[popxl.Tensor], popxl.Tensor]
"""Learning rate schedule: function of the step number, a float32 scalar tensor that is 1 in the first step, to a
float32 scalar tensor."""


def cosine(peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Up to `peak` in a line over the first `warmup` steps, then down to `end` along half a cosine wave.

    Args:
        peak: the largest learning rate, which the last step of the warm-up has.
        steps: number of steps, including the warm-up. After them the rate stays at `end`.
        warmup: number of steps of the warm-up.
        end: the rate of the last step.

    Raises:
        ValueError: if `warmup` is negative, or not less than `steps`.

    Example:
        >>> schedule = cosine(3e-4, steps=1000, warmup=100)
        >>> with popxl.Ir().main_graph:
        ...     schedule(popxl.constant(1.0)).shape
        ()
    """
    _check("cosine", steps, warmup)

    def rate(step: popxl.Tensor) -> popxl.Tensor:
        wave = (ops.cos(_progress(step, steps, warmup) * math.pi) + 1.0) * 0.5
        return _warmed_up(step, wave * (peak - end) + end, peak, warmup)

    return rate


def linear(peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Schedule like `cosine`, with a linear decay.

    Example:
        >>> schedule = linear(3e-4, steps=1000, warmup=100)
    """
    _check("linear", steps, warmup)

    def rate(step: popxl.Tensor) -> popxl.Tensor:
        return _warmed_up(step, _progress(step, steps, warmup) * (end - peak) + peak, peak, warmup)

    return rate


def inverse_square_root(peak: float, warmup: int) -> Schedule:
    """Up to `peak` in a line over the first `warmup` steps, then down with the square root of the step's number.

    Raises:
        ValueError: if `warmup` is less than 1.

    Example:
        >>> schedule = inverse_square_root(1e-3, warmup=100)
    """
    if warmup < 1:
        raise ValueError(f"inverse_square_root: `warmup` is {warmup}; expected 1 step or more.")
    return lambda step: _warmed_up(step, ops.rsqrt(step / warmup) * peak, peak, warmup)


def _check(name: str, steps: int, warmup: int) -> None:
    if not 0 <= warmup < steps:
        raise ValueError(f"{name}: `warmup` is {warmup}, of {steps} steps; expected 0 or more, and less than all.")


def _progress(step: popxl.Tensor, steps: int, warmup: int) -> popxl.Tensor:
    """Fraction of post-warm-up steps completed, from 0 to 1."""
    return ops.clip((step - warmup) / (steps - warmup), 0.0, 1.0)


def _warmed_up(step: popxl.Tensor, rate: popxl.Tensor, peak: float, warmup: int) -> popxl.Tensor:
    return rate if not warmup else ops.where(step < warmup, step * (peak / warmup), rate)
