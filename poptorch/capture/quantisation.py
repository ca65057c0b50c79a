"""Decompositions of quantisation-aware training ops, which observe their input and simulate quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poptorch.errors import createPoptorchError

aten = torch.ops.aten

_MIN_SCALE = 6.1e-5
"""Smallest scale of a quantisation, as in PyTorch."""


def _fake_quantise(
    input: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fake quantisation with a moving-average range observer: quantised numbers, and a mask of in-range elements."""
    channels = input.shape[ch_axis] if per_row_fake_quant else 1
    if running_min.numel() != channels:
        raise createPoptorchError(
            f"An observer of {channels} channels has buffers for {running_min.numel()}: they get their size from the "
            "first data that it sees. Run the model once in PyTorch before it is wrapped."
        )
    observes, is_off = (observer_on != 0).reshape(()), (fake_quant_on == 0).reshape(())
    rows = input.detach().float().movedim(ch_axis, 0).reshape(channels, -1)
    for running, seen in ((running_min, rows.amin(1)), (running_max, rows.amax(1))):
        seen = seen.reshape(running.shape)
        average = torch.where(running.isinf(), seen, running + averaging_const * (seen - running))
        running.copy_(torch.where(observes, average, running))
    parameters = _affine_parameters(running_min, running_max, quant_min, quant_max, symmetric_quant)
    for old, new in zip((scale, zero_point), parameters, strict=True):
        old.copy_(torch.where(is_off, old, new.reshape(old.shape).to(old.dtype)))
    if not per_row_fake_quant:
        quantise = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        return quantise(input, scale, zero_point, fake_quant_on, quant_min, quant_max)
    quantised, inside = aten.fake_quantize_per_channel_affine_cachemask(
        input, scale, zero_point, ch_axis, quant_min, quant_max
    )
    return torch.where(is_off, input, quantised), inside | is_off


def _affine_parameters(
    low: torch.Tensor, high: torch.Tensor, quant_min: int, quant_max: int, is_symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Affine quantisation parameters: scale and zero point. The range is extended to represent zero exactly."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    has_both_signs = (low < 0) & (high > 0)
    if is_symmetric:
        half = (quant_max - quant_min) // 2
        step = torch.maximum(-low / (half + 1), high / half)
        low, high = torch.where(has_both_signs, -step * (half + 1), low), torch.where(has_both_signs, step * half, high)
    scale = (high - low) / (quant_max - quant_min)
    scale = torch.where((1 / scale).isinf(), 0.1, scale)
    below, above = -low / scale, high / scale
    from_below = abs(quant_min) + below < abs(quant_max) + above  # smaller numbers are rounded less
    zero_point = torch.where(from_below, quant_min + below, quant_max - above)
    if is_symmetric:
        zero_point = torch.where(has_both_signs, (quant_min + quant_max) / 2, zero_point)
    return scale.clamp(min=_MIN_SCALE), zero_point.round().clamp(quant_min, quant_max)


QUANTISATION: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._fused_moving_avg_obs_fq_helper.default: _fake_quantise,
}
"""Replacements of ops: functions of the same arguments, with the same results and in-place writes."""
