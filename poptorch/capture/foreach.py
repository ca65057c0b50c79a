"""`torch._foreach_add_` and similar ops, applied tensor by tensor through the corresponding single-tensor function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_PREFIX = "_foreach_"


def tensorwise(op: torch._ops.OpOverload) -> Callable[..., list[torch.Tensor] | None] | None:
    """Tensor-by-tensor implementation of a `_foreach` op on lists; `None` for other ops."""
    if not op._opname.startswith(_PREFIX):
        return None
    name = op._opname.removeprefix(_PREFIX)
    arguments = op._schema.arguments

    def is_divided(i: int) -> bool:
        return str(arguments[i].type).startswith("List") or arguments[i].name == "scalars"

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor] | None:
        count = next(len(each) for i, each in enumerate(args) if is_divided(i))
        rows = zip(*(each if is_divided(i) else [each] * count for i, each in enumerate(args)), strict=True)
        made = [_run(name, row, kwargs) for row in rows]
        return None if name.endswith("_") else made

    return run


def _run(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    if (function := _FUNCTIONS.get(name.removesuffix("_"))) is None:
        made: torch.Tensor = getattr(torch.Tensor, name)(*args, **kwargs)
        return made
    made = function(*args, **kwargs)
    return args[0].copy_(made) if name.endswith("_") else made


_FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "addcdiv": lambda t, a, b, value=1: t + a / b * value,
    "addcmul": lambda t, a, b, value=1: t + a * b * value,
    "maximum": lambda t, other: t.maximum(other) if isinstance(other, torch.Tensor) else t.clamp_min(other),
    "minimum": lambda t, other: t.minimum(other) if isinstance(other, torch.Tensor) else t.clamp_max(other),
    "norm": lambda t, order=2, dtype=None: torch.linalg.vector_norm(t, order, dtype=dtype),
    "pow": torch.pow,
    "powsum": lambda t, order=2, dtype=None: t.abs().pow(order).sum(dtype=dtype),
}
"""Operations without a method of tensors, or whose method refuses some kinds of arguments."""
