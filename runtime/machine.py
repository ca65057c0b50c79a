"""`Machine`: device lookup, compilation and execution for sessions. Tools may replace `Session.machine`."""

from __future__ import annotations

from typing import NoReturn

from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime.mode_selection import compile_fastest
from runtime.program.build_layout import layout_for
from runtime.program.compiled import CompiledProgram, Precompiled, compile_program
from runtime.program.run import Runner
from runtime.program.store import VariableStore
from runtime.targets.devices import Device, DeviceCount, find_device, model_device
from runtime.targets.offline import Target


class Machine:
    """Finds devices, and compiles and runs programs."""

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        """Device for a description: see `runtime.targets.devices.find_device`."""
        return find_device(description, ir)

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        """Compile a program for a device, selecting the fastest mode of called graphs unless precompiled."""
        return compile_fastest(ir, device) if precompiled is None else compile_program(ir, device, precompiled)

    def runner(self, program: CompiledProgram) -> Runner | None:
        """Runner of a compiled program; `None` for offline targets."""
        return Runner(program, VariableStore(program.layout)) if program.device.target is None else None

    def refusal(self, what: str, device: Device) -> BaseException:
        """Error for session methods that require a runner."""
        return PopxlError(
            f"Session.{what}: {device.name} is not here. The program was compiled for it, so `session.report`, "
            "`session.memory()`, `session.cost()` and `session.hlo()` tell what it needs there; to run it, make a "
            "session on a device of this machine, such as 'ipu_hw' or 'cpu'."
        )


# For tools that run nothing -------------------------------------------------------------------------------------------


class NothingRuns(BaseException):
    """Raised when a session requires execution or compilation under a tool that does neither; ends the user's program.

    Not an `Exception`, so it also ends programs that handle all of those.
    """


class IdleMachine(Machine):
    """Machine that compiles programs for their devices and runs nothing: attempting to run ends the user's program."""

    def runner(self, program: CompiledProgram) -> None:
        return None

    def refusal(self, what: str, device: Device) -> BaseException:
        return NothingRuns()


class NotCompiled:
    """Stands in for the executable of a program that is only laid out; any use of it ends the user's program."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, of `copy` for example
            raise AttributeError(name)
        raise NothingRuns

    def __call__(self) -> NoReturn:
        raise NothingRuns


class LayoutMachine(IdleMachine):
    """Machine without compilation and execution; requires no hardware except the CPU."""

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        return description if isinstance(description, Device) else model_device(DeviceCount.for_program(ir))

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        layout = layout_for(ir, device, None if precompiled is None else precompiled.mode)
        missing = NotCompiled()
        return CompiledProgram(device, layout, layout.decision.reason, missing, missing, seconds=0.0, is_cached=False)


class TargetMachine(IdleMachine):
    """Machine compiling all programs for one offline target, ignoring requested devices; runs nothing."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def device(self, description: str | Device | Target, ir: Ir) -> Device:
        return find_device(self._target, ir)

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        return super().program(ir, device, None)
