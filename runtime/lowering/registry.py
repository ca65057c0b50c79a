"""The registry of lowering rules, for ops whose lowering needs the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment

if TYPE_CHECKING:
    from runtime.lowering.lower import Lowering

LoweringRule = Callable[["Lowering", Op, Environment, Context], None]

LOWERINGS: dict[OpKind, LoweringRule] = {}
"""Lowerings of ops whose meaning depends on the machine. Others have `op.kind.lowering`."""


def register_lowering(kind: OpKind) -> Callable[[LoweringRule], LoweringRule]:
    """Register the lowering rule of an op kind."""

    def register(function: LoweringRule) -> LoweringRule:
        LOWERINGS[kind] = function
        return function

    return register
