"""`Machine`: where sessions run, and what runs them. A tool may put its own in the place of `Session.machine`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from popxl.ir import Ir
from runtime.program.program import Program, Ready
from runtime.progress import Watch
from runtime.targets.devices import Device, devices_needed, find_device, ipus_used, model_device


class Machine:
    """Finds devices, and compiles programs for them."""

    def device(self, description: str | Device, ir: Ir) -> Device:
        """The device for a description: see `runtime.targets.devices.find_device`."""
        return find_device(description, ir)

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        """A program, compiled for a device."""
        return Program(ir, device, ready)


class NothingRuns(BaseException):
    """Something was asked for that has to be run or compiled for it, of a program that is neither.

    It is no `Exception`, so that programs which handle those end, too.
    """


class Planned(Program):
    """A program that is neither compiled nor run: what can be said of it without."""

    def _compiling(self, ir: Ir, ready: Ready | None, afresh: bool) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)

    def _one_program(self, known: Sequence[Any] | None, watch: Watch) -> None:
        return None

    def _plan(self, choice: Any, known: Sequence[Any] | None, watch: Watch) -> Any:
        return None

    @property
    def is_fresh(self) -> NoReturn:
        raise NothingRuns

    def executables(self) -> NoReturn:
        raise NothingRuns

    def text(self) -> NoReturn:
        raise NothingRuns

    def temporaries(self) -> NoReturn:
        raise NothingRuns

    def recording(self) -> NoReturn:
        raise NothingRuns

    def debugging(self, infinities: bool) -> NoReturn:
        raise NothingRuns

    def upload(self) -> None:
        """The variables stay on the host."""
        self.is_loaded = True
        self.device.loads(self)

    def download(self) -> None:
        """They are there."""

    def run(self, feeds: tuple[Any, ...]) -> NoReturn:
        raise NothingRuns


class PlanningMachine(Machine):
    """Runs and compiles nothing, and asks for no hardware but the CPU."""

    def device(self, description: str | Device, ir: Ir) -> Device:
        if isinstance(description, Device):
            return description
        count = ir.instance_replication_factor
        return model_device(count, devices_needed(ir), count * len(ipus_used(ir)))

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        return Planned(ir, device, ready)
