"""Ops that act on each number by itself."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal, positive, whole

_UNARY = ("abs", "ceil", "cos", "detach", "exp", "expm1", "floor", "neg", "relu", "sigmoid", "sign", "sin", "tanh")
_OF_POSITIVE = ("log", "log1p", "log2", "reciprocal", "rsqrt", "sqrt")
_BINARY = ("add", "sub", "mul", "div", "maximum", "eq", "ne", "gt", "lt")


def _call(name: str):
    return lambda *operands: getattr(torch, name)(*operands)


ROWS = [
    *(Row(name, _call(name), (normal(2, 3),)) for name in _UNARY),
    *(Row(name, _call(name), (positive(2, 3),)) for name in _OF_POSITIVE),
    *(Row(f"{name} of integers", _call(name), (whole(4),)) for name in ("exp", "abs", "neg", "sign")),
    *(Row(name, _call(name), (normal(2, 3), normal(3))) for name in _BINARY),
    *(Row(f"{name} of mixed dtypes", _call(name), (normal(2, 3), whole(3) + 1)) for name in _BINARY),
    *(Row(f"{name} with a number", _call(name), (whole(3), 2.5)) for name in _BINARY if name != "maximum"),
    Row("add, alpha", lambda x, y: torch.add(x, y, alpha=2), (normal(3), normal(3))),
    Row("in place", lambda x, y: x.mul_(y).add_(1).clamp_(min=0), (normal(2, 3), normal(3))),
    Row("floor division", lambda x, y: x // y, (whole(5) - 4, torch.tensor([2, 3, -2, 4, 1]))),
    Row("truncated division", lambda x: torch.div(x, 0.75, rounding_mode="trunc"), (normal(2, 3),)),
    Row("pow", lambda x: x**3, (normal(2, 3),)),
    Row("pow of a number", lambda x: 2.0**x, (normal(2, 3),)),
    Row("to", lambda x: x.to(torch.int64) + x.half(), (normal(2, 3),)),
    Row("copy_", lambda x, y: x.copy_(y), (normal(2, 3), normal(3))),
    Row("isnan, isinf, isfinite", lambda x: [torch.isnan(x), torch.isinf(x), torch.isfinite(x)], (torch.tensor([1.0, torch.nan, -torch.inf]),)),
]
