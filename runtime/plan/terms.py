"""`Terms`: on what terms ops are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from popxl.options import SessionOptions
from runtime.targets.destination import HOST, Destination
from runtime.targets.replicas import Replicas


@dataclass(frozen=True)
class Terms:
    """On what terms ops are compiled: for which destination, and what the Ir asks of all of them.

    Attributes:
        destination: what is compiled for.
        options: those of the Ir.
        wide: whether 64 bits are kept.
    """

    destination: Destination
    options: SessionOptions
    wide: bool

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas that run the program."""
        return self.destination.replicas

    @cached_property
    def slots(self) -> Any:
        """Where the arrays of remote buffers are: beside other arrays, or in the host's memory."""
        where = self.options.remoteBuffers
        is_beside = where == "device" or (where == "auto" and self.destination.platform == "cpu")
        return self.replicas.sharding() if is_beside else self.destination.on_host

    @property
    def has_slots_on_host(self) -> bool:
        """Whether the arrays of remote buffers are in a memory of their own."""
        return self.destination.platform != "cpu" and self.slots.memory_kind == HOST

    def key(self) -> tuple[Any, ...]:
        """What makes a difference."""
        replicas = (self.replicas.count, self.replicas.sharding())
        options = (self.options.throwIfLog2ScaleTensorNotInRange, self.options.precision, self.inlines)
        return (*replicas, self.slots, *options, self.wide)

    @property
    def inlines(self) -> bool:
        """Whether calls within a piece are as if they had been written out: XLA for GPUs fuses nothing in calls that it
        keeps, and XLA for TPUs keeps none."""
        asked = self.options.calledGraphs
        return asked == "inlined" or (asked != "kept" and self.destination.platform != "cpu")
