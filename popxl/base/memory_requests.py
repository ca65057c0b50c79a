"""Requests of tools to training steps that leave their memory open: plan, micro-batches, location of the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

StateLocation = Literal["device", "host"]
"""Location of the optimiser state between steps."""


class MemoryRequest(NamedTuple):
    """Requested memory plan, micro-batches and state location, for training steps that leave them open.

    Attributes:
        memory: memory plan or policy.
        micro_batches: number of parts of a batch.
        optimizer_state: where the state of the optimiser is.
    """

    memory: Any
    micro_batches: int = 1
    optimizer_state: StateLocation = "device"


@dataclass
class RequestedMemory:
    """Request to a program, with its result.

    Attributes:
        samples: samples of a batch whose number of micro-batches the program leaves open; 1 if it states the number.
        is_state_open: whether the program leaves open where the state of the optimiser is.
        applied: objects that applied it while the program was built.
        live_micro_batches: for graphs that stages of a pipeline call, maximum number of micro-batches with live
            activations on a device at a time.
        overrides: whether the request replaces plans and policies that the program states itself.
        has_overridden: whether it has replaced one.
    """

    request: MemoryRequest
    samples: int = 1
    is_state_open: bool = False
    applied: list[Any] = field(default_factory=list)
    live_micro_batches: dict[Any, int] = field(default_factory=dict)
    overrides: bool = False
    has_overridden: bool = False

    def memory_of(self, stated: Any) -> Any:
        """Plan or policy of a step that states its own, or `None`."""
        if stated is not None and not self.overrides:
            return stated
        self.has_overridden |= stated is not None
        return self.request.memory


_requested: ContextVar[RequestedMemory | None] = ContextVar("current_request", default=None)


def current_request() -> RequestedMemory | None:
    """Request of a tool; `None` without one."""
    return _requested.get()


@contextmanager
def requesting_memory(
    memory: Any, micro_batches: int = 1, optimizer_state: StateLocation = "device", *, overrides: bool = False
) -> Iterator[RequestedMemory]:
    """Context manager that makes a `MemoryRequest`; it may override the plans of the program."""
    requested = RequestedMemory(MemoryRequest(memory, micro_batches, optimizer_state), overrides=overrides)
    token = _requested.set(requested)
    try:
        yield requested
    finally:
        _requested.reset(token)
