"""Functions of PyTorch that a capture runs as others: those made for kernels of their own, written with plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention

__all__ = ["COMPOSED"]


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention whose scores a function of the user's changes, and another one leaves out.

    They are written for one score at one place, and are called once for all, with places that broadcast. Blocks only
    say which scores a kernel need not compute.

    Returns:
        The result; then, of each row of scores, logarithm of the sum of exponentials, and maximum, both to the base 2.
    """
    rows, heads = query.shape[:2]
    key, value = (t.repeat_interleave(heads // t.shape[1], 1).expand(rows, -1, -1, -1) for t in (key, value))
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    places = [torch.arange(n).reshape(-1, *[1] * (3 - dim)) for dim, n in enumerate(scores.shape)]
    changed = score_mod(scores, *places, *score_mod_other_buffers)
    seen = block_mask[-1](*places, *mask_mod_other_buffers)
    changed = torch.where(seen, changed, -math.inf)
    highest = changed.amax(-1, keepdim=True)
    is_empty = highest == -math.inf  # such a row gives zeros
    shares = torch.where(is_empty, 0.0, torch.where(is_empty, 0.0, changed).softmax(-1))
    lse = torch.where(is_empty[..., 0], -math.inf, torch.where(is_empty, 0.0, changed).logsumexp(-1))
    result = shares.to(query.dtype) @ value.to(query.dtype)
    return result, lse / math.log(2), highest[..., 0] / math.log(2)


def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed sequence as one with rows of one length, and their lengths. How many rows each step has is looked at."""
    sizes = batch_sizes.tolist()
    steps = [
        torch.nn.functional.pad(step, (*[0] * (2 * step.dim() - 1), sizes[0] - len(step)), value=padding_value)
        for step in data.split(sizes)
    ]
    steps += [torch.full_like(steps[0], padding_value)] * max(0, total_length - len(sizes))
    return torch.stack(steps, int(batch_first)), torch.tensor([sum(n > i for n in sizes) for i in range(sizes[0])])


COMPOSED: Mapping[Any, Callable[..., Any]] = {
    flex_attention: _flex_attention,
    torch._VF._pad_packed_sequence: _pad_packed_sequence,
}
"""What to run in place of a function, with the same arguments."""
