"""Ops that arrange numbers in another way, views, and writing through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, whole


def _writing(name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> Row:
    """Overwriting what a view sees; the tensor, the view, and what was read of it before."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        base = x * 1
        before = base.sum(0)
        seen = view(base)
        seen.mul_(2).add_(y)
        return base, seen, before

    return Row(f"writing through {name}", function, (_cube, normal(1)), half=False)


def _mixed_writing(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 1
    y[:, 1] = 0
    z = y.t()
    z[2] *= 2
    y[0, ::2] += x[1, ::2]
    return x, y, z


def _writing_in_chains(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    base = x * 1
    a = base[1:]
    b = a.t()
    b[0].copy_(y[0, :2])
    a.mul_(2)
    b[1] -= 1
    base.t()[1:, ::2].diagonal()[0] = 7
    base.as_strided((3,), (4,), 0).mul_(3)
    base[:, [0, 2]] = y[:, :2]
    return base, a, b


def _writing_in_parts(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    base = x.detach().clone()
    with torch.no_grad():  # with gradients PyTorch does not allow it
        left, right = base.split(2, 1)
        right.mul_(2)
        left.add_(right)
        base.unbind(0)[1].zero_()
        base.chunk(2)[1].sub_(1)
    return base * y, left, right


def _writing_on_inputs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:, 0] = y[0]
    y.t()[1].add_(x[0, 0])
    return x * y


def _writing_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(3, 2)
    for i in range(3):
        rows[i] = x[i] + rows[i - 1]
    return rows


def _moved(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 1
    seen = y[0]
    y.transpose_(0, 1).unsqueeze_(1)
    y[1] = 5
    return y, seen, y.squeeze_(1).t_()


def _memory(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What strides mean depends on how a tensor lies in memory."""
    return (
        x.t().as_strided((2, 2), (1, 2)),
        (x.t() * 2).as_strided((3,), (2,), 1),
        x[1:].as_strided((3,), (1,)),
        x.as_strided((3, 2), (1, 3)),
        x.as_strided((2, 4), (0, 1)),
    )


def _data(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 1
    y.data[0] = 3
    return y, y.data


def _gradient_flags(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors through which gradients flow only from some op on."""
    a = x * 2
    b = a * 3
    a.detach_()
    with torch.no_grad():
        c = x * 2
    d = c[0] * 5
    c[1].mul_(y[0])
    return b + y * a, c, d


_CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda t: t[1:],
    "slice with a step": lambda t: t[:, 1::2],
    "slices": lambda t: t[:2, 1:4, ::3],
    "select": lambda t: t[-1],
    "select, slice": lambda t: t[:, 2, 1:],
    "view": lambda t: t.view(4, -1),
    "flatten, slice": lambda t: t.view(-1)[3:20:4],
    "unsqueeze, squeeze": lambda t: t[None].squeeze(0)[..., None],
    "squeeze all": lambda t: t[:1].squeeze(),
    "transpose": lambda t: t.transpose(0, 2),
    "permute, select": lambda t: t.permute(2, 0, 1)[1],
    "T, slice": lambda t: t[0].T[1:, ::2],
    "diagonal": lambda t: t.diagonal(),
    "diagonal, offset": lambda t: t.diagonal(-1, 1, 2)[1:],
    "unfold": lambda t: t.unfold(2, 2, 2),
    "unfold, gaps": lambda t: t.unfold(1, 2, 3),
    "movedim, flip of axes": lambda t: t.movedim(0, -1).swapaxes(0, 1)[::2],
    "as_strided": lambda t: t.as_strided((3, 2), (2, 30), 5),
    "narrow": lambda t: t.narrow(1, 1, 2),
    "expand that repeats nothing": lambda t: t.expand(1, -1, -1, -1)[0, 1],
    "empty": lambda t: t[:, :0],
    "unflatten, select": lambda t: t.unflatten(1, (2, 2))[:, 0],
}


def _padded(mode: str) -> Row:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return F.pad(x, (2, 1), mode), F.pad(y, (1, 2, 2, 1), mode), F.pad(z, (1, 0, 2, 1, 0, 2), mode)

    return Row(f"pad, {mode}", function, (normal(2, 3, 4), normal(2, 1, 3, 4), normal(1, 2, 3, 4, 2)))


_small = normal(2, 3)
_cube = normal(3, 4, 5)

ROWS = [
    Row(
        "view, reshape, flatten, unflatten",
        lambda x: (x.view(3, -1), x.t().reshape(6), x.flatten(), x.view(-1).unflatten(0, (3, 2)), x.ravel()),
        (_small,),
    ),
    Row("view as another dtype", lambda x: x.view(torch.int32), (_small,), half=False),
    Row(
        "bits of numbers, of other sizes",
        lambda x, y: (x.view(torch.uint8), x.view(torch.int16), y.view(torch.float32), y.view(torch.int16)),
        (_small, whole(3, 8, high=60).to(torch.uint8)),
        half=False,
        gradient=False,
    ),
    Row("reshape of one number", lambda x: (x.view(1, 1), x.reshape(()), x[None]), (normal(1)[0],)),
    Row(
        "squeeze, unsqueeze",
        lambda x: (x.squeeze(), x.squeeze(1), x.squeeze((0, 1)), x[0].unsqueeze(-1)),
        (normal(2, 1, 3),),
    ),
    Row(
        "transpose",
        lambda x: (x.transpose(0, -1), x.mT, x.swapaxes(1, 2), x[0].t(), x[0, 0].t(), x.movedim(0, 2), x[0].T, x[0].H),
        (_cube,),
    ),
    Row("permute", lambda x: (x.permute(2, 0, 1), x.permute(-1, 1, 0)), (_cube,)),
    Row(
        "expand",
        lambda x: (
            x.expand(2, -1, 3),
            torch.broadcast_to(x, (4, 2)),
            x.expand_as(x),
            torch.broadcast_tensors(x, x.t()),
        ),
        (normal(4, 1),),
    ),
    Row("select, slice", lambda x: (x[:, -1], x[1:, ::2], x.narrow(1, 1, 2), x[..., 1:2, 1], x[:, :0]), (_cube,)),
    Row(
        "split",
        lambda x: (
            x.split(2, 1),
            x.split([1, 3], 1),
            x.chunk(3, -1),
            x.unbind(1),
            x.tensor_split(3, 2),
            x.tensor_split(torch.tensor([1]), 1),
        ),
        (_cube,),
    ),
    Row(
        "splits by name",
        lambda x: (x.hsplit(2), x.vsplit([1]), x.dsplit([1, 3]), torch.unsafe_chunk(x, 2, 1)),
        (_cube,),
    ),
    Row(
        "cat",
        lambda x, y: (torch.cat([x, y], 1), torch.cat([x, x.int()]), torch.cat([torch.empty(0), x])),
        (normal(2, 3), normal(2, 1)),
    ),
    Row(
        "stack",
        lambda x, y: (
            torch.stack([x, y]),
            torch.stack([x, y, x], -1),
            torch.hstack([x, y]),
            torch.vstack([x, y]),
            torch.dstack([x, y]),
        ),
        (normal(2, 3), normal(2, 3, seed=1)),
    ),
    Row(
        "joining in columns",
        lambda x, y: (torch.column_stack([x, y]), torch.block_diag(x, y)),
        (normal(2, 3), normal(2)),
    ),
    Row("repeat", lambda x: (x.repeat(2, 1), x.repeat(2, 1, 3), x.tile((2,)), x.repeat_interleave(2, 1)), (_small,)),
    Row("flip", lambda x: (x.flip(0, 2), x.fliplr(), x.flipud(), x.rot90(), x.rot90(-1, (0, 2))), (_cube,)),
    Row("roll", lambda x: (x.roll(4), x.roll(1, 0), x.roll((1, -2), (0, 2))), (_cube,)),
    Row("unfold", lambda x: (x.unfold(1, 2, 1), x.unfold(2, 2, 2), x.unfold(-1, 3, 1)), (_cube,)),
    Row("diagonal", lambda x: (x.diagonal(), x.diagonal(1, 0, 2), x[0].diag(), x[0].diag(-1), x[0].trace()), (_cube,)),
    Row("diag_embed", lambda x: (x.diag_embed(), x.diag_embed(1, 0, 2), x[0].diag(-2), torch.diagflat(x)), (_small,)),
    Row("tril, triu", lambda x: (x.tril(), x.tril(-1), x.triu(), x.triu(2), (x > 0).tril()), (_cube,)),
    Row(
        "pixels",
        lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)),
        (normal(2, 4, 2, 4),),
    ),
    Row(
        "meshgrid",
        lambda x, y: (torch.meshgrid(x, y, indexing="xy"), torch.meshgrid(x, y, indexing="ij")),
        (normal(2), normal(3)),
    ),
    Row("cartesian_prod", lambda x, y: torch.cartesian_prod(x, y), (normal(2), normal(3))),
    Row(
        "combinations",
        lambda x: (torch.combinations(x), torch.combinations(x, 3, True), torch.combinations(x, 1)),
        (normal(4),),
    ),
    Row("diff, gradient", lambda x: (x.diff(), x.diff(2, 0), torch.gradient(x, dim=1), torch.trapz(x)), (_cube,)),
    Row(
        "pad",
        lambda x: (F.pad(x, (1, 2)), F.pad(x, (-1, 1, 2, 0), value=3.0), torch.constant_pad_nd(x, (0, 0, 1, 1))),
        (_cube,),
    ),
    Row("pad of integers", lambda x: (F.pad(x, (1, 2), value=7), F.pad(x > 2, (1, 0))), (whole(2, 3),), half=False),
    *map(_padded, ("reflect", "replicate", "circular")),
    Row(
        "pad, cropped",
        lambda x: (F.pad(x, (2, -1), "reflect"), F.pad(x, (-1, 2), "replicate"), F.pad(x, (-1, 2), "circular")),
        (normal(2, 3, 4),),
    ),
    Row(
        "pads of modules",
        torch.nn.Sequential(torch.nn.ReflectionPad2d(1), torch.nn.ZeroPad2d((1, 0, 0, 2))),
        (normal(1, 2, 3),),
    ),
    Row(
        "copies of views",
        lambda x: (
            torch.select_copy(x, 0, 1),
            x.narrow_copy(1, 1, 2),
            torch.squeeze_copy(x),
            torch.permute_copy(x, (1, 0)),
        ),
        (_small,),
    ),
    Row("as_strided", _memory, (_small,)),
    Row("contiguous", lambda x: (x.t().contiguous().view(-1), x.t().contiguous().as_strided((2,), (1,), 1)), (_small,)),
    Row(
        "updates of copies",
        lambda x, y: (
            torch.slice_scatter(x, y[:1], 0, 1, 2),
            torch.slice_scatter(x, y[:, ::2], 1, 0, 3, 2),
            torch.select_scatter(x, y[0], 0, 1),
            torch.diagonal_scatter(x, y[0, :2], 1),
        ),
        (normal(2, 3), normal(2, 3, seed=1)),
    ),
    Row(  # PyTorch's gradient is that of the overwritten numbers
        "as_strided_scatter",
        lambda x, y: torch.as_strided_scatter(x, y, (3,), (2,), 1),
        (normal(2, 3), normal(3)),
        gradient=False,
    ),
    Row("fill_diagonal_", lambda x: (x * 1).fill_diagonal_(2), (_small,)),
    *(_writing(name, view) for name, view in _CHAINS.items()),
    Row("writing through several views", _mixed_writing, (_small,)),
    Row("writing in chains of views", _writing_in_chains, (normal(3, 4), normal(3, 4, seed=1)), half=False),
    Row("writing in parts", _writing_in_parts, (normal(3, 4), normal(3, 4, seed=1)), half=False),
    Row("writing on inputs", _writing_on_inputs, (normal(3, 2), normal(3, 2, seed=1))),
    Row("writing in a loop", _writing_in_a_loop, (normal(3, 2),), half=False),  # the rows are float32
    Row("views that are moved", _moved, (_small,)),
    Row("writing on data", _data, (_small,)),
    Row("gradients that begin and end", _gradient_flags, (_small, normal(2, 3, seed=1))),
    Row("constants", lambda x: x * torch.tensor([1.0, 2, 3]), (_small,)),
]
