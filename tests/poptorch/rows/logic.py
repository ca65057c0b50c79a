"""Comparisons, truth values, bits, and choices between numbers."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal, whole
from tests.poptorch.rows.elementwise import call

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGICAL = ("logical_and", "logical_or", "logical_xor")
_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
_EXTREMES = ("maximum", "minimum", "fmax", "fmin")

_IS_OF_2_13 = torch.__version__ < (2, 15)
"""From 2.15 on, `fmax`, `fmin` and `clamp` have other gradients where numbers are equal."""

_NAN = torch.nan
_TIES = (torch.tensor([0.0, 1, 2, _NAN, 1, _NAN, -torch.inf]), torch.tensor([0.0, 2, 1, 1, _NAN, _NAN, torch.inf]))
_BOOLS = (torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False]))
_INTEGERS = (torch.tensor([5, -6, 0, 12]), torch.tensor([3, 2, 1, 0]))


def _where(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    condition = x > y
    return (
        torch.where(condition, x, y),
        torch.where(condition, x, 0.5),
        torch.where(condition, 2, y),
        torch.where(condition, 1.0, 0.0),
        x.where(condition, torch.zeros(3).to(x.dtype)),
    )


def _filled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = x > 0
    return x.masked_fill(mask, -torch.inf), x.masked_fill(mask, y.sum(0)), x.clone().masked_fill_(mask, 2)


def _clamped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.clamp(-1, 2), x.clip(min=0), torch.clamp(x, max=0.5), x.clamp(2, 1), torch.clamp_min(x, 1), x.clamp_max(1)


def _operators(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x.clone()
    z &= y
    z |= 8
    z ^= y
    z <<= 1
    z >>= 2
    return x & y, x | 3, x ^ y, ~x, x << y, x >> y, z, 3 & x


ROWS = [
    *(Row(name, call(name), (normal(2, 3), normal(3))) for name in _COMPARISONS),
    *(Row(f"{name} of mixed dtypes", call(name), (normal(2, 3), whole(3) + 1)) for name in _COMPARISONS),
    *(Row(f"{name} with a number", call(name), (whole(3), 2.5)) for name in _COMPARISONS),
    *(Row(f"{name} with NaN", call(name), _TIES) for name in _COMPARISONS),
    *(Row(name, call(name), (normal(2, 3).round(), whole(3, high=2))) for name in _LOGICAL),
    *(Row(f"{name} of bools", call(name), _BOOLS) for name in (*_LOGICAL, *_BITWISE)),
    *(Row(name, call(name), _INTEGERS) for name in (*_BITWISE, "bitwise_left_shift", "bitwise_right_shift")),
    Row("logical_not", torch.logical_not, (normal(2, 3).round(),)),
    Row("bitwise_not", lambda x, y: (torch.bitwise_not(x), ~y), (_INTEGERS[0], _BOOLS[0])),
    Row("operators", _operators, _INTEGERS),
    Row("isclose", lambda x, y: (torch.isclose(x, y), torch.isclose(x, y, equal_nan=True)), _TIES),
    *(Row(name, call(name), (normal(2, 3), normal(3))) for name in _EXTREMES),
    *(Row(f"{name}: ties and NaN", call(name), _TIES) for name in _EXTREMES[:2]),
    *(Row(f"{name}: ties and NaN", call(name), _TIES, gradient=_IS_OF_2_13) for name in _EXTREMES[2:]),
    *(Row(f"{name} of integers", call(name), _INTEGERS) for name in _EXTREMES[:2]),
    Row("max, min of two", lambda x, y: (torch.max(x, y), x.min(y)), (normal(2, 3), normal(3))),
    Row("heaviside", torch.heaviside, (normal(2, 3).round(), normal(3)), gradient=False),
    Row("where", _where, (normal(2, 3), normal(3))),
    Row("where of mixed dtypes", lambda x, y: torch.where(x > 0, x, y), (normal(2, 3), whole(3))),
    Row("masked_fill", _filled, (normal(2, 3), normal(4))),
    Row("masked_fill of integers", lambda x: x.masked_fill(x > 3, -1), (whole(5),)),
    Row("clamp", _clamped, (torch.tensor([-2.0, -1, 0, 0.5, 1, 2, 3]),), gradient=_IS_OF_2_13),
    Row(
        "clamp with tensors",
        lambda x, y, z: (x.clamp(y, z), x.clamp(min=y), torch.clamp(x, max=z)),
        (normal(2, 3), normal(3) - 0.5, normal(2, 1)),
    ),
    Row("clamp of integers", lambda x: (x.clamp(2, 5), x.clamp(min=2.5)), (whole(5),)),
    Row("clamp of NaN", lambda x, y: (x.clamp(0, 1), x.clamp(min=y), x.clamp(max=y)), _TIES, gradient=False),
]
