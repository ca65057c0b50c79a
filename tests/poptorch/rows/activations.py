"""Activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal

_PLAIN = (
    "relu6 elu selu celu gelu silu mish hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink leaky_relu "
    "softplus softsign logsigmoid tanh sigmoid rrelu"
).split()
_IN_PLACE = (
    "relu",
    "relu6",
    "elu",
    "selu",
    "celu",
    "silu",
    "mish",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
)
_NOT_IN_HALF = ("celu", "rrelu")

_BENDS = torch.tensor([-100.0, -6, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 100])
"""Where some activation has a bend, and far away, where a branch that is not taken would overflow."""


def _call(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: getattr(F, name)(x)


def _all_but(names: Sequence[str]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    return lambda x: [getattr(F, name)(x) for name in _PLAIN if name not in names]


def _modules(x: torch.Tensor) -> list[torch.Tensor]:
    modules = (
        nn.ReLU(), nn.ReLU6(), nn.ELU(0.5), nn.SELU(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.Hardtanh(-2, 0.5),
        nn.Hardswish(), nn.Hardsigmoid(), nn.Hardshrink(0.25), nn.Softshrink(0.25), nn.Tanhshrink(), nn.Softplus(2),
        nn.LeakyReLU(0.3), nn.Softsign(), nn.LogSigmoid(), nn.Tanh(), nn.Sigmoid(), nn.Threshold(0.1, 7),
    )  # fmt: skip
    return [module(x) for module in modules]


ROWS = [
    *(Row(name, _call(name), (normal(2, 3) * 3,), half=name not in _NOT_IN_HALF) for name in _PLAIN),
    Row("bends", _all_but(_NOT_IN_HALF), (_BENDS,)),
    Row("bends_of_others", lambda x: [getattr(F, name)(x) for name in _NOT_IN_HALF], (_BENDS,), half=False),
    *(
        Row(
            f"{name} in place",
            lambda x, name=name: (getattr(F, name)(x, inplace=True), x),
            (normal(2, 3),),
            half=name not in _NOT_IN_HALF,
        )
        for name in _IN_PLACE
    ),
    Row("modules", _modules, (normal(2, 3),)),
    Row("celu, alpha", lambda x: F.celu(x, 0.5), (normal(2, 3),), half=False),
    Row("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), (normal(2, 3),)),
    Row("softplus, beta and threshold", lambda x: F.softplus(x, beta=2, threshold=1), (normal(2, 3),)),
    Row("threshold", lambda x: F.threshold(x, 0.5, 20), (_BENDS,)),
    Row("hardtanh of integers", lambda x: F.hardtanh(x, -2, 3), (torch.tensor([-5, 0, 5]),)),
    Row("rrelu, evaluated", lambda x: F.rrelu(x, 0.25, 0.75, training=False), (normal(2, 3),), half=False),
    Row("prelu", F.prelu, (normal(2, 3, 4), normal(3))),
    Row("prelu, one weight", F.prelu, (normal(2, 3), normal(1))),
    Row("glu", lambda x: (F.glu(x, 1), F.glu(x, -1)), (normal(2, 4, 6),)),
    *(Row(f"{name} of images", getattr(F, name), (normal(2, 3, 4, 5),)) for name in ("gelu", "mish")),
]
