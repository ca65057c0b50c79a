"""The ops that `poptorch` adds. On the CPU each has the same meaning."""

from __future__ import annotations

import torch

import poptorch
from tests.poptorch.operators import Row, normal

_ONE = torch.tensor([1])


def _loop(x: torch.Tensor) -> torch.Tensor:
    return poptorch.for_loop(3, lambda t: t * x + 1, [x])[0]


def _branches(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    return poptorch.cond(choice, lambda a: a * 2, [x], lambda a: a - 1, [x])[0]


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return poptorch.CPU(lambda t: t.flip(0) + 1, "flipped")(x * 2) * 3


ROWS = [
    Row("identity_loss, sum", lambda x: poptorch.identity_loss(x * 2, "sum"), (normal(2, 3),)),
    Row("identity_loss, mean", lambda x: poptorch.identity_loss(x * 2, "mean"), (normal(2, 3),)),
    Row("identity_loss, none", lambda x: poptorch.identity_loss(x * 2, "none"), (normal(2, 3),)),
    Row("nop", poptorch.nop, (normal(2, 3),)),
    Row("return_all", poptorch.ops.return_all, (normal(2, 3),)),
    Row("ipu_print_tensor", lambda x: poptorch.ipu_print_tensor(x * 2, print_gradient=False), (normal(2),)),
    Row("set_available_memory", lambda x, y: poptorch.set_available_memory(x @ y, 0.3), (normal(2, 3), normal(3, 4))),
    Row(
        "serializedMatMul",
        lambda x, y: poptorch.serializedMatMul(x, y, poptorch.MatMulSerializationMode.ReducingDim, 3),
        (normal(2, 3), normal(3, 4)),
    ),
    Row("dynamic_slice", lambda x, i: poptorch.dynamic_slice(x, 1, i, 2, 1), (normal(2, 5), _ONE)),
    Row("dynamic_update", lambda x, y, i: poptorch.dynamic_update(x, y, 1, i, 2), (normal(2, 5), normal(2, 2), _ONE)),
    Row("for_loop", _loop, (normal(2, 3),), gradient=False),
    *(Row(f"cond, {c}", _branches, (normal(2, 3), torch.tensor([c])), gradient=False) for c in (True, False)),
    Row("CPU", _on_host, (normal(2, 3),), gradient=False),
]
