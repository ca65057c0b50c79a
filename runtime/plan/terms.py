"""`Terms`: on what terms ops are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from popxl.options import SessionOptions
from runtime.targets.replicas import Replicas
from runtime.targets.target import Target


@dataclass(frozen=True)
class Terms:
    """On what terms ops are compiled: for which target, and what the Ir asks of all of them.

    Attributes:
        target: what is compiled for.
        options: those of the Ir.
        transfers: how many of each stream there are in a run.
        wide: whether 64 bits are kept.
    """

    target: Target
    options: SessionOptions
    transfers: int
    wide: bool

    @cached_property
    def replicas(self) -> Replicas:
        """Those that run the program."""
        return self.target.replicas

    @cached_property
    def slots(self) -> Any:
        """Where the arrays of remote buffers are: beside other arrays, or in the host's memory."""
        return self.replicas.sharding() if self.options.remoteBuffers == "device" else self.target.on_host

    def key(self) -> tuple[Any, ...]:
        """What makes a difference."""
        replicas = (self.replicas.count, self.replicas.sharding())
        options = (self.options.throwIfLog2ScaleTensorNotInRange, self.inlines)
        return (*replicas, self.slots, *options, self.transfers, self.wide)

    @property
    def inlines(self) -> bool:
        """Whether calls within a piece are as if they had been written out."""
        return self.options.calledGraphs == "inlined"
