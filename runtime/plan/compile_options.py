"""`CompileOptions`: target and settings for compiling ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from popxl.base.arrays import Array
from popxl.core.tensor import Constant, Tensor
from popxl.fp8_utils import to_device
from popxl.options import SessionOptions
from runtime.lowering.lower import inlines_calls
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

    def upload(self, t: Constant) -> Array:
        """Array of a constant, on all replicas."""
        return self.replicas.broadcast(to_device(t.data, t.dtype))

    def spec(self, t: Tensor) -> Any:
        """Abstract array of a tensor, on all replicas."""
        return self.replicas.spec(t.shape, t.dtype.as_jax())

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
        numbers = (options.throwIfLog2ScaleTensorNotInRange, options.precision, options.enableStochasticRounding)
        return (*replicas, self.slots, *numbers, self.inlines, self.x64)

    @property
    def inlines(self) -> bool:
        """Whether calls within a segment are inlined."""
        return inlines_calls(self.session_options, self.compile_target.platform)
