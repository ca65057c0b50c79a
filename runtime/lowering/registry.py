"""What ops do whose meaning needs the machine. Files that say it register it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment

if TYPE_CHECKING:
    from runtime.lowering.lower import Lowering

Meaning = Callable[["Lowering", Op, Environment, Context], None]

meanings: dict[OpKind, Meaning] = {}
"""What ops do whose meaning needs the machine. Others say it: `op.kind.lowering`."""


def meaning(kind: OpKind) -> Callable[[Meaning], Meaning]:
    """Register what an op of this kind does."""

    def register(function: Meaning) -> Meaning:
        meanings[kind] = function
        return function

    return register
