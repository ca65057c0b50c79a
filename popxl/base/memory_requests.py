"""Requests of tools to training steps that leave their memory open: plan, micro-batches, location of the state, logits
in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

StateLocation = Literal["device", "host"]
"""Location of the optimiser state between steps."""


class Logits(NamedTuple):
    """Logits of a loss, a product of samples and a matrix, whose number of chunks is open.

    Attributes:
        samples, classes: shape of the logits.
        width: number of elements of a sample.
        dtype, itemsize: name of the dtype of both factors, and bytes of an element.
        chunks: number of chunks by default.
    """

    samples: int
    width: int
    classes: int
    dtype: str
    itemsize: int
    chunks: int = 1

    def chunk_count(self, requested: int) -> int:
        """Number of chunks for a requested one: no fewer than by default, and no more than there are samples."""
        return min(max(requested, self.chunks), max(self.samples, 1))


class MemoryRequest(NamedTuple):
    """Requested memory plan, micro-batches and so on, for training steps that leave them open.

    Attributes:
        memory: memory plan or policy.
        micro_batches: number of parts of a batch.
        optimizer_state: where the state of the optimiser is.
        logit_chunks: number of chunks of the logits of losses.
    """

    memory: Any
    micro_batches: int = 1
    optimizer_state: StateLocation = "device"
    logit_chunks: int = 1


class RequestedPolicy(str):
    """Policy that a tool requests: equal to the one that a program may state itself, but not the same object."""


@dataclass
class RequestedMemory:
    """Request to a program, with its result.

    Attributes:
        open_samples: samples of the batches whose number of micro-batches the program leaves open.
        is_state_open: whether the program leaves open where the state of the optimiser is.
        open_logits: logits whose number of chunks the program leaves open.
        applied: objects that applied it while the program was built.
        open_steps: number of training steps that state no plan or policy, and so get the requested one.
        live_micro_batches: for graphs that stages of a pipeline call, maximum number of micro-batches with live
            activations on a device at a time.
        overrides: whether the request replaces plans and policies that the program states itself.
        has_overridden: whether it has replaced one.
    """

    request: MemoryRequest
    open_samples: list[int] = field(default_factory=list)
    is_state_open: bool = False
    open_logits: list[Logits] = field(default_factory=list)
    applied: list[Any] = field(default_factory=list)
    open_steps: int = 0
    live_micro_batches: dict[Any, int] = field(default_factory=dict)
    overrides: bool = False
    has_overridden: bool = False

    @property
    def samples(self) -> int:
        """Largest number of micro-batches that all batches with an open number can be divided into."""
        return math.gcd(*self.open_samples) or 1

    def replaces(self, stated: Any) -> bool:
        """Whether the request replaces a plan or policy, or `None`, that a step states."""
        return stated is None or self.overrides

    def memory_of(self, stated: Any) -> Any:
        """Plan or policy of a step that states its own, or `None`."""
        if not self.replaces(stated):
            return stated
        self.has_overridden |= stated is not None
        self.open_steps += stated is None
        return self.request.memory


_requested: ContextVar[RequestedMemory | None] = ContextVar("current_request", default=None)


def current_request() -> RequestedMemory | None:
    """Request of a tool; `None` without one."""
    return _requested.get()


@contextmanager
def requesting_memory(
    memory: Any,
    micro_batches: int = 1,
    optimizer_state: StateLocation = "device",
    logit_chunks: int = 1,
    *,
    overrides: bool = False,
) -> Iterator[RequestedMemory]:
    """Context manager that makes a `MemoryRequest`; it may override the plans of the program."""
    memory = RequestedPolicy(memory) if isinstance(memory, str) else memory
    request = MemoryRequest(memory, micro_batches, optimizer_state, logit_chunks)
    requested = RequestedMemory(request, overrides=overrides)
    token = _requested.set(requested)
    try:
        yield requested
    finally:
        _requested.reset(token)
