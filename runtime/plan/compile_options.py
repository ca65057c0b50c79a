"""`CompileOptions`: compile options of ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from popxl.options import SessionOptions
from runtime.targets.compile_target import HOST, CompileTarget
from runtime.targets.replicas import Replicas


@dataclass(frozen=True)
class CompileOptions:
    """Compile options of ops: the compile target, and options of the Ir.

    Attributes:
        x64: whether 64-bit types are kept.
    """

    compile_target: CompileTarget
    session_options: SessionOptions
    x64: bool

    @cached_property
    def replicas(self) -> Replicas:
        """Replicas running the program."""
        return self.compile_target.replicas

    @cached_property
    def slots(self) -> Any:
        """Sharding of remote buffer arrays: device memory or host memory."""
        where = self.session_options.remoteBuffers
        is_beside = where == "device" or (where == "auto" and self.compile_target.platform == "cpu")
        return self.replicas.sharding() if is_beside else self.compile_target.on_host

    @property
    def has_slots_on_host(self) -> bool:
        """Whether remote buffer arrays reside in a separate host memory."""
        return self.compile_target.platform != "cpu" and self.slots.memory_kind == HOST

    def key(self) -> tuple[Any, ...]:
        """Key of options that affect compilation."""
        replicas = (self.replicas.count, self.replicas.sharding())
        options = self.session_options
        said = (options.throwIfLog2ScaleTensorNotInRange, options.precision, options.enableStochasticRounding)
        return (*replicas, self.slots, *said, self.inlines, self.x64)

    @property
    def inlines(self) -> bool:
        """Whether calls within a segment are inlined: XLA for GPUs fuses nothing inside kept calls, XLA for TPUs keeps
        no calls."""
        asked = self.session_options.calledGraphs
        return asked == "inlined" or (asked != "kept" and self.compile_target.platform != "cpu")
