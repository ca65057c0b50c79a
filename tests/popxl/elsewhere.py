"""Programs lowered for machines that are not here: what JAX hands to their compilers, of which none is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

import popxl
from runtime.lowering.lower import recursing_into
from runtime.program.build_layout import layout_for_target
from runtime.program.compiled import lowered_program
from runtime.program.layout import Layout
from runtime.targets.compile_target import CompileTarget
from runtime.targets.replicas import Replicas


class StandIns(Replicas):
    """Replicas on CPUs that stand for those of another platform."""

    def __init__(self, count: int, devices: tuple[jax.Device, ...], stands_for: str) -> None:
        super().__init__(count, devices)
        self._stands_for = stands_for

    @property
    def platform(self) -> str:
        return self._stands_for

    @property
    def is_cpu(self) -> bool:
        return False


@dataclass(frozen=True)
class Elsewhere(CompileTarget):
    """A compile target whose devices stand for those of another platform."""

    stands_for: str = "tpu"

    @property
    def platform(self) -> str:
        return self.stands_for

    @cached_property
    def replicas(self) -> Replicas:
        return StandIns(self.count, self.devices, self.stands_for)

    def lower(self, jitted: Any, *arguments: Any) -> Any:
        platform = "cuda" if self.stands_for == "gpu" else self.stands_for
        return jitted.trace(*arguments).lower(lowering_platforms=(platform,))


def layout_for(ir: popxl.Ir, platform: str, devices: int = 1) -> Layout:
    """A program, laid out for so many devices of a platform: "tpu", "cuda"; or "cpu", as they are."""
    found, count = tuple(jax.local_devices(backend="cpu")[:devices]), ir.instance_replication_factor
    kind = "gpu" if platform == "cuda" else platform  # what such devices say of themselves
    target = CompileTarget(found, count) if platform == "cpu" else Elsewhere(found, count, stands_for=kind)
    return layout_for_target(ir, target)


def lowered_text(ir: popxl.Ir, platform: str, devices: int = 1) -> str:
    """The StableHLO of a program for a platform."""
    layout = layout_for(ir, platform, devices)
    with layout.x64_context(), recursing_into(layout.main):
        return str(lowered_program(layout).as_text())
