"""Replacements, written with plain ops, for PyTorch functions that have specialised kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils import _pytree as pytree

from poptorch.capture.tensor_layout import overlaps, update_passes
from poptorch.capture.torch_private import without_modes


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
    """Attention with user functions that modify and mask scores.

    They are written for one score at one place, and are called once for all, with places that broadcast. Blocks only
    say which scores a kernel need not compute.

    Returns:
        The result; then, of each row of scores, logarithm of the sum of exponentials, and maximum, both to the base 2.
    """
    rows, heads = query.shape[:2]
    key, value = (t.repeat_interleave(heads // t.shape[1], 1).expand(rows, -1, -1, -1) for t in (key, value))
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    positions = [torch.arange(n).reshape(-1, *[1] * (3 - dim)) for dim, n in enumerate(scores.shape)]
    changed = score_mod(scores, *positions, *score_mod_other_buffers)
    is_visible = block_mask[-1](*positions, *mask_mod_other_buffers)
    changed = torch.where(is_visible, changed, -math.inf)
    highest = changed.amax(-1, keepdim=True)
    is_empty = highest == -math.inf  # such a row gives zeros
    shares = torch.where(is_empty, 0.0, torch.where(is_empty, 0.0, changed).softmax(-1))
    lse = torch.where(is_empty[..., 0], -math.inf, torch.where(is_empty, 0.0, changed).logsumexp(-1))
    result = shares.to(query.dtype) @ value.to(query.dtype)
    return result, lse / math.log(2), highest[..., 0] / math.log(2)


def _pack_padded_sequence(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows of padded sequences, and the batch size per time step. The lengths are read."""
    by_step = input.transpose(0, 1) if batch_first else input
    known_lengths = lengths.tolist()
    with without_modes():
        positions = torch.arange(by_step.shape[:2].numel()).reshape(*by_step.shape[:2], 1)
        packed_places, sizes = torch.ops.aten._pack_padded_sequence(positions, torch.tensor(known_lengths), False)
    rows = by_step.flatten(0, 1)
    return rows[torch.tensor(packed_places.flatten().tolist())], torch.tensor(sizes.tolist())


