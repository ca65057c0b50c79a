"""`Machine`: where sessions run, and what runs them. A tool may put its own in the place of `Session.machine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from popxl.core.tensor import Variable
from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime.program.program import CompiledProgram, Described, Program, Ready
from runtime.program.state import Given
from runtime.targets.devices import Device, devices_needed, find_device, ipus_used, model_device
from runtime.targets.offline import Target
from runtime.ways import best

P = TypeVar("P", bound=CompiledProgram)


class Machine:
    """Finds devices, and compiles programs for them."""

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        """The device for a description: see `runtime.targets.devices.find_device`."""
        return find_device(description, ir)

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        """A program, compiled for a device."""
        make: Any = Program if device.target is None else ProgramElsewhere  # which refuses what it does not have
        return cast(Program, _compiled(make, ir, device, ready))


def _compiled(make: Callable[..., P], ir: Ir, device: Device, ready: Ready | None) -> P:
    """A program of a class, compiled for a device in the best way, unless it is known in which."""
    if ready is not None:
        return make(ir, device, ready)
    return best(ir, device, lambda ready: make(ir, device, ready))


# What nothing runs of -------------------------------------------------------------------------------------------------


class OnHost:
    """What a session asks of a program, of one whose variables are on the host and nowhere else.

    Attributes:
        is_loaded: whether they are on the device. They are not, so that a session never runs without asking for them.
        values_of_all: none; nothing is copied from a device.
    """

    is_loaded = False

    def __init__(self) -> None:
        self.values_of_all: dict[Variable, np.ndarray] = {}

    def upload(self, given: Given | None = None) -> None:
        """The variables stay on the host."""

    def download(self) -> None:
        """They are there."""

    def read_here(self, variables: Sequence[Variable]) -> None:
        """They are to be read on the host."""

    def release(self) -> None:
        """There is nothing to free."""


class ProgramElsewhere(OnHost, CompiledProgram):
    """A program that is compiled for a machine that is not here, and so cannot be run."""

    def __init__(self, ir: Ir, device: Device, ready: Ready | None = None) -> None:
        OnHost.__init__(self)
        CompiledProgram.__init__(self, ir, device, ready)

    def run(self, feeds: tuple[Any, ...]) -> NoReturn:
        """Cannot be."""
        raise self.refusal("run")

    def recording(self) -> NoReturn:
        """Nothing runs that could be recorded."""
        raise self.refusal("recording")

    def debugging(self, infinities: bool) -> NoReturn:
        """Nothing runs that could be stopped."""
        raise self.refusal("debugging")

    def refusal(self, what: str) -> BaseException:
        """Why a session cannot do something that needs its device."""
        return PopxlError(
            f"Session.{what}: {self.device.name} is not here. The program was compiled for it, so `session.report`, "
            "`session.memory()`, `session.cost()` and `session.hlo()` tell what it needs there; to run it, make a "
            "session on a device of this machine, such as 'ipu_hw' or 'cpu'."
        )


class NothingRuns(BaseException):
    """Something was asked for that has to be run or compiled for it, of a program that is neither.

    It is no `Exception`, so that programs which handle those end, too.
    """


class Planned(OnHost, Described):
    """A program that is neither compiled nor run: it has no state, and whatever else is asked of it ends the user's."""

    def __init__(self, ir: Ir, device: Device, calls: str | None = None) -> None:
        OnHost.__init__(self)
        Described.__init__(self, ir, device, calls)

    def __getattr__(self, name: str) -> NoReturn:
        raise NothingRuns


class PlanningMachine(Machine):
    """Runs and compiles nothing, and asks for no hardware but the CPU."""

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        if isinstance(description, Device):
            return description
        count = ir.instance_replication_factor
        return model_device(count, devices_needed(ir), count * len(ipus_used(ir)))

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        planned = Planned(ir, device, None if ready is None else ready.calls)
        return cast(Program, planned)  # what it does not have ends the user's program


class StoppedProgram(ProgramElsewhere):
    """A program that is compiled for a machine that is not here; what would have to be run ends the user's."""

    def refusal(self, what: str) -> BaseException:
        return NothingRuns()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NothingRuns


class TargetMachine(Machine):
    """Compiles all programs for one machine that is not here, whichever device they ask for, and runs nothing.

    Args:
        target: the machine.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        return find_device(self._target, ir)

    def program(self, ir: Ir, device: Device, ready: Ready | None) -> Program:
        return cast(Program, _compiled(StoppedProgram, ir, device, None))
