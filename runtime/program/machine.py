"""`Machine`: where sessions run, and what runs them. A tool may put its own in the place of `Session.machine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

import numpy as np

from popxl.core.tensor import Variable
from popxl.ir import Ir
from runtime.program.program import Described, Program, Ready
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


class Planned(Described):
    """A program that is neither compiled nor run: it has no state, and whatever else is asked of it ends the user's.

    Attributes:
        is_loaded: whether the device is attached, as far as the session is concerned.
        values_of_all: none; nothing is copied from a device.
    """

    def __init__(self, ir: Ir, device: Device, calls: str | None = None) -> None:
        super().__init__(ir, device, calls)
        self.is_loaded = False
        self.values_of_all: dict[Variable, np.ndarray] = {}

    def upload(self) -> None:
        """The variables stay on the host."""
        self.is_loaded = True
        self.device.loads(self)

    def download(self) -> None:
        """They are there."""

    def read_here(self, variables: Sequence[Variable]) -> None:
        """They are to be read on the host."""

    def release(self) -> None:
        """There is nothing to free."""
        self.is_loaded = False

    def __getattr__(self, name: str) -> NoReturn:
        raise NothingRuns


class PlanningMachine(Machine):
    """Runs and compiles nothing, and asks for no hardware but the CPU."""

    def device(self, description: str | Device, ir: Ir) -> Device:
        if isinstance(description, Device):
            return description
        count = ir.instance_replication_factor
        return model_device(count, devices_needed(ir), count * len(ipus_used(ir)))

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        planned = Planned(ir, device, None if ready is None else ready.calls)
        return cast(Program, planned)  # what it does not have ends the user's program