def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded form of a packed sequence, and its sequence lengths. The batch sizes are read."""
    sizes = batch_sizes.tolist()
    steps = [
        torch.nn.functional.pad(step, (*[0] * (2 * step.dim() - 1), sizes[0] - len(step)), value=padding_value)
        for step in data.split(sizes)
    ]
    steps += [torch.full_like(steps[0], padding_value)] * max(0, total_length - len(sizes))
    return torch.stack(steps, int(batch_first)), torch.tensor([sum(n > i for n in sizes) for i in range(sizes[0])])


def packed(function: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Recurrent function, such as `torch.lstm`, for packed sequences, whose batch size shrinks over time steps.

    It is run for each block of steps that have equally many, with the states that the block before has left.
    """

    def run(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: torch.Tensor | tuple[torch.Tensor, ...],
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        blocks = [(len(list(steps)), rows) for rows, steps in groupby(batch_sizes.tolist())]
        begin: Sequence[torch.Tensor] = hx if isinstance(hx, tuple | list) else [hx]
        count = num_layers * (1 + bidirectional)
        of_each = len(params) // count

        def run_direction(x: torch.Tensor, number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
            """Run one layer in one direction; returns its outputs and final states."""
            own, is_backward = params[number * of_each : (number + 1) * of_each], bidirectional and number % 2
            first = [state[number : number + 1] for state in begin]
            now, outputs = first, list[torch.Tensor]()
            ended: list[list[torch.Tensor]] = [[] for _ in first]
            chunks = list(zip(blocks, x.split([steps * rows for steps, rows in blocks]), strict=True))
            for (steps, rows), chunk in reversed(chunks) if is_backward else chunks:
                if is_backward:  # rows join
                    now = [
                        torch.cat([state, start[:, state.shape[1] : rows]], 1) if outputs else start[:, :rows]
                        for state, start in zip(now, first, strict=True)
                    ]
                else:  # rows end
                    ended = [[state[:, rows:], *others] for state, others in zip(now, ended, strict=True)]
                    now = [state[:, :rows] for state in now]
                block = chunk.reshape(steps, rows, -1)
                block = block.flip(0) if is_backward else block
                states: Any = tuple(now) if len(now) > 1 else now[0]  # of an LSTM, cells too
                out, *now = function(block, states, own, has_biases, 1, 0.0, False, False, False)
                outputs.append((out.flip(0) if is_backward else out).reshape(steps * rows, -1))
            last = [torch.cat([state, *others], 1) for state, others in zip(now, ended, strict=True)]
            return torch.cat(outputs[::-1] if is_backward else outputs), last

        states: list[list[torch.Tensor]] = []
        for layer in range(num_layers):
            ways = count // num_layers
            found = [run_direction(data, number) for number in range(layer * ways, (layer + 1) * ways)]
            data = torch.cat([out for out, _ in found], -1)
            states += [state for _, state in found]
            if dropout and train and layer + 1 < num_layers:
                data = torch.nn.functional.dropout(data, dropout)
        return data, *(torch.cat(kind) for kind in zip(*states, strict=True))

    return run


_ONE_BY_ONE = 2**15
"""Number of elements up to which PyTorch updates in order; it divides larger tensors among threads."""

_MOST_PASSES = 64
"""Most passes that are unrolled. A tensor expanded further is updated once, as if all of its copies were equal."""


def sequential_update(op: torch._ops.OpOverload, t: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Sequential form of an in-place op for a self-overlapping tensor; `None` if unnecessary or too long.

    If several elements share one number, PyTorch updates it sequentially. (It does not let elementwise ops update
    expanded tensors.)
    """
    if not overlaps(t.shape, t.stride()) or t.numel() > _ONE_BY_ONE:
        return None
    if torch.Tag.pointwise in op.tags and 0 in t.stride():
        return None
    passes = update_passes(t.shape, t.stride())
    if len(passes) > _MOST_PASSES:
        return None

    def run(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for elements in passes:
            changed = op(t.clone(), *args, **kwargs)
            with without_modes():
                positions = torch.from_numpy(elements)
            t.copy_(torch.where(positions < 0, t, changed.take(positions.clamp(min=0))))
        return t

    return run


def _histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.histc`, extended to integers: models select the accelerator path, which accepts them; CPUs have no
    kernel."""
    numbers = input if input.is_floating_point() else input.float()
    counts: torch.Tensor = torch.ops.aten.histc(numbers, *args, **kwargs)
    return counts.to(input.dtype)


def _tensor_split(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """`torch.tensor_split`, whose sections or indices may be a tensor: its numbers are read."""
    args = tuple(each.tolist() if isinstance(each, torch.Tensor) else each for each in args)
    if (read := kwargs.pop("tensor_indices_or_sections", None)) is not None:
        args = (read.tolist(), *args)
    return tuple(torch.ops.aten.tensor_split(input, *args, **kwargs))


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, list | tuple) and any(isinstance(e, torch.Tensor) or _holds_tensors(e) for e in data)


def with_stacked_numbers(data: Any) -> Any:
    """Argument of `torch.tensor`: a list with numbers in tensors becomes a tensor, of the dtype that PyTorch infers."""
    if not _holds_tensors(data):
        return data
    dtypes = (e.dtype if isinstance(e, torch.Tensor) else torch.tensor(e).dtype for e in pytree.tree_leaves(data))
    dtype = reduce(torch.promote_types, dtypes)

    def stack(data: Any) -> torch.Tensor:
        if isinstance(data, list | tuple):
            return torch.stack(list(map(stack, data)))
        if not isinstance(data, torch.Tensor):
            return torch.tensor(data, dtype=dtype)
        if data.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return data.detach().reshape(()).to(dtype)

    return stack(data)


COMPOSED: Mapping[Any, Callable[..., Any]] = {
    flex_attention: _flex_attention,
    torch._VF._pack_padded_sequence: _pack_padded_sequence,
    torch._VF._pad_packed_sequence: _pad_packed_sequence,
    torch.histc: _histc,
    torch.Tensor.histc: _histc,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
}
"""Replacements of functions, called with the same arguments."""
